"""Find a model's attention modules, read off what they cache, replace them, and prove each replacement equal.

Structural: a model is taken for what its modules are, not for its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE

from agentcache.blocks.pool import BlockPool, BlockTable
from agentcache.errors import BrokenInvariant, UnsupportedModel
from agentcache.kv.arena import LayerArena, dequantise, quantise
from agentcache.kv.batch_cache import BatchQuantizedKVCache
from agentcache.kv.spec import CacheSpec, LayerSpec, Quantisation, make_groups, quantisation_for
from agentcache.kv.step_cache import StepCache
from agentcache.kv.step_plan import Reads, Writes
from agentcache.models.attention import Attention, activation_dtype, can_rehost, num_kv_heads, num_query_heads
from agentcache.models.mla import LatentAttention, is_latent, latent_dim

_CHECK_STEPS = (5, 20, 1)  # tokens a step: packed prefill, unpacked prefill, decode
_CHECK_WINDOW = 7  # short, so that tokens leave it during the check
_TOLERANCE = {mx.float32: 1e-4, mx.float16: 2e-2, mx.bfloat16: 6e-2}


@dataclass(frozen=True)
class Site:
    """An attention module and where it hangs."""

    layer: nn.Module
    name: str
    module: nn.Module
    spec: LayerSpec


def rehost(model: nn.Module, model_type: str, config: dict[str, Any], *, check: bool = True) -> CacheSpec:
    """Replace every attention module of an mlx-lm model; returns what the model caches.

    Raises:
        UnsupportedModel: a layer keeps something other than keys and values, has an attention that is not understood,
            its replacement gives other numbers than the original, or the model does not run on the replacements.
    """
    *_, spec = rehost_in_pieces(model, model_type, config, check=check)
    assert spec is not None  # it comes last
    return spec


def rehost_in_pieces(
    model: nn.Module, model_type: str, config: dict[str, Any], *, check: bool = True
) -> Iterator[CacheSpec | None]:
    """`rehost`, for a thread that has other things to do between two layers: None for each, the result at last."""
    windows = _windows(model)
    sites = [_find_site(layer, index, windows[index]) for index, layer in enumerate(model.layers)]
    quantisation = _quantisation(sites)
    for site in sites:
        replacement = _replace(site)
        if check:
            _check_equal(site, replacement, quantisation)
        yield None
    if check:
        _check_runs(model, sites, quantisation)
    yield CacheSpec(
        model_type=model_type,
        num_attention_heads=num_query_heads(sites[0].module),
        groups=make_groups([site.spec for site in sites], quantisation),
        rope=_rope_text(config),
    )


def _rope_text(config: dict[str, Any]) -> str:
    """Every config entry that rope may be made from, also where text has a config of its own."""
    entries = [*config.items(), *config.get("text_config", {}).items()]
    return repr(sorted((k, v) for k, v in entries if "rope" in k or "rotary" in k or k == "max_position_embeddings"))


def _windows(model: nn.Module) -> list[int | None]:
    """Each layer's attention window, from the caches that mlx-lm would make for it."""
    windows: list[int | None] = []
    for index, cache in enumerate(make_prompt_cache(model)):
        if type(cache) not in (KVCache, RotatingKVCache):
            raise UnsupportedModel(f"layer {index} keeps a {type(cache).__name__}, not keys and values per token")
        if getattr(cache, "keep", 0):
            raise UnsupportedModel(f"layer {index} attends to its first {cache.keep} tokens and to a window")
        windows.append(cache.max_size if isinstance(cache, RotatingKVCache) else None)
    if len(windows) != len(model.layers):
        raise UnsupportedModel(f"{len(model.layers)} layers share {len(windows)} caches")
    return windows


def _find_site(layer: nn.Module, index: int, window: int | None) -> Site:
    for name, module in layer.children().items():
        if not isinstance(module, nn.Module):
            continue
        if isinstance(module.get("rope"), DynamicNTKScalingRoPE):
            raise UnsupportedModel(f"layer {index} uses dynamic NTK rope, whose keys depend on the prompt's length")
        if is_latent(module):
            return Site(layer, name, module, LayerSpec(index, 1, latent_dim(module), 0, window))
        if can_rehost(module):
            return Site(layer, name, module, _grouped_query_spec(module, index, window))
    raise UnsupportedModel(f"layer {index} ({type(layer).__name__}) has no attention module of a known shape")


