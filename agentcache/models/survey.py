"""What a model caches, found out by running mlx-lm's own modules on a few tokens. Only shapes are looked at: nothing is
evaluated, so it costs the same for models of any size."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE

from agentcache.errors import UnsupportedModel
from agentcache.kv.spec import (
    CacheSpec,
    LayerSpec,
    Quantisation,
    RecurrentSpec,
    StateTensor,
    make_groups,
    quantisation_for,
)
from agentcache.models.layers import LayerCall, Stand, hooked, layer_lists
from agentcache.models.mla import Latent, latent_of

_NUM_TOKENS = 8  # more than a short convolution looks back, so that its state has its full length
_HEADS = ("n_heads", "num_attention_heads", "num_heads", "n_head")


@dataclass(frozen=True)
class Paged:
    """Where in the list of a model's caches one of keys and values stands; `layer` is an index into `Survey.layers`."""

    layer: int


@dataclass(frozen=True)
class Recurrent:
    """The same for a state; `cache` is an index into `Survey.recurrent`."""

    cache: int


# None is a cache that the model makes and does not use; a tuple is mlx-lm's CacheList.
CacheRef = Paged | Recurrent | tuple[Any, ...] | None


@dataclass(frozen=True)
class Survey:
    """A model's caches.

    Args:
        refs: to these, in the order that the model takes its caches.
        layers: those of keys and values, in order of computation.
        recurrent: those of a state, in order of computation.
        latents: of each of `layers`, what is known of MLA's latent; None for other attention.
        num_heads: query heads.
        hidden_bytes: of what goes from layer to layer, a token; 0 where layers cannot be passed by: they keep a state,
            are not computed once each and in order, or give more than hidden states.
        linears: of each linear module that is called token by token, by its layer's number and its path in the layer:
            whether the layer has written all that it caches before it is called, so that it has no part in that.
        final_norm: the module that owns the first norm behind the last layer, and its name there; None without one.
        kv_bits: that a key or a value is to be kept in.
    """

    refs: tuple[CacheRef, ...]
    layers: tuple[LayerSpec, ...]
    recurrent: tuple[RecurrentSpec, ...]
    latents: tuple[Latent | None, ...]
    num_heads: int
    hidden_bytes: int
    linears: Mapping[tuple[int, str], bool]
    final_norm: tuple[nn.Module, str] | None
    kv_bits: int = 4

    @cached_property
    def quantisation(self) -> Quantisation:
        """Of keys and values; raises UnsupportedModel where heads have no groups."""
        dims = {dim for layer in self.layers for dim in (layer.key_dim, layer.value_dim) if dim}
        ranks = {latent.rank for latent in self.latents if latent is not None}
        return quantisation_for(*sorted(dims | ranks), bits=self.kv_bits)

    def spec(self, model_type: str, config: dict[str, Any]) -> CacheSpec:
        """Raises UnsupportedModel where heads cannot be quantised."""
        groups = make_groups(list(self.layers), self.quantisation)
        return CacheSpec(model_type, self.num_heads, groups, _rope_text(config), recurrent=self.recurrent)

    def caches(self, paged: Sequence[Any], states: Sequence[ArraysCache]) -> list[Any]:
        """The model's caches, made of those for `layers` and for `recurrent`."""
        # Not by a closure that calls itself: as a circle it would keep a step's arrays until Python looks for circles.
        return [_cache_at(ref, paged, states) for ref in self.refs]


def _cache_at(ref: CacheRef, paged: Sequence[Any], states: Sequence[ArraysCache]) -> Any:
    if isinstance(ref, tuple):
        return CacheList(*[_cache_at(inner, paged, states) for inner in ref])
    if isinstance(ref, Paged):
        return paged[ref.layer]
    return None if ref is None else states[ref.cache]


@dataclass
class _Seen:
    """What is seen of one cache: who it is first used by, and with what."""

    cache: Any
    depth: int | None = None
    keys: tuple[int, ...] = ()
    values: tuple[int, ...] = ()
    latent: Latent | None = None


