"""Trains role adapters on the frozen embedded model.

They act from the first token, their invocation (activated LoRA, arXiv 2504.12397), or the prompt's last token
(PrefillShare, arXiv 2602.12029). Earlier KV is base's, in 4 bits; the loss covers answers.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers

from agentcache.models.adapter_files import CONFIG_FILE, LowRank
from agentcache.models.adapters import AdapterWeights, RowAdapter, read_adapter
from agentcache.models.step import StepInputs
from agentcache.training.decoder_data import Example, make_examples, random_for
from agentcache.training.decoder_files import WEIGHTS_FILE, write_adapter
from agentcache.training.decoder_model import FrozenBase, load_base
from training.beside_base import BesideBase, KeysValues, base_pass, plain_keys_values, squared_divergence
from training.model import RoundedCache
from training.roles import Role, role_cases

QV, QKV = ("q_proj", "v_proj"), ("q_proj", "k_proj", "v_proj")
EVERYTHING = (*QKV, "o_proj", "gate_proj", "up_proj", "down_proj")
Matrices = dict[str, mx.array]


class Start(StrEnum):
    FIRST = "first"
    INVOCATION = "invocation"
    LAST = "last"


class Kind(StrEnum):
    """How an adapter is made; its folder's name."""

    QV = "qv"
    QKV = "qkv"
    FAMILY = "family"  # shares the first role's A matrices (LRAgent, arXiv 2602.01053)
    ACTIVATED = "activated"
    CONDITIONED = "conditioned"
    DEEP = "deep"  # all layers: too far from base to share its cache


@dataclass(frozen=True)
class RoleRecipe:
    """Parameters. `layers`: the last ones; None for all. `rows`: (conversation tokens, examples) of batches, in turn.

    `closeness`: loss weight of prompts' squared divergence; 0 for unshared KV.
    """

    targets: tuple[str, ...] = QV
    layers: int | None = 3
    start: Start = Start.FIRST
    rank: int = 8
    scale: float = 2.0
    closeness: float = 10.0
    steps: int = 220
    rows: tuple[tuple[int, int], ...] = ((16, 4), (64, 4), (32, 4), (240, 2))
    learning_rate: float = 3e-2
    max_norm: float = 10.0
    seed: int = 5


_UNSHARED = RoleRecipe(targets=EVERYTHING, closeness=0.0, steps=100, learning_rate=1e-2)
RECIPES: Mapping[Kind, RoleRecipe] = {
    Kind.QV: RoleRecipe(),
    Kind.QKV: RoleRecipe(targets=QKV),
    Kind.FAMILY: RoleRecipe(),
    Kind.ACTIVATED: replace(_UNSHARED, start=Start.INVOCATION),
    Kind.CONDITIONED: replace(_UNSHARED, start=Start.LAST),
    Kind.DEEP: RoleRecipe(layers=None, closeness=0.0, steps=100, learning_rate=1e-2),
}
TRAINED = Path(__file__).with_name("adapters")  # KIND/ROLE
INVOCATION = "<|im_start|>assistant\n"


def load_frozen(folder: Path) -> FrozenBase:
    base = load_base(str(folder))
    base.model.set_dtype(mx.float32)  # half precision is slow on CPUs
    mx.eval(base.model.parameters())
    return base


def train_roles(
    base: FrozenBase,
    out: Path,
    wanted: Mapping[Kind, Sequence[Role]],
    report: Callable[[str], None] = lambda line: None,
    steps: int | None = None,
) -> None:
    """Train adapters into `out`/KIND/ROLE, except existing ones."""
    for kind, roles in wanted.items():
        recipe = RECIPES[kind] if steps is None else replace(RECIPES[kind], steps=steps)
        for role in roles:
            folder = out / kind.value / role.name
            if (folder / CONFIG_FILE).is_file():
                continue
            first = out / kind.value / roles[0].name
            family = _read_as(first) if kind is Kind.FAMILY and role is not roles[0] else None
            invocation = base.tokenizer.encode(INVOCATION).ids if kind is Kind.ACTIVATED else ()
            trainer = RoleTrainer(base, recipe, role, family, invocation)
            losses = trainer.run()
            trainer.export(folder)
            last = losses[-3 * len(recipe.rows) :]
            report(f"{kind.value}/{role.name}: loss {losses[0]:.2f}, in the end {sum(last) / len(last):.2f}")


