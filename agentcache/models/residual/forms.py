"""How each layer makes keys and values: found in its modules, then proved.

Keys with an adapter must follow from base's cached keys and x·A alone. With ρ = 1 / rms of a head's key before its
norm, γ the norm's weights and R the rope:

    K + R(x·A·B)                                   without a key norm,
    ρ_agent / ρ_base * K + ρ_agent * R(γ * x·A·B)  with a norm of each head.

The proof runs the model on two equal rows, with noise on module outputs of the second: the formula must give its keys
from the first's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from agentcache.errors import UnsupportedPolicy
from agentcache.kv.spec import LayerSpec
from agentcache.models.adapter_files import ModuleName
from agentcache.models.adapters import Adapter, Target, TargetModules
from agentcache.models.attention import activation_dtype
from agentcache.models.inspection import Inspection
from agentcache.models.layers import Stand
from agentcache.models.residual.kv import KeyForm, KeyNorm, Rope
from agentcache.models.residual.spec import KEYS, VALUES, ResidualLayer, ResidualShape
from agentcache.models.step import make_caches

_NUM_TOKENS, _OFFSET, _TOKEN_IDS = 8, 37, 16
_TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 6e-2}
_NORMS = ("k_norm", "k_layernorm", "key_layernorm")
_ROPES = ("rope", "rotary_emb", "rotary")


@dataclass(frozen=True, eq=False)
class LayerForm:
    """How one layer makes its keys and values."""

    layer: LayerSpec
    keys: Target
    values: Target
    key_form: KeyForm


@dataclass(frozen=True)
class ResidualSupport:
    """Whether a model can have residuals, for any thread."""

    refusal: str = ""
    normed: frozenset[int] = frozenset()
    dtype: str = ""

    def shape_of(self, adapter: Adapter, *, is_family: bool = False) -> ResidualShape:
        """Shape of an adapter's or family's residual KV. Raises UnsupportedPolicy."""
        if why := self.refusal or _adapter_refusal(adapter):
            raise UnsupportedPolicy(
                f"the policy 'residual' does not serve this: {why}; use 'exact'", param="agentcache.policy"
            )
        keys, values = adapter.sides.keys, adapter.sides.values
        return ResidualShape(
            tuple(
                ResidualLayer(
                    index,
                    keys[index].rank if index in keys else 0,
                    values[index].rank if index in values else 0,
                    index in self.normed,
                )
                for index in sorted({*keys, *values})
            ),
            self.dtype,
            is_family,
        )


def _adapter_refusal(adapter: Adapter) -> str:
    sides = adapter.sides
    if adapter.invocation_tokens is not None:
        return "the adapter is an activated one, which shares base's cache exactly before its invocation"
    if sides.unsplit is not None:
        return f"the adapter acts on {sides.unsplit}, whose part in keys and values cannot be kept apart"
    if not sides.keys and not sides.values:
        return "the adapter adds nothing to keys or values itself"
    return ""


@dataclass(frozen=True, eq=False)
class ResidualForms:
    """Forms of layers by index; none after a refusal."""

    support: ResidualSupport
    layers: Mapping[int, LayerForm] = field(default_factory=dict)


class _Unfit(Exception):
    pass


def find_forms(model: nn.Module, inspection: Inspection, modules: TargetModules) -> ResidualForms:
    """Find a model's layer forms by running it on a few tokens."""
    try:
        _check_caches(inspection, len(model.layers))
        parts = [_parts_of(model.layers[layer.index], layer, modules) for layer in inspection.layers]
        forms = _proved(model, inspection, parts)
    except _Unfit as unfit:
        return ResidualForms(ResidualSupport(str(unfit)))
    normed = frozenset(form.layer.index for form in forms if form.key_form.norm is not None)
    dtype = str(parts[0].dtype).rpartition(".")[2]
    return ResidualForms(ResidualSupport("", normed, dtype), {form.layer.index: form for form in forms})


