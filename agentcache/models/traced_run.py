"""Traced run of a model on a few tokens: its caches and linears, in order of use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from agentcache.compat import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache
from agentcache.errors import UnsupportedModel
from agentcache.models.layers import LayerCall, Stand, hooked, layer_lists
from agentcache.models.mla import Latent, latent_of

# Whole, or one rank's part.
LINEARS = (
    nn.Linear,
    nn.QuantizedLinear,
    nn.AllToShardedLinear,
    nn.QuantizedAllToShardedLinear,
    nn.ShardedToAllLinear,
    nn.QuantizedShardedToAllLinear,
)
_NUM_TOKENS = 8  # more than a short convolution's history: its state is full


@dataclass
class Seen:
    """One cache: depth of its first user, shapes of keys and values, type of keys."""

    cache: Any
    depth: int | None = None
    keys: tuple[int, ...] = ()
    values: tuple[int, ...] = ()
    dtype: mx.Dtype = mx.float32
    latent: Latent | None = None


@dataclass
class Run:
    """A model's run on its own caches.

    Attributes:
        calls: layers, in order of computation.
        tuples: whether a layer gave more than hidden states.
        layer, x: layer in progress; input of the last one.
        used: caches, in order of their first write.
        called: linears called since the last `resolve`, with the number of writes before.
        behind: by layer and path of a linear: whether all writes came before its calls.
        norms: norms outside of layers, with owner and name.
        caches: in the model's order, a `Seen` each; a tuple for a CacheList.
    """

    calls: list[nn.Module] = field(default_factory=list)
    tuples: bool = False
    layer: nn.Module | None = None
    x: mx.array | None = None
    used: list[Seen] = field(default_factory=list)
    num_writes: int = 0
    called: dict[tuple[int, str], int] = field(default_factory=dict)
    behind: dict[tuple[int, str], bool] = field(default_factory=dict)
    norms: list[tuple[nn.Module, str, _TracedNorm]] = field(default_factory=list)
    caches: list[Any] = field(default_factory=list)

    def compute(self, call: LayerCall) -> Any:
        self.layer, self.x = call.layer, call.x
        self.called.clear()
        out = call.compute()
        self.resolve(lambda num_writes: num_writes == self.num_writes)
        self.calls.append(call.layer)
        self.tuples |= isinstance(out, tuple)
        self.layer = None
        return out

    @property
    def depth(self) -> int:
        return len(self.calls)

    def resolve(self, is_behind: Callable[[int], bool]) -> None:
        """Judge linears in `called` by the number of writes before them."""
        for name, num_writes in self.called.items():
            self.behind[name] = self.behind.get(name, True) and is_behind(num_writes)
        self.called.clear()

    def note(self, seen: Seen) -> None:
        self.num_writes += 1
        if seen.depth is None:
            seen.depth = self.depth if self.calls or self.layer is not None else len(self.used)
            self.used.append(seen)

    def watch_keys(self, seen: Seen) -> None:
        update_and_fetch = seen.cache.update_and_fetch

        def watched(keys: mx.array, values: mx.array) -> Any:
            self.note(seen)
            seen.keys, seen.values, seen.dtype = keys.shape, values.shape, keys.dtype
            seen.latent = None if self.layer is None else latent_of(self.layer, keys, values)
            return update_and_fetch(keys, values)

        seen.cache.update_and_fetch = watched


class _TracedArrays(ArraysCache):
    def __init__(self, size: int, run: Run) -> None:
        super().__init__(size)
        self.seen = Seen(self)
        self._run = run

    def __setitem__(self, index: int, value: mx.array) -> None:
        self._run.note(self.seen)
        super().__setitem__(index, value)


class _TracedNorm(Stand):
    def __init__(self, original: nn.Module, run: Run) -> None:
        super().__init__(original)
        self.depths: list[int] = []
        self._run = run

    def __call__(self, x: mx.array) -> mx.array:
        self.depths.append(self._run.depth)
        return self.original(x)


@contextmanager
def _watched_norms(model: nn.Module, run: Run) -> Iterator[list[tuple[nn.Module, str, _TracedNorm]]]:
    inside = {id(module) for layers in layer_lists(model) for layer in layers for module in layer.modules()}
    norms = [
        (owner, name, _TracedNorm(child, run))
        for owner in model.modules()
        if id(owner) not in inside
        for name, child in owner.items()
        if isinstance(child, nn.Module) and "norm" in type(child).__name__.lower()
    ]
    try:
        for owner, name, norm in norms:
            setattr(owner, name, norm)
        yield norms
    finally:
        for owner, name, norm in norms:
            setattr(owner, name, norm.original)


@functools.cache
def _watched(kind: Any) -> Any:
    class Traced(kind):
        def __call__(self, x: mx.array) -> mx.array:
            if x.shape[:-1] == (1, _NUM_TOKENS):
                self._run.called.setdefault(self._path, self._run.num_writes)
            return super().__call__(x)

    return Traced


@contextmanager
def _watched_linears(model: nn.Module, run: Run) -> Iterator[None]:
    linears: list[tuple[nn.Module, Any]] = []
    try:
        for index, layer in enumerate(model.layers):
            for path, module in layer.named_modules():
                if isinstance(module, LINEARS):
                    linears.append((module, type(module)))
                    module._run, module._path = run, (index, path)
                    module.__class__ = _watched(linears[-1][1])
        yield
    finally:
        for module, kind in linears:
            module.__class__ = kind
            del module._run, module._path


def _watch(cache: Any, index: int, run: Run) -> Any:
    if type(cache) is CacheList:
        return tuple(_watch(inner, index, run) for inner in cache.caches)
    if type(cache) is ArraysCache:
        return _TracedArrays(len(cache.cache), run).seen
    if type(cache) not in (KVCache, RotatingKVCache):
        raise UnsupportedModel(f"layer {index} keeps a {type(cache).__name__}, not keys and values per token")
    if getattr(cache, "keep", 0):
        raise UnsupportedModel(f"layer {index} attends to its first {cache.keep} tokens and to a window")
    seen = Seen(cache)
    run.watch_keys(seen)
    return seen


def _unwrap(watched: Sequence[Any]) -> list[Any]:
    return [CacheList(*_unwrap(each)) if isinstance(each, tuple) else each.cache for each in watched]


def watch_run(model: nn.Module) -> Run:
    """Run the model once. Raises UnsupportedModel if it does not run, or keeps an unknown kind of cache."""
    run = Run()
    try:
        run.caches = [_watch(cache, index, run) for index, cache in enumerate(make_prompt_cache(model))]
        with hooked(model, run.compute), _watched_norms(model, run) as run.norms, _watched_linears(model, run):
            model(mx.zeros((1, _NUM_TOKENS), mx.int32), cache=_unwrap(run.caches))
        run.resolve(lambda num_writes: False)  # calls outside of layers
    except UnsupportedModel:
        raise
    except Exception as error:  # a wrong config entry can raise anything
        raise UnsupportedModel(f"{type(model).__name__} does not run: {error!s:.300}") from error
    return run
