"""Attention of a residual row in numpy's float64, on what the arenas hold; and the models that it is compared on."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.kv.arena import LayerArena, TensorArena
from agentcache.kv.packed import dequantise
from agentcache.kv.packing import LayerBits
from agentcache.kv.reads import BlockReads, Reads
from agentcache.models.adapters import AdapterWeights, read_adapter
from agentcache.models.attention import AttentionOptions
from agentcache.models.loader import LoadedModel
from agentcache.models.residual.kv import RowResidualKV
from tests.adapters_factory import Pair, write_mlx_lm
from tests.models import zoo
from tests.models.reference import naive_attention
from tests.tiny import ARCHITECTURES, COMMON

HEADS = {1: (2, 2), 2: (4, 2), 4: (8, 2), 8: (8, 1)}  # query and kv heads, by how many share a kv head
_HEAD_DIM = 32
KEYS_AND_VALUES = ("self_attn.k_proj", "self_attn.v_proj")


def small_model(
    architecture: str,
    shared_by: int = 2,
    dtype: mx.Dtype = mx.float32,
    kv_bits: int | LayerBits = 4,
    **overrides: Any,
) -> LoadedModel:
    """One of two layers with heads of 32 values."""
    heads, kv_heads = HEADS[shared_by]
    config = COMMON | {"vocab_size": 97, "num_hidden_layers": 2, "intermediate_size": 64} | ARCHITECTURES[architecture]
    config |= {
        "num_hidden_layers": 2,
        "hidden_size": heads * _HEAD_DIM,
        "head_dim": _HEAD_DIM,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "sliding_window_pattern": 2,
    }
    return zoo.load(config["model_type"], config | overrides, check=False, dtype=dtype, kv_bits=kv_bits)


def adapter(
    loaded: LoadedModel,
    folder: Path,
    rank: int,
    *,
    targets: Collection[str] = KEYS_AND_VALUES,
    layers: Collection[int] | None = None,
    strength: float = 0.5,
    seed: int = 0,
) -> AdapterWeights:
    """Random LoRA of these parts of the model's layers, also where it has them fused."""
    rng = np.random.default_rng(seed)
    modules, pairs = loaded.adapters.modules, {}
    for name, place in sorted(modules.targets.items()):
        if name.path in targets and (layers is None or name.layer in layers):
            in_dim, out_dim = modules.linears[place.module].in_dim, place.stop - place.start
            a = rng.standard_normal((in_dim, rank)) / np.sqrt(in_dim)
            b = rng.standard_normal((rank, out_dim)) * strength / np.sqrt(rank)
            pairs[f"model.layers.{name.layer}.{name.path}"] = Pair(a.astype(np.float32), b.astype(np.float32))
    return loaded.adapters.load(read_adapter(write_mlx_lm(folder, pairs, scale=1.0), modules))


@dataclass
class Seen:
    """One layer's attention in a step: queries [B, H_q, n, D_k], and what came out."""

    queries: mx.array
    arena: LayerArena
    rows: list[RowResidualKV]
    options: AttentionOptions
    out: mx.array


def float64(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def expected(seen: Seen, row: RowResidualKV) -> np.ndarray:
    """[H_q, n, D_v] of one residual row; block by block if its open blocks are in slots of their own."""
    queries, step = float64(seen.queries[row.row]), row.reads
    if not isinstance(step, Reads) or not step.in_segments:
        return _expected(seen, row, queries, step)
    parts = [_expected(seen, row, queries[:, start:stop], reads) for start, stop, reads in step.segments]
    return np.concatenate(parts, axis=1)


def _expected(seen: Seen, row: RowResidualKV, queries: np.ndarray, reads: BlockReads) -> np.ndarray:
    end = reads.num_keys
    keys, values = (_base(side, reads) for side in (seen.arena.keys, seen.arena.values))
    ids = row.residual_ids.tolist()[(reads.key_start - row.reads.key_start) // BLOCK_SIZE :]
    if row.key_a is not None and row.matrices.key_b is not None:
        low_rank = _tokens(row.key_a, ids, end)
        delta = (low_rank @ float64(row.matrices.key_b)).reshape(end, keys.shape[0], -1).swapaxes(0, 1)
        positions = reads.key_start + np.arange(end)
        if row.key_norms is not None and row.form.norm is not None:
            norms = _tokens(row.key_norms, ids, end).transpose(2, 1, 0)  # [2, H_kv, T]
            delta = delta * float64(row.form.norm.weight) * norms[1][..., None]
            keys = keys * (norms[1] / norms[0])[..., None]
        keys = keys + rotate(row.form.rope, delta, positions)
    if row.value_a is not None and row.matrices.value_b is not None:
        values = values + _tokens(row.value_a, ids, end) @ float64(row.matrices.value_b)
    return naive_attention(
        queries,
        keys,
        values,
        scale=seen.options.scale,
        window=reads.window,
        sinks=None if seen.options.sinks is None else float64(seen.options.sinks),
        softcap=seen.options.softcap,
    )


def _base(side: Any, reads: BlockReads) -> np.ndarray:
    made = []
    for part in reads.parts:
        form = side.form(is_open=part.is_open)
        blocks = float64(dequantise(form.gather(part.ids), form.quantisation, mx.float32))
        made.append(blocks.swapaxes(0, 1).reshape(blocks.shape[1], -1, blocks.shape[3])[:, : part.num_tokens])
    return np.concatenate(made, axis=1)


def _tokens(tensor: TensorArena, ids: list[int], end: int) -> np.ndarray:
    """What is kept of the first `end` tokens of these slots, [end, ...]."""
    blocks = float64(tensor.array[mx.array(ids)])
    return blocks.reshape(-1, *blocks.shape[2:])[:end]


def rotate(rope: Any, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """x [H, T, D] rotated as MLX's rope of these parameters does."""
    if not isinstance(rope, nn.Module):
        return x
    dims, traditional = getattr(rope, "dims", None) or rope.dim, getattr(rope, "traditional", False)
    if hasattr(rope, "_freqs"):
        periods, scale = float64(rope._freqs), 1.0
    else:
        periods, scale = rope.base ** (np.arange(0, dims, 2) / dims), rope.scale
    size = getattr(rope, "mscale", getattr(rope, "_scale", 1.0))
    angles = positions[:, None] * scale / periods
    cos, sin = np.cos(angles), np.sin(angles)
    turned, rest = x[..., :dims] * size, x[..., dims:]
    one, two = (turned[..., ::2], turned[..., 1::2]) if traditional else np.split(turned, 2, axis=-1)
    one, two = one * cos - two * sin, one * sin + two * cos
    if traditional:
        return np.concatenate([np.stack([one, two], axis=-1).reshape(turned.shape), rest], axis=-1)
    return np.concatenate([one, two, rest], axis=-1)