def _check_caches(inspection: Inspection, num_layers: int) -> None:
    if inspection.recurrent:
        raise _Unfit("the model has recurrent layers, whose state is each adapter's own")
    if any(latent is not None for latent in inspection.latents):
        raise _Unfit("the model caches a latent (MLA), not keys and values")
    indices = [layer.index for layer in inspection.layers]
    if not indices or len(set(indices)) < len(indices) or max(indices) >= num_layers:
        raise _Unfit("the model's layers do not keep one cache of keys and values each")


@dataclass(frozen=True, eq=False)
class _Parts:
    layer: LayerSpec
    keys: Target
    values: Target
    ropes: tuple[Rope, ...]
    norms: tuple[KeyNorm | None, ...]
    dtype: mx.Dtype


def _parts_of(layer: nn.Module, spec: LayerSpec, modules: TargetModules) -> _Parts:
    paths = [
        name.path.rpartition(".")[0]
        for name in modules.targets
        if name.layer == spec.index and name.path.rpartition(".")[2] == KEYS
    ]
    found = [modules.targets.get(ModuleName(spec.index, f"{path}.{leaf}")) for path in paths for leaf in (KEYS, VALUES)]
    places = [place for place in found if place is not None]
    if len(places) != 2 or len(paths) != 1:
        raise _Unfit(f"layer {spec.index} does not make its keys and values by k_proj and v_proj")
    keys, values = places
    attention = dict(layer.named_modules())[paths[0]]
    widths = spec.num_kv_heads * spec.key_dim, spec.num_kv_heads * spec.value_dim
    if (keys.stop - keys.start, values.stop - values.start) != widths:
        raise _Unfit(f"layer {spec.index} does not cache what k_proj and v_proj make")
    children = attention.children()
    norms = [_key_norm(children[name], spec) for name in _NORMS if name in children]
    ropes = [children[name] for name in _ROPES if name in children]
    dtype = activation_dtype(dict(layer.named_modules())[keys.module.path])
    return _Parts(spec, keys, values, (*ropes, _no_rope), (*norms, None), dtype)


def _key_norm(module: nn.Module, spec: LayerSpec) -> KeyNorm:
    if getattr(module, "weight", mx.zeros(0)).size != spec.key_dim:
        raise _Unfit(f"layer {spec.index} norms its keys over all heads at once")
    eps = float(module.eps)
    # From ones: Gemma stores weights minus one.
    return KeyNorm(module(mx.ones(spec.key_dim)).astype(mx.float32) * math.sqrt(1 + eps), eps)


def likely_key_form(layer: nn.Module, spec: LayerSpec, modules: TargetModules) -> KeyForm | str:
    """Probable key form of a layer, or why it is unknown."""
    try:
        parts = _parts_of(layer, spec, modules)
    except _Unfit as unfit:
        return str(unfit)
    return KeyForm(parts.ropes[0], parts.norms[0])


def _no_rope(x: mx.array, offset: Any = 0) -> mx.array:
    return x


def _proved(model: nn.Module, inspection: Inspection, parts: Sequence[_Parts]) -> list[LayerForm]:
    caches = [_TwinCache() for _ in inspection.layers]
    ids = mx.broadcast_to(mx.random.randint(0, _TOKEN_IDS, (1, _NUM_TOKENS), key=mx.random.key(0)), (2, _NUM_TOKENS))
    with _disturbed(model, parts) as modules:
        try:
            mx.eval(model(ids, cache=inspection.caches(caches, make_caches(None, inspection.recurrent))))
        except Exception as error:  # a module may raise anything
            raise _Unfit(f"the model does not run for the proof: {error!s:.200}") from error
    return [_prove(each, cache, modules) for each, cache in zip(parts, caches, strict=True)]


