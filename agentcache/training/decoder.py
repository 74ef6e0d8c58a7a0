"""Cache-conditioned fine-tuning (PrefillShare, arXiv 2602.12029): a LoRA decoder on the frozen base's 4-bit prompt KV.

The decoder computes the prompt's last token and the answer, which the loss covers.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
from mlx.utils import tree_flatten, tree_map_with_path

from agentcache.models.adapter_files import LowRank, ModuleName
from agentcache.models.adapters import AdapterWeights, read_adapter
from agentcache.training.decoder_cache import PromptCache
from agentcache.training.decoder_data import Batches, DecoderBatch, Example
from agentcache.training.decoder_files import Checkpoint, read_checkpoint, write_adapter
from agentcache.training.decoder_model import FrozenBase

# Not routers and experts.
_TARGETS = {"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"}
_TARGETS |= {"gate_proj", "up_proj", "down_proj", "gate_up_proj"}

# Bytes: buffers of all lengths would fill the device.
CACHE_LIMIT = 8 << 30


@dataclass(frozen=True)
class Progress:
    step: int
    loss: float
    tokens_a_second: float


@dataclass(frozen=True)
class DecoderRecipe:
    """Hyperparameters of a decoder, which adds scale * x @ a @ b to projections of the last layers.

    `learning_rate`: the peak.
    """

    rank: int = 16
    scale: float = 2.0
    num_layers: int = 16
    steps: int = 500
    rows: int = 4
    learning_rate: float = 5e-4
    max_norm: float = 1.0
    seed: int = 1


class DecoderTrainer:
    """Trains a decoder. Raises UnsupportedAdapter if it cannot be served.

    `parameters`: float32 a [in, r] and b [r, out], named as `3.self_attn.q_proj.lora_a`.
    """

    def __init__(self, base: FrozenBase, recipe: DecoderRecipe, examples: Sequence[Example]) -> None:
        self.base, self.recipe = base, recipe
        self.batches = Batches(examples, recipe.rows, recipe.seed)
        self.parameters: dict[str, mx.array] = _new_matrices(base, recipe)
        self.optimizer = optimizers.Adam(_schedule(recipe), bias_correction=True)
        self.optimizer.init(self.parameters)
        self.step = 0
        self._digest = _digest(examples)
        self._served = self._load_fresh()

    def _load_fresh(self) -> AdapterWeights:
        with tempfile.TemporaryDirectory(prefix="agentcache-decoder-") as folder:
            self.export(Path(folder))
            return self.base.adapters.load(read_adapter(Path(folder), self.base.adapters.modules))

    def run(self, report: Callable[[Progress], None] = lambda progress: None, every: int = 10) -> None:
        losses, tokens, since = [], 0, time.perf_counter()
        while self.step < self.recipe.steps:
            batch = self.batches.batch(self.step)
            losses.append(self.train_on(batch))
            tokens += int(batch.lengths.sum() + batch.weights.sum())
            if self.step % every == 0 or self.step == self.recipe.steps:
                mean = sum(losses) / len(losses)
                report(Progress(self.step, mean, tokens / (time.perf_counter() - since)))
                losses, tokens, since = [], 0, time.perf_counter()

    def train_on(self, batch: DecoderBatch) -> float:
        prompt = self.prefill(batch)
        loss, gradients = mx.value_and_grad(lambda parameters: self.loss(parameters, prompt, batch))(self.parameters)
        gradients, _ = optimizers.clip_grad_norm(gradients, self.recipe.max_norm)
        self.parameters = self.optimizer.apply_gradients(gradients, self.parameters)
        mx.eval(loss, self.parameters, self.optimizer.state)
        self.step += 1
        return float(loss.item())

    def prefill(self, batch: DecoderBatch) -> list[PromptCache]:
        prompt = self.base.prefill(mx.array(batch.prompts))
        mx.eval([(layer.keys, layer.values) for layer in prompt])
        return prompt

    def loss(self, parameters: Mapping[str, mx.array], prompt: Sequence[PromptCache], batch: DecoderBatch) -> mx.array:
        logits = self.logits(parameters, prompt, batch)
        losses = nn.losses.cross_entropy(logits, mx.array(batch.targets), reduction="none")
        weights = mx.array(batch.weights)
        return (losses * weights).sum() / weights.sum()

    def logits(
        self, parameters: Mapping[str, mx.array], prompt: Sequence[PromptCache], batch: DecoderBatch
    ) -> mx.array:
        """Return logits after `batch.inputs`, float32 [B, A, vocabulary]."""
        return self.base.decode(mx.array(batch.inputs), prompt, mx.array(batch.lengths), self._weights(parameters))

    def _weights(self, parameters: Mapping[str, mx.array]) -> AdapterWeights:
        pairs = {}
        for name, served in self._served.matrices.items():
            a, b = (parameters[_parameter(name, side)] for side in "ab")
            pairs[name] = LowRank(a.astype(served.a.dtype), (self.recipe.scale * b).astype(served.b.dtype))
        return AdapterWeights(self._served.adapter, pairs)

    def export(self, folder: Path) -> None:
        write_adapter(folder, self.base.model, self.parameters, self.recipe.scale)

    def save(self, folder: Path) -> None:
        Checkpoint(self._state(), self.step, self._identity()).write(folder)

    def load(self, folder: Path) -> None:
        """Restore a checkpoint. Raises ConfigError if base, recipe or examples differ."""
        checkpoint = read_checkpoint(folder, self._identity())
        self.step = checkpoint.step
        self.parameters = tree_map_with_path(lambda name, _: checkpoint.arrays[f"model.{name}"], self.parameters)
        self.optimizer.state = tree_map_with_path(
            lambda name, _: checkpoint.arrays[f"optimizer.{name}"], self.optimizer.state
        )

    def _state(self) -> dict[str, mx.array]:
        return dict(tree_flatten({"model": self.parameters, "optimizer": self.optimizer.state}))

    def _identity(self) -> dict[str, Any]:
        return {**asdict(self.recipe), "model": self.base.fingerprint, "examples": self._digest}


def _parameter(name: ModuleName, side: str) -> str:
    return f"{name.layer}.{name.path}.lora_{side}"


def _new_matrices(base: FrozenBase, recipe: DecoderRecipe) -> dict[str, mx.array]:
    # As in mlx-lm.
    first = len(base.model.layers) - recipe.num_layers
    matrices = {}
    key = mx.random.key(recipe.seed)
    for name, linear in sorted(base.adapters.modules.linears.items()):
        if name.layer >= first and name.path.rpartition(".")[2] in _TARGETS:
            key, own = mx.random.split(key)
            bound = 1 / math.sqrt(linear.in_dim)
            matrices[_parameter(name, "a")] = mx.random.uniform(-bound, bound, (linear.in_dim, recipe.rank), key=own)
            matrices[_parameter(name, "b")] = mx.zeros((recipe.rank, linear.out_dim))
    return matrices


def _schedule(recipe: DecoderRecipe) -> Callable[[mx.array], mx.array]:
    highest, warmup = recipe.learning_rate, max(1, recipe.steps // 10)
    rise = optimizers.linear_schedule(highest / warmup, highest, warmup)
    fall = optimizers.cosine_decay(highest, max(1, recipe.steps - warmup), highest / 20)
    schedule: Callable[[mx.array], mx.array] = optimizers.join_schedules([rise, fall], [warmup])
    return schedule


def _digest(examples: Sequence[Example]) -> str:
    return hashlib.blake2b(repr(list(examples)).encode(), digest_size=16).hexdigest()
