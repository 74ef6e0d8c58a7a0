"""Wrappers of a model's layers and modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from agentcache.compat import SwitchLinear
from agentcache.errors import UnsupportedModel
from agentcache.metal_kernels.kernel_text import device

_observer: ContextVar[Callable[[mx.array], None] | None] = ContextVar("observer", default=None)


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
    width = int(linear.weight.shape[-1])
    return width * 32 // linear.bits if "scales" in linear else width


@dataclass(frozen=True, eq=False)
class LayerCall:
    """A layer about to be computed, on [B, n, hidden]."""

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
    """A subclass: models distinguish layers by class."""

    class Hooked(kind):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self._hook(LayerCall(self, super().__call__, args, kwargs))

    return Hooked


def layer_lists(model: nn.Module) -> list[list[nn.Module]]:
    """Lists that a model runs through (`model.layers` may be a copy). Raises UnsupportedModel if none."""
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
    """Let `hook` compute every layer of the model."""
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


def observe(y: mx.array) -> mx.array:
    """Pass `y` to this thread's observer and return it."""
    if (observer := _observer.get()) is not None:
        observer(y)
    return y


@contextmanager
def observing(observer: Callable[[mx.array], None]) -> Iterator[None]:
    """Pass this thread's attention results to `observer`."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


class UnsortedSwitchLinear(SwitchLinear):  # type: ignore[misc]
    """Experts that multiply row by row: slow on long prompts."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        return super().__call__(x, indices)


def distrust_sorted_rows(model: nn.Module) -> None:
    """On CUDA, make unquantised experts `UnsortedSwitchLinear`.

    MLX 0.32.4 multiplies sorted rows wrongly (`grouped_gemm_unaligned.cu`).
    """
    if device() != "cuda":
        return
    for module in model.modules():
        if type(module) is SwitchLinear:
            module.__class__ = UnsortedSwitchLinear