def _grouped_query_spec(module: nn.Module, index: int, window: int | None) -> LayerSpec:
    heads = num_kv_heads(module)
    if "qkv_proj" in module:
        dim = _out_dim(module.qkv_proj) // (num_query_heads(module) + 2 * heads)
        return LayerSpec(index, heads, dim, dim, window)
    return LayerSpec(index, heads, _out_dim(module.k_proj) // heads, _out_dim(module.v_proj) // heads, window)


def _out_dim(linear: nn.Module) -> int:
    return int(linear.weight.shape[0])


def _quantisation(sites: list[Site]) -> Quantisation:
    dims = {dim for site in sites for dim in (site.spec.key_dim, site.spec.value_dim) if dim}
    dims |= {site.module.kv_lora_rank for site in sites if is_latent(site.module)}
    return quantisation_for(*dims)


def _replace(site: Site) -> nn.Module:
    kind = LatentAttention if is_latent(site.module) else Attention
    replacement = kind(site.module, site.spec)
    setattr(site.layer, site.name, replacement)
    return replacement


class _RoundTripCache:
    """mlx-lm's view of what the Q4 cache would hold: every key and value once through the quantiser."""

    def __init__(self, quantisation: Quantisation) -> None:
        self.offset = 0
        self.x: mx.array | None = None  # the module's input
        self._quantisation = quantisation
        self._held: list[mx.array] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return self._append([self.round_trip(keys), self.round_trip(values)])

    def _append(self, new: list[mx.array]) -> tuple[mx.array, mx.array]:
        self._held = [mx.concatenate(pair, axis=2) for pair in zip(self._held, new, strict=True)] if self._held else new
        self.offset += new[0].shape[2]
        return self._held[0], self._held[1]

    def round_trip(self, x: mx.array) -> mx.array:
        return dequantise(quantise(x, self._quantisation), self._quantisation, x.dtype)


class _LatentRoundTripCache(_RoundTripCache):
    """The same for MLA, where the latent goes through the quantiser and is decompressed afterwards."""

    def __init__(self, module: LatentAttention, quantisation: Quantisation) -> None:
        super().__init__(quantisation)
        self._module = module

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        latent, _ = mx.split(self._module.kv_a_proj_with_mqa(self.x), [self._module._rank], axis=-1)
        latent = self._module.kv_a_layernorm(latent)[:, None]
        cached = mx.concatenate([latent, keys[:, :1, :, self._module._nope :]], axis=-1)
        keys, values = self._module.decompress(self.round_trip(cached))
        return self._append([keys, values])


def _check_equal(site: Site, replacement: nn.Module, quantisation: Quantisation) -> None:
    """Run both modules on the same random input over the same quantised values; raise if they disagree."""
    dtype = activation_dtype(site.module.o_proj)
    window = site.spec.window and min(site.spec.window, _CHECK_WINDOW)
    arena = LayerArena(replace(site.spec, window=window), quantisation)
    ours = BatchQuantizedKVCache.empty_rows(arena, BlockPool())
    latent = isinstance(replacement, LatentAttention)
    theirs = _LatentRoundTripCache(replacement, quantisation) if latent else _RoundTripCache(quantisation)
    generator = mx.random.key(site.spec.index)
    for num_tokens in _CHECK_STEPS:
        generator, key = mx.random.split(generator)
        x = mx.random.normal((1, num_tokens, _out_dim(site.module.o_proj)), key=key).astype(dtype)
        theirs.x = x
        mask = create_causal_mask(num_tokens, theirs.offset, window_size=window)
        _compare(site.spec.index, site.module(x, mask, theirs), replacement(x, None, ours))


def _compare(index: int, expected: mx.array, actual: mx.array) -> None:
    size = mx.abs(expected).max().item()
    differences = mx.abs(expected - actual)
    difference = differences.max().item()
    # Nothing is larger than NaN, and beside an infinite value every difference is small.
    are_numbers = mx.isfinite(differences).all().item()
    if not (are_numbers and difference <= _TOLERANCE.get(expected.dtype, 1e-4) * max(size, 1e-6)):
        raise UnsupportedModel(
            f"layer {index}: the re-hosted attention differs from mlx-lm's by {difference:.3g} (values up to "
            f"{size:.3g}); this architecture is not served, as its answers could be wrong"
        )


def _check_runs(model: nn.Module, sites: list[Site], quantisation: Quantisation) -> None:
    """Run the whole model on two tokens: it may want of its caches what they do not have, such as another window."""
    tables, lengths, caches = [BlockTable([0])], [0], []
    for site in sites:
        reads, writes = Reads(tables, lengths, 2, site.spec.window), Writes(tables, lengths, 2)
        arena = LayerArena(site.spec, quantisation)
        arena.grow(1)
        caches.append(StepCache(arena, reads, writes, offset=0))
    try:
        mx.eval(model(mx.array([[0, 1]]), cache=caches))
    except (BrokenInvariant, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise UnsupportedModel(f"{type(model).__name__} does not run on the re-hosted attention: {error}") from error