@dataclass
class _Run:
    """A model's run on its own caches, watched."""

    calls: list[nn.Module] = field(default_factory=list)
    tuples: bool = False
    layer: nn.Module | None = None
    x: mx.array | None = None
    used: list[_Seen] = field(default_factory=list)
    num_writes: int = 0
    called: dict[tuple[int, str], int] = field(default_factory=dict)
    behind: dict[tuple[int, str], bool] = field(default_factory=dict)

    def compute(self, call: LayerCall) -> Any:
        self.layer, self.x = call.layer, call.x
        self.called.clear()
        out = call.compute()
        self.settle(lambda num_writes: num_writes == self.num_writes)
        self.calls.append(call.layer)
        self.tuples |= isinstance(out, tuple)
        self.layer = None
        return out

    @property
    def depth(self) -> int:
        return len(self.calls)

    def settle(self, is_behind: Callable[[int], bool]) -> None:
        """Judge the linears called since the last time by how much had been written before."""
        for name, num_writes in self.called.items():
            self.behind[name] = self.behind.get(name, True) and is_behind(num_writes)
        self.called.clear()

    def note(self, seen: _Seen) -> None:
        self.num_writes += 1
        if seen.depth is None:
            seen.depth = self.depth if self.calls or self.layer is not None else len(self.used)
            self.used.append(seen)

    def watch_keys(self, seen: _Seen) -> None:
        update_and_fetch = seen.cache.update_and_fetch

        def watched(keys: mx.array, values: mx.array) -> Any:
            self.note(seen)
            seen.keys, seen.values = keys.shape, values.shape
            seen.latent = None if self.layer is None else latent_of(self.layer, keys, values)
            return update_and_fetch(keys, values)

        seen.cache.update_and_fetch = watched


class _WatchedArrays(ArraysCache):
    """A state that says when it is written."""

    def __init__(self, size: int, run: _Run) -> None:
        super().__init__(size)
        self.seen = _Seen(self)
        self._run = run

    def __setitem__(self, index: int, value: mx.array) -> None:
        self._run.note(self.seen)
        super().__setitem__(index, value)


class _WatchedNorm(Stand):
    """A norm that says behind how many layers it is computed."""

    def __init__(self, original: nn.Module, run: _Run) -> None:
        super().__init__(original)
        self.depths: list[int] = []
        self._run = run

    def __call__(self, x: mx.array) -> mx.array:
        self.depths.append(self._run.depth)
        return self.original(x)


