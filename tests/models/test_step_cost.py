"""What a decode step with kernels costs at a real model's size, by the graph that MLX is given: launches and bytes.

Nothing is computed: weights are never made, and the contexts hold nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import qwen3
from mlx_lm.models.cache import KVCache

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.pool import BlockPool, BlockTable
from agentcache.metal_kernels import numbers
from agentcache.metal_kernels.self_test import Verdict
from agentcache.models import fused
from agentcache.models.attachment import host
from agentcache.models.fused import KernelMemo
from agentcache.models.hidden_states import ModelHiddenStates
from agentcache.models.runner import ModelRunner
from agentcache.models.step import CurrentStep, StepInputs
from benchmarks.real_size import SHAPE

pytestmark = pytest.mark.skipif(mx.cuda.is_available(), reason="MLX on CUDA: export_function cannot read kernels back")

LAYERS = 2
CONFIG = {**SHAPE, "model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "num_hidden_layers": LAYERS}
# What MLX answers with another look at the same bytes, where these lie in order, as they do for one token a row.
_VIEWS = {"Reshape", "Transpose", "ExpandDims", "Squeeze", "Slice", "Split", "Broadcast", "Flatten", "Unflatten"}
_CONSTANT = "Full"  # what stands for what there is none of: made in a process's first step, and kept


@dataclass(frozen=True)
class Operation:
    """One that is launched: its name, and the bytes of all that goes in and comes out."""

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def operations(compute: Callable[[mx.array], mx.array], token: mx.array) -> list[Operation]:
    """Of the graph that `compute` makes, in order."""
    found: list[Operation] = []

    def see(node: dict[str, Any]) -> None:
        if node.get("type") == "primitive" and node["name"] not in {*_VIEWS, _CONSTANT}:
            found.append(Operation(node["name"], _sizes(node["inputs"]), _sizes(node["outputs"])))

    mx.export_function(see, compute, token)
    return found


def _sizes(arrays: list[Any]) -> tuple[int, ...]:
    return tuple(math.prod(shape) * dtype.size for _, shape, dtype in arrays)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One that compiles kernels, and has what is one launch on a GPU as one operation."""
    monkeypatch.setattr(fused, "device", lambda: "metal")
    monkeypatch.setattr(numbers, "device", lambda: "metal")  # copies of a step's numbers are no layer's
    monkeypatch.setattr(fused, "try_kernels", lambda shape: Verdict(True))
    monkeypatch.setattr(fused, "memo", KernelMemo())
    monkeypatch.setattr(mx.fast, "rms_norm", lambda x, weight, eps: x * weight)
    monkeypatch.setattr(mx.fast, "rope", lambda x, *how, **more: -x)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", lambda q, k, v, **how: q + k[:, :1, :1] + v[:, :1, :1])
    monkeypatch.setattr(qwen3, "swiglu", lambda gate, x: gate * x)
    for memory in (fused.why_none, fused._tried):
        memory.cache_clear()
    yield
    for memory in (fused.why_none, fused._tried):
        memory.cache_clear()


def make_model() -> qwen3.Model:
    """Qwen3-8B's widths in a few layers; its weights take no memory."""
    model = qwen3.Model(qwen3.ModelArgs.from_dict(CONFIG))
    flat = mx.array(0, mx.bfloat16)
    model.update(tree_map(lambda x: mx.broadcast_to(flat, x.shape), model.parameters()))
    mx.eval(model.parameters())
    return model


def paged(model: qwen3.Model, rows: int, context: int) -> list[Operation]:
    """A decode step of the engine's runner."""
    hosted, current = host(model, "qwen3", CONFIG, check=False), CurrentStep()
    loaded: Any = SimpleNamespace(
        model=model,
        spec=hosted.spec,
        inspection=hosted.inspection,
        current=current,
        hidden_states=ModelHiddenStates(model, hosted.inspection, current),
        adapters=None,
        ranks=1,
    )
    blocks = context // BLOCK_SIZE + 1
    pools = [BlockPool() for _ in hosted.spec.groups]
    for pool in pools:
        pool.grow(rows * blocks)
    runner = ModelRunner(loaded, pools)
    tables = [[BlockTable(list(range(row * blocks, (row + 1) * blocks))) for _ in pools] for row in range(rows)]

    def compute(token: mx.array) -> mx.array:
        lengths = [context] * rows
        reads, writes = runner.reads(tables, lengths, 1), runner.writes(tables, lengths, 1)
        return runner.forward(StepInputs(token, lengths, reads=reads, writes=writes)).logits

    return operations(compute, mx.zeros((rows, 1), mx.int32))


def bare(model: qwen3.Model, rows: int, context: int) -> list[Operation]:
    """The same of mlx-lm."""
    caches = [KVCache() for _ in model.layers]
    for cache in caches:
        shape = (rows, SHAPE["num_key_value_heads"], context + BLOCK_SIZE, SHAPE["head_dim"])
        cache.keys, cache.values, cache.offset = mx.zeros(shape, mx.bfloat16), mx.zeros(shape, mx.bfloat16), context
    return operations(lambda token: model(token, cache=caches), mx.zeros((rows, 1), mx.int32))


@pytest.mark.parametrize("rows", [1, 16])
def test_a_layer_is_at_most_twenty_launches_and_no_more_than_one_beyond_bare(rows: int) -> None:
    beside, mine = bare(make_model(), rows, 512), paged(make_model(), rows, 512)
    assert sum(each.name == "CustomKernel" for each in mine) == 3 * LAYERS
    in_layers = len(mine) - 3  # the embedding, the last norm, the head
    assert in_layers <= 20 * LAYERS
    assert len(mine) - len(beside) <= LAYERS + 1


@pytest.mark.parametrize("context", [4096, 32768])
def test_a_step_moves_little_more_than_weights_and_cached_tokens(context: int) -> None:
    model = make_model()
    weights = sum(x.nbytes for name, x in tree_flatten(model.parameters()) if "embed" not in name)
    token = 2 * SHAPE["num_key_value_heads"] * (SHAPE["head_dim"] // 2 + SHAPE["head_dim"] // 64 * 4)
    moved = sum(_moved(each, token) for each in paged(model, 1, context))
    assert moved <= 1.15 * (weights + LAYERS * context * token)


def _moved(operation: Operation, token: int) -> int:
    """Bytes read and written.

    Args:
        token: bytes of one in a layer's arenas.
    """
    if operation.name == "Gather":
        return 2 * sum(operation.outputs)  # of a table, what is looked up
    if operation.outputs == (4,):  # `append`, which does not read the arenas
        return sum(operation.inputs[:2]) + token
    return sum(operation.inputs) + sum(operation.outputs)
