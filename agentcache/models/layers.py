"""A model's layers, and wrappers of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from agentcache.errors import UnsupportedModel


class Stand(nn.Module):
    """Wrapper of a module, with the original's attributes."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = original

    def __getattr__(self, key: str) -> Any:
        if key in self:
            return self[key]
        if "original" in self:
            return getattr(self["original"], key)
        raise AttributeError(key)


def in_dim(linear: nn.Module) -> int:
    """Input size of a linear module, whether its weight is packed or not."""
    width = int(linear.weight.shape[-1])
    return width * 32 // linear.bits if "scales" in linear else width


@dataclass(frozen=True, eq=False)
class LayerCall:
    """A layer about to be computed: `function` of `args` and `kwargs`, the input [B, n, hidden] first."""

    layer: nn.Module
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def x(self) -> mx.array:
        return self.args[0] if self.args else next(iter(self.kwargs.values()))

    def compute(self, x: mx.array | None = None) -> Any:
        if x is None:
            return self.function(*self.args, **self.kwargs)
        if self.args:
            return self.function(x, *self.args[1:], **self.kwargs)
        return self.function(**{**self.kwargs, next(iter(self.kwargs)): x})


Hook = Callable[[LayerCall], Any]


@functools.cache
def _hooked(kind: Any) -> Any:
    """Subclass that calls `_hook`: models distinguish layers by class."""

    class Hooked(kind):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self._hook(LayerCall(self, super().__call__, args, kwargs))

    return Hooked


def layer_lists(model: nn.Module) -> list[list[nn.Module]]:
    """The lists that a model runs through: `model.layers` may be a copy, or a concatenation.

    Raises:
        UnsupportedModel: there is none.
    """
    layers = {id(layer) for layer in getattr(model, "layers", None) or ()}
    lists = [
        value
        for module in model.modules()
        for value in module.values()
        if isinstance(value, list) and any(id(entry) in layers for entry in value)
    ]
    if not lists:
        raise UnsupportedModel(f"{type(model).__name__} has no list of layers")
    return lists


@contextmanager
def hooked(model: nn.Module, hook: Hook) -> Iterator[None]:
    """Within the context, `hook` computes every layer of the model."""
    kinds: list[tuple[nn.Module, Any]] = [(layer, type(layer)) for layers in layer_lists(model) for layer in layers]
    try:
        for layer, kind in kinds:
            layer._hook = hook
            layer.__class__ = _hooked(kind)
        yield
    finally:
        for layer, kind in kinds:
            layer.__class__ = kind
            layer.pop("_hook", None)
            layer.__dict__.pop("_hook", None)