class _TwinCache:
    """Both rows attend to the first row's KV, so that layers' inputs are equal."""

    def __init__(self) -> None:
        self.offset = _OFFSET
        self.keys = self.values = mx.zeros(0)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys, self.values = keys, values
        return mx.broadcast_to(keys[:1], keys.shape), mx.broadcast_to(values[:1], values.shape)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> None:
        return None


class _Disturbed(Stand):
    def __init__(self, original: nn.Module, key: mx.array) -> None:
        super().__init__(original)
        self._key = key
        self.noted: list[mx.array] = []  # the first row's output, the noise

    def __call__(self, x: mx.array) -> mx.array:
        y = self.original(x)
        noise = mx.random.normal(y.shape[1:], key=self._key)
        added = (noise * mx.abs(y[0]).astype(mx.float32).mean()).astype(y.dtype)
        self.noted[:] = [y[0].astype(mx.float32), added.astype(mx.float32)]
        return mx.stack([y[0], y[0] + added])


@contextmanager
def _disturbed(model: nn.Module, parts: Sequence[_Parts]) -> Iterator[dict[ModuleName, _Disturbed]]:
    names = sorted({place.module for each in parts for place in (each.keys, each.values)})
    keys, owners = mx.random.split(mx.random.key(1), len(names)), []
    for name in names:
        before, _, leaf = name.path.rpartition(".")
        owners.append((dict(model.layers[name.layer].named_modules())[before], leaf))
    disturbed = [_Disturbed(owner[leaf], key) for (owner, leaf), key in zip(owners, keys, strict=True)]
    try:
        for (owner, leaf), stand in zip(owners, disturbed, strict=True):
            setattr(owner, leaf, stand)
        yield dict(zip(names, disturbed, strict=True))
    finally:
        for (owner, leaf), stand in zip(owners, disturbed, strict=True):
            setattr(owner, leaf, stand.original)


def _prove(parts: _Parts, cache: _TwinCache, modules: Mapping[ModuleName, _Disturbed]) -> LayerForm:
    spec = parts.layer
    value = modules[parts.values.module].noted[1][:, parts.values.start : parts.values.stop]
    expected = cache.values[0].astype(mx.float32) + _by_heads(value, spec).swapaxes(0, 1)
    noted = [array[:, parts.keys.start : parts.keys.stop] for array in modules[parts.keys.module].noted]
    if not _equal(expected, cache.values[1], parts.dtype):
        raise _Unfit(f"layer {spec.index} does more to its values than v_proj")
    given, added = (_by_heads(array, spec) for array in noted)
    for norm in parts.norms:
        for rope in parts.ropes:
            form = KeyForm(rope, norm)
            if _equal(_with_residual(form, cache.keys[0], given, added), cache.keys[1], parts.dtype):
                return LayerForm(spec, parts.keys, parts.values, form)
    raise _Unfit(f"layer {spec.index} does more to its keys than a norm of each head and rope")


def _by_heads(x: mx.array, spec: LayerSpec) -> mx.array:
    return x.reshape(x.shape[0], spec.num_kv_heads, -1)


def _with_residual(form: KeyForm, keys: mx.array, given: mx.array, added: mx.array) -> mx.array:
    """From cached keys [H_kv, n, D]; `given`, `added` are [n, H_kv, D]."""
    start = mx.array([_OFFSET], mx.int32)
    if form.norm is None:
        return keys.astype(mx.float32) + form.rotated(added[None], None, start)[0]
    base, agent = form.norm.factor(given), form.norm.factor(given + added)
    own = form.rotated(added[None], agent[None], start)[0]
    return keys.astype(mx.float32) * (agent / base).T[..., None] + own


def _equal(expected: mx.array, actual: mx.array, dtype: mx.Dtype) -> bool:
    actual = actual.astype(mx.float32)
    limit = _TOLERANCE[str(dtype).rpartition(".")[2]] * mx.abs(expected).max()
    return expected.shape == actual.shape and bool((mx.abs(expected - actual).max() <= limit).item())
