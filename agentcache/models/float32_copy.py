"""A model's weights in float32, for measurements that only compare results of the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from agentcache.system.memory import SystemMemory

_COPY_SHARE = 4  # the copy takes at most this fraction (1/n) of available memory


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Within the context, the model computes in float32, on a copy of its weights."""
    quantised = [(path, module) for path, module in model.named_modules() if type(module) in _PLAIN]
    model.update_modules(tree_unflatten([(path, _plain(module)) for path, module in quantised]))
    before = model.parameters()
    try:
        model.update(tree_map(_as_float32, before))
        mx.eval(model.parameters())
        yield
    finally:
        model.update(before)
        model.update_modules(tree_unflatten(quantised))
        mx.clear_cache()


def is_float32(model: nn.Module) -> bool:
    """Whether `in_float32` changes nothing: no other floats, no layer that it would unpack."""
    dtypes = {array.dtype for _, array in tree_flatten(model.parameters()) if mx.issubdtype(array.dtype, mx.floating)}
    return dtypes <= {mx.float32} and not any(type(module) in _PLAIN for module in model.modules())


_PLAIN: dict[type[nn.Module], type[nn.Module]] = {nn.QuantizedLinear: nn.Linear, nn.QuantizedEmbedding: nn.Embedding}


def gains_by_float32(model: nn.Module) -> bool:
    """Whether the model computes faster in float32, and memory holds the copy.

    A CPU multiplies float32 much faster than bfloat16 or quantised weights.
    """
    if mx.default_device() != mx.Device(mx.cpu) or is_float32(model):
        return False
    arrays = [array for _, array in tree_flatten(model.parameters())]
    packed = {id(module.weight): 32 // module.bits for module in model.modules() if type(module) in _PLAIN}
    available = SystemMemory().available()
    values = sum(array.size * packed.get(id(array), 1) for array in arrays)
    return available is not None and 4 * values <= available // _COPY_SHARE


def _plain(module: nn.Module) -> nn.Module:
    weight = mx.dequantize(
        module.weight, module.scales, module.get("biases"), module.group_size, module.bits, mode=module.mode
    )
    made = _PLAIN[type(module)](1, 1)
    if "bias" in made:
        del made["bias"]
    made.weight = weight.astype(mx.float32)
    if "bias" in module:
        made.bias = module.bias
    return made


def _as_float32(array: mx.array) -> mx.array:
    return array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array