@contextmanager
def _watched_norms(model: nn.Module, run: _Run) -> Iterator[list[tuple[nn.Module, str, _WatchedNorm]]]:
    """Inside, norms outside of the layers are watched; each comes with the module that owns it and its name there."""
    inside = {id(module) for layers in layer_lists(model) for layer in layers for module in layer.modules()}
    norms = [
        (owner, name, _WatchedNorm(child, run))
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
    class Watched(kind):
        def __call__(self, x: mx.array) -> mx.array:
            if x.shape[:-1] == (1, _NUM_TOKENS):
                self._run.called.setdefault(self._path, self._run.num_writes)
            return super().__call__(x)

    return Watched


@contextmanager
def _watched_linears(model: nn.Module, run: _Run) -> Iterator[None]:
    """Inside, linear modules of layers say when they are called."""
    linears: list[tuple[nn.Module, Any]] = []
    try:
        for index, layer in enumerate(model.layers):
            for path, module in layer.named_modules():
                if isinstance(module, (nn.Linear, nn.QuantizedLinear)):
                    linears.append((module, type(module)))
                    module._run, module._path = run, (index, path)
                    module.__class__ = _watched(linears[-1][1])
        yield
    finally:
        for module, kind in linears:
            module.__class__ = kind
            del module._run, module._path


def survey(model: nn.Module, kv_bits: int = 4) -> Survey:
    """Run the model once and say what it caches.

    Args:
        kv_bits: that a key or a value is to be kept in.

    Raises:
        UnsupportedModel: it keeps something that is not understood, or does not run.
    """
    _check_ropes(model)
    run = _Run()
    try:
        watched = [_watch(cache, index, run) for index, cache in enumerate(make_prompt_cache(model))]
        with hooked(model, run.compute), _watched_norms(model, run) as norms, _watched_linears(model, run):
            model(mx.zeros((1, _NUM_TOKENS), mx.int32), cache=_unwrap(watched))
        run.settle(lambda num_writes: False)  # called outside of layers
    except UnsupportedModel:
        raise
    except Exception as error:  # a wrong entry in a config fails anywhere in mlx-lm, in any way
        raise UnsupportedModel(f"{type(model).__name__} does not run: {error!s:.300}") from error
    if run.calls and [id(layer) for layer in run.calls[: len(model.layers)]] != [id(layer) for layer in model.layers]:
        raise UnsupportedModel(f"{type(model).__name__} does not compute its layers one after the other")
    paged = [seen for seen in run.used if not isinstance(seen.cache, ArraysCache)]
    states = [seen for seen in run.used if isinstance(seen.cache, ArraysCache)]
    first = {id(seen): nth for nth, seen in enumerate(paged)} | {id(seen): nth for nth, seen in enumerate(states)}
    return Survey(
        refs=tuple(_ref(each, first) for each in watched),
        layers=tuple(_layer_spec(seen, paged) for seen in paged),
        recurrent=tuple(_recurrent_spec(seen) for seen in states),
        latents=tuple(seen.latent for seen in paged),
        num_heads=_num_heads(model),
        hidden_bytes=0 if states else _hidden_bytes(model, run),
        linears=run.behind,
        final_norm=next(((owner, name) for owner, name, norm in norms if norm.depths == [run.depth]), None),
        kv_bits=kv_bits,
    )


def _check_ropes(model: nn.Module) -> None:
    for index, layer in enumerate(getattr(model, "layers", None) or ()):
        if any(isinstance(module, DynamicNTKScalingRoPE) for module in layer.modules()):
            raise UnsupportedModel(f"layer {index} uses dynamic NTK rope, whose keys depend on the prompt's length")


def _watch(cache: Any, index: int, run: _Run) -> Any:
    """A `_Seen` whose cache goes to the model instead of `cache`; a tuple of them for a CacheList."""
    if type(cache) is CacheList:
        return tuple(_watch(inner, index, run) for inner in cache.caches)
    if type(cache) is ArraysCache:
        return _WatchedArrays(len(cache.cache), run).seen
    if type(cache) not in (KVCache, RotatingKVCache):
        raise UnsupportedModel(f"layer {index} keeps a {type(cache).__name__}, not keys and values per token")
    if getattr(cache, "keep", 0):
        raise UnsupportedModel(f"layer {index} attends to its first {cache.keep} tokens and to a window")
    seen = _Seen(cache)
    run.watch_keys(seen)
    return seen


def _unwrap(watched: Sequence[Any]) -> list[Any]:
    return [CacheList(*_unwrap(each)) if isinstance(each, tuple) else each.cache for each in watched]


def _ref(watched: Any, numbers: dict[int, int]) -> CacheRef:
    if isinstance(watched, tuple):
        return tuple(_ref(each, numbers) for each in watched)
    if watched.depth is None:
        return None
    kind = Recurrent if isinstance(watched.cache, ArraysCache) else Paged
    return kind(numbers[id(watched)])


def _layer_spec(seen: _Seen, paged: Sequence[_Seen]) -> LayerSpec:
    assert seen.depth is not None  # it is used
    nth = [other for other in paged if other.depth == seen.depth].index(seen)
    window = seen.cache.max_size if isinstance(seen.cache, RotatingKVCache) else None
    if seen.latent is not None:
        return LayerSpec(seen.depth, 1, seen.latent.rank + seen.latent.rope, 0, window, nth)
    (_, heads, _, key_dim), (_, _, _, value_dim) = seen.keys, seen.values
    return LayerSpec(seen.depth, heads, key_dim, value_dim, window, nth)


def _recurrent_spec(seen: _Seen) -> RecurrentSpec:
    assert seen.depth is not None  # it is used
    tensors = [
        None if array is None else StateTensor(array.shape[1:], _name(array.dtype)) for array in seen.cache.cache
    ]
    return RecurrentSpec(seen.depth, tuple(tensors))


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


def _hidden_bytes(model: nn.Module, run: _Run) -> int:
    lists = layer_lists(model)
    in_order = [id(layer) for layer in run.calls] == [id(layer) for layer in lists[0]]
    if run.x is None or run.tuples or len(lists) > 1 or not in_order:
        return 0
    return run.x.shape[-1] * run.x.dtype.size


def _num_heads(model: nn.Module) -> int:
    """Query heads, whatever the attribute is called; of several sorts of layers, those of the first."""
    for layer in model.layers:
        for module in layer.modules():
            for name in _HEADS:
                if isinstance(heads := getattr(module, name, None), int):
                    return heads
    return 1  # a model without attention


def _rope_text(config: dict[str, Any]) -> str:
    """Every config entry that rope may be made from, also where text has a config of its own."""
    entries = [*config.items(), *text_config(config).items()]
    of_rope = [(k, v) for k, v in entries if "rope" in k or "rotary" in k or k == "max_position_embeddings"]
    try:
        return repr(sorted(of_rope))
    except TypeError:  # one name twice, with values that have no order
        return repr(sorted(of_rope, key=repr))


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """What a config says of the text model, where that has a config of its own; else nothing."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else {}