def _read_as(folder: Path) -> Matrices:
    tensors = mx.load(str(folder / WEIGHTS_FILE))
    return {name.partition("layers.")[2]: tensor for name, tensor in tensors.items() if name.endswith("lora_a")}


def new_matrices(base: FrozenBase, recipe: RoleRecipe, seed: int) -> Matrices:
    """Return matrices as mlx-lm's, named as `3.self_attn.q_proj.lora_a`."""
    matrices: Matrices = {}
    key = mx.random.key(seed)
    first = _first_layer(base, recipe)
    for name, linear in sorted(base.adapters.modules.linears.items()):
        if name.layer >= first and name.path.rpartition(".")[2] in recipe.targets:
            key, own = mx.random.split(key)
            bound = 1 / math.sqrt(linear.in_dim)
            where = f"{name.layer}.{name.path}"
            matrices[f"{where}.lora_a"] = mx.random.uniform(-bound, bound, (linear.in_dim, recipe.rank), key=own)
            matrices[f"{where}.lora_b"] = mx.zeros((recipe.rank, linear.out_dim))
    return matrices


def _first_layer(base: FrozenBase, recipe: RoleRecipe) -> int:
    return 0 if recipe.layers is None else len(base.model.layers) - recipe.layers


class RoleTrainer:
    """Trains one adapter. `family`: fixed A matrices; None to train both."""

    def __init__(
        self,
        base: FrozenBase,
        recipe: RoleRecipe,
        role: Role,
        family: Mapping[str, mx.array] | None = None,
        invocation: Sequence[int] = (),
    ) -> None:
        self.base, self.recipe, self.role = base, recipe, role
        self.invocation = tuple(invocation)
        self._first = _first_layer(base, recipe)
        fresh = new_matrices(base, recipe, int(random_for(recipe.seed, role.name).random() * 2**31))
        self._fixed = {name: a for name, a in (family or {}).items() if name.endswith("lora_a")}
        self.trained = {name: matrix for name, matrix in fresh.items() if name not in self._fixed}
        rise = optimizers.linear_schedule(recipe.learning_rate / 10, recipe.learning_rate, max(1, recipe.steps // 8))
        fall = optimizers.cosine_decay(recipe.learning_rate, recipe.steps, recipe.learning_rate / 20)
        schedule = optimizers.join_schedules([rise, fall], [max(1, recipe.steps // 8)])
        self._optimizer = optimizers.Adam(schedule, bias_correction=True)
        self._optimizer.init(self.trained)
        with tempfile.TemporaryDirectory(prefix="agentcache-role-") as folder:
            self.export(Path(folder))
            self._served = base.adapters.load(read_adapter(Path(folder), base.adapters.modules))

    @property
    def matrices(self) -> Matrices:
        return {**self.trained, **self._fixed}

    def acting(self) -> RowAdapter:
        return RowAdapter(self._weights(self.matrices))

    def run(self) -> list[float]:
        return [self._train_on(step, self._examples(step)) for step in range(self.recipe.steps)]

    def _examples(self, step: int) -> list[Example]:
        recipe = self.recipe
        length, count = recipe.rows[step % len(recipe.rows)]
        cases = role_cases(recipe.seed * 1000 + step, count, length, is_held_out=False)
        said = (case.answered_by(self.role) for case in cases)
        return [list(make_examples([conversation], self.base.tokenizer))[-1] for conversation in said]

    def _train_on(self, step: int, examples: Sequence[Example]) -> float:
        width = max(len(example) for example in examples) - 1
        ids = mx.array([_padded([*each.prompt, *each.answer][:-1], width) for each in examples], mx.int32)
        places, targets, weights = (mx.array(each) for each in _answer_places(examples))
        asked = mx.array([_prompt_weights(each, width) for each in examples])
        starts = [self._start(example) for example in examples]
        layers, parts = self.base.model.layers, self.base.model.model
        base = base_pass(layers if self.recipe.closeness else layers[: self._first], parts.embed_tokens(ids))
        mx.eval(base.inputs, [(each.keys, each.values) for each in base.layers])
        # The adapter must be right with shared and own KV.
        is_shared = bool(self.recipe.closeness) and step % 2 == 1

        def loss_of(trained: Matrices) -> mx.array:
            acting = self._weights({**trained, **self._fixed})
            rows = [RowAdapter(acting, start) for start in starts]
            hidden, plain = base.inputs[self._first], list[KeysValues]()
            with self.base.current.of(StepInputs(ids, [0] * len(rows), adapters=rows)):
                for place, layer in enumerate(layers[self._first :], self._first):
                    cache: RoundedCache | BesideBase = RoundedCache()
                    if self.recipe.closeness:
                        plain.append(plain_keys_values(layer, hidden))
                    if is_shared:
                        cache = BesideBase(base.layers[place], plain[-1])
                    hidden = layer(hidden, "causal", cache)
            said = mx.take_along_axis(hidden, places[..., None], axis=1)
            logits = parts.embed_tokens.as_linear(parts.norm(said))
            losses = nn.losses.cross_entropy(logits.astype(mx.float32), targets, reduction="none")
            loss = (losses * weights).sum() / weights.sum()
            if not self.recipe.closeness:
                return loss
            return loss + self.recipe.closeness * squared_divergence(plain, base.layers, asked)

        loss, gradients = mx.value_and_grad(loss_of)(self.trained)
        gradients, _ = optimizers.clip_grad_norm(gradients, self.recipe.max_norm)
        self.trained = self._optimizer.apply_gradients(gradients, self.trained)
        mx.eval(loss, self.trained, self._optimizer.state)
        return float(loss.item())

    def _start(self, example: Example) -> int:
        if self.recipe.start is Start.FIRST:
            return 0
        if self.recipe.start is Start.LAST:
            return len(example.prompt) - 1
        wanted = list(self.invocation)
        places = range(len(example.prompt) - len(wanted), -1, -1)
        return next(place for place in places if list(example.prompt[place : place + len(wanted)]) == wanted)

    def _weights(self, matrices: Matrices) -> AdapterWeights:
        pairs = {}
        for name, served in self._served.matrices.items():
            where = f"{name.layer}.{name.path}"
            a, b = matrices[f"{where}.lora_a"], self.recipe.scale * matrices[f"{where}.lora_b"]
            pairs[name] = LowRank(a.astype(served.a.dtype), b.astype(served.b.dtype))
        return AdapterWeights(self._served.adapter, pairs)

    def export(self, folder: Path) -> None:
        halves = {name: matrix.astype(mx.float16) for name, matrix in self.matrices.items()}
        write_adapter(folder, self.base.model, halves, self.recipe.scale)
        if self.recipe.start is Start.INVOCATION:
            config = json.loads((folder / CONFIG_FILE).read_text())
            config["alora_invocation_tokens"] = list(self.invocation)
            (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


def _padded(ids: Sequence[int], width: int) -> list[int]:
    return [*ids, *[0] * (width - len(ids))]


def _answer_places(examples: Sequence[Example]) -> tuple[list[list[int]], list[list[int]], list[list[float]]]:
    # Positions that predict answers, their targets, and weights.
    width = max(len(example.answer) for example in examples)
    places = [list(range(len(each.prompt) - 1, len(each) - 1)) for each in examples]
    weights = [_padded_weights(each, width) for each in examples]
    return [_padded(each, width) for each in places], [_padded(each.answer, width) for each in examples], weights


def _padded_weights(example: Example, width: int) -> list[float]:
    return [float(place < len(example.answer)) for place in range(width)]


def _prompt_weights(example: Example, width: int) -> list[float]:
    return [float(place < len(example.prompt)) for place in range(width)]
