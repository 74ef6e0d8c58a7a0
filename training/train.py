"""Training from short texts to long ones, and checkpoints."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optimizers
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.qwen3 import Model

from agentcache.system.durable import sync_path
from agentcache.training.decoder import Progress
from training.corpus import Batch, Corpus
from training.dialogue import Dialogue
from training.facts import Question
from training.model import forward, new_model, weighted_loss
from training.recall import recall_case


@dataclass(frozen=True)
class Stage:
    """Part of the curriculum.

    `mixture`: shares of `corpus.WRITERS`. `lengths`: documents' tokens, in turn. `rounded`: KV to 4 bits.
    """

    steps: int
    lengths: tuple[int, ...]
    mixture: dict[str, float]
    rounded: bool


@dataclass(frozen=True)
class Recipe:
    """All parameters that determine the weights.

    `learning_rate`: maximum after `warmup` steps; cosine decay to a twentieth.
    """

    seed: int
    stages: tuple[Stage, ...]
    tokens_a_step: int = 65536
    learning_rate: float = 2e-3
    warmup: int = 300
    weight_decay: float = 0.05
    max_norm: float = 1.0

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    def scaled(self, share: float) -> Recipe:
        return replace(self, stages=tuple(replace(s, steps=max(1, int(s.steps * share))) for s in self.stages))


_SHORT = {"facts": 0.75, "gossip": 0.04, "records": 0.06, "merging": 0.03, "tools": 0.06, "small_talk": 0.06}
_ALL = {
    "facts": 0.33,
    "negotiation": 0.21,
    "gossip": 0.10,
    "records": 0.18,
    "merging": 0.05,
    "tools": 0.09,
    "small_talk": 0.04,
}
RECIPE = Recipe(
    seed=1,
    stages=(
        Stage(1500, (128, 256), _SHORT, rounded=False),
        Stage(4000, (256, 512, 1024), _ALL, rounded=True),
        Stage(6500, (512, 1024, 2048, 2560), _ALL, rounded=True),
        Stage(2000, (128, 256, 512, 1024, 2048, 2560), _ALL, rounded=True),
    ),
)


def conversations(corpus: Corpus, count: int, length: int = 512) -> Iterator[Mapping[str, Any]]:
    mixture = RECIPE.stages[-1].mixture
    for index in range(count):
        dialogue = corpus.write(mixture, length, "decoder", index)
        yield {"messages": dialogue.rendered(), "tools": dialogue.tools or None}


class Trainer:
    """Trains a model: float32 parameters, arithmetic in `dtype`."""

    def __init__(self, recipe: Recipe, config: dict[str, Any], corpus: Corpus, dtype: mx.Dtype = mx.float32) -> None:
        self.recipe, self.config, self.corpus, self.dtype = recipe, config, corpus, dtype
        self.model: Model = new_model(config, recipe.seed)
        self.parameters: dict[str, Any] = self.model.parameters()
        self.optimizer = optimizers.AdamW(_schedule(recipe), betas=[0.9, 0.98], weight_decay=recipe.weight_decay)
        self.optimizer.init(self.parameters)
        self.step = 0
        self._compiled: dict[bool, Callable[..., mx.array]] = {}

    def run(
        self, workers: int = 0, report: Callable[[Progress], None] = lambda progress: None, every: int = 50
    ) -> None:
        losses, tokens, since = [], 0, time.perf_counter()
        for stage, batch in self._batches(workers):
            losses.append(self.train_on(batch, stage.rounded))
            tokens += batch.token_ids.size
            if self.step % every == 0 or self.step == self.recipe.steps:
                loss = mx.mean(mx.stack(losses)).item()
                report(Progress(self.step, loss, tokens / (time.perf_counter() - since)))
                losses, tokens, since = [], 0, time.perf_counter()

    def train_on(self, batch: Batch, rounded: bool) -> mx.array:
        """Run one step; the loss is not yet evaluated."""
        if rounded not in self._compiled:
            self._compiled[rounded] = self._compile(rounded)
        loss = self._compiled[rounded](mx.array(batch.token_ids), mx.array(batch.weights))
        mx.async_eval(loss, self.parameters, self.optimizer.state)
        self.step += 1
        return loss

    def _compile(self, rounded: bool) -> Callable[[mx.array, mx.array], mx.array]:
        state = [self.parameters, self.optimizer.state]

        def loss_of(parameters: dict[str, Any], token_ids: mx.array, weights: mx.array) -> mx.array:
            logits = forward(self.model, parameters, token_ids[:, :-1], self.dtype, rounded)
            return weighted_loss(logits, token_ids, weights)

        def step(token_ids: mx.array, weights: mx.array) -> mx.array:
            loss, gradients = mx.value_and_grad(loss_of)(self.parameters, token_ids, weights)
            gradients, _ = optimizers.clip_grad_norm(gradients, self.recipe.max_norm)
            self.parameters.update(self.optimizer.apply_gradients(gradients, self.parameters))
            return loss

        compiled: Callable[[mx.array, mx.array], mx.array] = mx.compile(step, inputs=state, outputs=state)
        return compiled

    def _batches(self, workers: int) -> Iterator[tuple[Stage, Batch]]:
        begin = 0
        for stage in self.recipe.stages:
            first, begin = begin, begin + stage.steps
            if begin <= self.step:
                continue
            skipped = max(0, self.step - first)
            steps = range(first + skipped, begin)
            shapes = [self._shape(stage.lengths[step % len(stage.lengths)]) for step in steps]
            for batch in self.corpus.batches(stage.mixture, shapes, first + skipped, workers):
                yield stage, batch

    def _shape(self, length: int) -> tuple[int, int]:
        return max(1, self.recipe.tokens_a_step // length), length

    def recall(self, distance: int, cases: int) -> float:
        """Return the share of held-out facts whose answer is greedy under teacher forcing."""
        right = [
            self._finds(case.dialogue.messages, question)
            for case in (recall_case(self.corpus, distance, index) for index in range(cases))
            for question in case.questions
        ]
        return sum(right) / len(right)

    def _finds(self, messages: list[dict[str, str]], question: Question) -> bool:
        dialogue = Dialogue(0, messages=list(messages))
        dialogue.say(question.text, question.answer)
        ids, spoken = self.corpus.encode(dialogue)
        # The template ends with a newline.
        length = int(spoken[::-1][1:].argmin())
        token_ids = mx.array(ids)[None, :-1]
        logits = forward(self.model, self.parameters, token_ids, self.dtype, rounded=True)
        chosen = mx.argmax(logits[0, -length - 1 : -1], axis=-1)
        return bool(mx.array_equal(chosen, token_ids[0, -length:]).item())

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        arrays = dict(tree_flatten({"model": self.parameters, "optimizer": self.optimizer.state}))
        mx.save_safetensors(str(folder / "next.safetensors"), arrays, {"step": str(self.step)})
        sync_path(folder / "next.safetensors")
        os.replace(folder / "next.safetensors", folder / "checkpoint.safetensors")
        (folder / "recipe.json").write_text(json.dumps(asdict(self.recipe), indent=2))

    def load(self, folder: Path) -> None:
        arrays, metadata = mx.load(str(folder / "checkpoint.safetensors"), return_metadata=True)
        state = tree_unflatten(list(arrays.items()))
        self.parameters.update(state["model"])
        self.optimizer.state = state["optimizer"]
        self.step = int(metadata["step"])
        self._compiled.clear()


def _schedule(recipe: Recipe) -> Callable[[mx.array], mx.array]:
    highest = recipe.learning_rate
    warmup = min(recipe.warmup, max(1, recipe.steps // 10))
    rise = optimizers.linear_schedule(highest / 100, highest, warmup)
    fall = optimizers.cosine_decay(highest, max(1, recipe.steps - warmup), highest / 20)
    schedule: Callable[[mx.array], mx.array] = optimizers.join_schedules([rise, fall], [warmup])
    return schedule
