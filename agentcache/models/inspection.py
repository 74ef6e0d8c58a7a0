"""Find what a model caches by laying out a run on a few tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from agentcache.compat import ArraysCache, CacheList, DynamicNTKScalingRoPE, KVCache, RotatingKVCache, make_prompt_cache
from agentcache.errors import UnsupportedModel
from agentcache.kv.packing import (
    PER_TOKEN,
    UNQUANTISED_BITS,
    ByChannel,
    LayerBits,
    LayerPacking,
    Packing,
    Plain,
    Precision,
    quantisation_for,
)
from agentcache.kv.spec import CacheSpec, LayerSpec, RecurrentSpec, StateTensor, make_groups
from agentcache.models.layers import LayerCall, Stand, hooked, layer_lists
from agentcache.models.mla import Latent, latent_of

_HEADS = ("n_heads", "num_attention_heads", "num_heads", "n_head")
LINEARS = (
    nn.Linear,
    nn.QuantizedLinear,
    nn.AllToShardedLinear,
    nn.QuantizedAllToShardedLinear,
    nn.ShardedToAllLinear,
    nn.QuantizedShardedToAllLinear,
)
_NUM_TOKENS = 8  # more than a convolution's history


@dataclass(frozen=True)
class Paged:
    """A KV cache, by index into `Inspection.layers`."""

    layer: int


@dataclass(frozen=True)
class Recurrent:
    """A state, by index into `Inspection.recurrent`."""

    cache: int


# None: unused. A tuple: a CacheList.
CacheRef = Paged | Recurrent | tuple[Any, ...] | None


@dataclass(frozen=True)
class Inspection:
    """A model's caches.

    Args:
        layers, recurrent: in order of computation; `latents` and `dtypes` (of keys) as `layers`.
        hidden_bytes: bytes per token between layers; 0 if layers cannot be skipped.
        linears: whether all calls follow the layer's cache writes, by path.
        final_norm: owner and name of the first norm after the last layer.
    """

    refs: tuple[CacheRef, ...]
    layers: tuple[LayerSpec, ...]
    recurrent: tuple[RecurrentSpec, ...]
    latents: tuple[Latent | None, ...]
    dtypes: tuple[mx.Dtype, ...]
    num_heads: int
    hidden_bytes: int
    linears: Mapping[tuple[int, str], bool]
    final_norm: tuple[nn.Module, str] | None
    precision: Precision

    def kept_in(self, precision: Precision) -> Inspection:
        """This model in `precision`; layers without values, such as MLA latents, have no keys by channel."""
        layers = zip(precision.layers, self.layers, strict=True)
        bits = tuple(each if layer.value_dim or not each.by_channel else PER_TOKEN for each, layer in layers)
        return replace(self, precision=replace(precision, layers=bits))

    @cached_property
    def packings(self) -> tuple[LayerPacking, ...]:
        """Packing of each layer. Raises UnsupportedModel."""
        layers = zip(self.precision.layers, self.dtypes, strict=True)
        return tuple(
            LayerPacking(
                ByChannel(bits.keys) if bits.by_channel else self._packing(bits.keys, dtype),
                self._packing(bits.values, dtype),
            )
            for bits, dtype in layers
        )

    def _packing(self, bits: int, dtype: mx.Dtype) -> Packing:
        if bits == UNQUANTISED_BITS:
            return Plain("BF16" if dtype == mx.bfloat16 else "F16")
        dims = {dim for layer in self.layers for dim in (layer.key_dim, layer.value_dim) if dim}
        ranks = {latent.rank for latent in self.latents if latent is not None}
        return quantisation_for(*sorted(dims | ranks), bits=bits)

    def spec(self, model_type: str, config: dict[str, Any]) -> CacheSpec:
        groups = make_groups(self.layers, self.packings)
        return CacheSpec(model_type, self.num_heads, groups, _rope_text(config), recurrent=self.recurrent)

    def caches(self, paged: Sequence[Any], states: Sequence[ArraysCache]) -> list[Any]:
        # A recursive closure would be a cycle that keeps a step's arrays.
        return [_cache_at(ref, paged, states) for ref in self.refs]


def _cache_at(ref: CacheRef, paged: Sequence[Any], states: Sequence[ArraysCache]) -> Any:
    if isinstance(ref, tuple):
        return CacheList(*[_cache_at(inner, paged, states) for inner in ref])
    if isinstance(ref, Paged):
        return paged[ref.layer]
    return None if ref is None else states[ref.cache]


def inspect_model(model: nn.Module) -> Inspection:
    """Find what a model caches. Raises UnsupportedModel."""
    _check_ropes(model)
    run = watch_run(model)
    if run.calls and [id(layer) for layer in run.calls[: len(model.layers)]] != [id(layer) for layer in model.layers]:
        raise UnsupportedModel(f"{type(model).__name__} does not compute its layers one after the other")
    paged = [seen for seen in run.used if not isinstance(seen.cache, ArraysCache)]
    states = [seen for seen in run.used if isinstance(seen.cache, ArraysCache)]
    first = {id(seen): nth for nth, seen in enumerate(paged)} | {id(seen): nth for nth, seen in enumerate(states)}
    return Inspection(
        refs=tuple(_ref(each, first) for each in run.caches),
        layers=tuple(_layer_spec(seen, paged) for seen in paged),
        recurrent=tuple(_recurrent_spec(seen) for seen in states),
        latents=tuple(seen.latent for seen in paged),
        dtypes=tuple(seen.dtype for seen in paged),
        num_heads=_num_heads(model),
        hidden_bytes=0 if states else _hidden_bytes(model, run),
        linears=run.behind,
        final_norm=next(((owner, name) for owner, name, norm in run.norms if norm.depths == [run.depth]), None),
        precision=Precision((LayerBits(),) * len(paged)),
    )


def _check_ropes(model: nn.Module) -> None:
    for index, layer in enumerate(getattr(model, "layers", None) or ()):
        if any(isinstance(module, DynamicNTKScalingRoPE) for module in layer.modules()):
            raise UnsupportedModel(f"layer {index} uses dynamic NTK rope, whose keys depend on the prompt's length")


def _ref(watched: Any, numbers: dict[int, int]) -> CacheRef:
    if isinstance(watched, tuple):
        return tuple(_ref(each, numbers) for each in watched)
    if watched.depth is None:
        return None
    kind = Recurrent if isinstance(watched.cache, ArraysCache) else Paged
    return kind(numbers[id(watched)])


def _layer_spec(seen: Seen, paged: Sequence[Seen]) -> LayerSpec:
    assert seen.depth is not None
    nth = [other for other in paged if other.depth == seen.depth].index(seen)
    window = seen.cache.max_size if isinstance(seen.cache, RotatingKVCache) else None
    if seen.latent is not None:
        return LayerSpec(seen.depth, 1, seen.latent.rank + seen.latent.rope, 0, window, nth)
    (_, heads, _, key_dim), (_, _, _, value_dim) = seen.keys, seen.values
    return LayerSpec(seen.depth, heads, key_dim, value_dim, window, nth)


def _recurrent_spec(seen: Seen) -> RecurrentSpec:
    assert seen.depth is not None
    tensors = [
        None if array is None else StateTensor(array.shape[1:], str(array.dtype).rpartition(".")[2])
        for array in seen.cache.cache
    ]
    return RecurrentSpec(seen.depth, tuple(tensors))


def _hidden_bytes(model: nn.Module, run: Run) -> int:
    lists = layer_lists(model)
    in_order = [id(layer) for layer in run.calls] == [id(layer) for layer in lists[0]]
    if run.x is None or run.tuples or len(lists) > 1 or not in_order:
        return 0
    return run.x.shape[-1] * run.x.dtype.size


def _num_heads(model: nn.Module) -> int:
    for layer in model.layers:
        for module in layer.modules():
            for name in _HEADS:
                if isinstance(heads := getattr(module, name, None), int):
                    return heads
    return 1  # no attention


def _rope_text(config: dict[str, Any]) -> str:
    entries = [*config.items(), *text_config(config).items()]
    of_rope = [(k, v) for k, v in entries if "rope" in k or "rotary" in k or k == "max_position_embeddings"]
    try:
        return repr(sorted(of_rope))
    except TypeError:  # values without order
        return repr(sorted(of_rope, key=repr))


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The text model's own config, or {}."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else {}


@dataclass
class Seen:
    """One cache; `depth` is its first user's."""

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
        called: cache writes before each linear called since the last `resolve`.
        behind: whether all writes came before a linear's calls.
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
    """Run the model once. Raises UnsupportedModel."""
    run = Run()
    try:
        run.caches = [_watch(cache, index, run) for index, cache in enumerate(make_prompt_cache(model))]
        with hooked(model, run.compute), _watched_norms(model, run) as run.norms, _watched_linears(model, run):
            model(mx.zeros((1, _NUM_TOKENS), mx.int32), cache=_unwrap(run.caches))
        run.resolve(lambda num_writes: False)  # calls outside of layers
    except UnsupportedModel:
        raise
    except Exception as error:  # wrong config entries raise anything
        raise UnsupportedModel(f"{type(model).__name__} does not run: {error!s:.300}") from error
    return run
