"""A model's layers, and who stands in their places: for the length of a run, or for good."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from agentcache.errors import UnsupportedModel


class Stand(nn.Module):
    """Stands in a module's place. Attributes of the original can be read here too."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = original

    def __getattr__(self, key: str) -> Any:
        if key in self:
            return self[key]
        if "original" in self:
            return getattr(self["original"], key)
        raise AttributeError(key)


# Computes a layer: given the layer, its input [B, n, hidden], and what else it is called with.
Hook = Callable[[nn.Module, mx.array, tuple[Any, ...], dict[str, Any]], Any]


class HookedLayer(Stand):
    """A layer that is computed by a hook."""

    def __init__(self, original: nn.Module, hook: Hook) -> None:
        super().__init__(original)
        self._hook = hook

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        return self._hook(self.original, x, args, kwargs)


def layer_lists(model: nn.Module) -> list[list[nn.Module]]:
    """The lists that a model runs through, themselves: `model.layers` may be a copy, or put together of several.

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
    """Inside, every layer of the model is computed by `hook`."""
    lists = layer_lists(model)
    originals = [list(layers) for layers in lists]
    try:
        for layers in lists:
            layers[:] = [HookedLayer(layer, hook) for layer in layers]
        yield
    finally:
        for layers, before in zip(lists, originals, strict=True):
            layers[:] = before
