"""What attention is told of rows with residuals: where these lie, and how a layer makes keys of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.kv.arena import TensorArena
from agentcache.kv.step_plan import Reads

Rope = Callable[..., mx.array]


_MOST_SCORES, _MOST_BLOCKS = 1 << 24, 16  # of a piece
# A row is read in so many: several copies of a piece's keys and values are alive while it is put together, and all of
# them are to take less than the keys of the whole row.
_PIECES = 8


def piece_blocks(num_blocks: int, num_queries: int) -> int:
    """Blocks that a residual row reads at a time, of `num_blocks`, for so many queries over all heads."""
    return max(1, min(_MOST_BLOCKS, num_blocks // _PIECES, _MOST_SCORES // (num_queries * BLOCK_SIZE)))


@dataclass(frozen=True, eq=False)
class KeyNorm:
    """The norm of each head's keys: ρ(k) * k * weight with ρ(k) = 1 / sqrt(mean(k²) + eps).

    Args:
        weight: float32 [D].
    """

    weight: mx.array
    eps: float

    def factor(self, keys: mx.array) -> mx.array:
        """ρ, float32 [...], of float32 keys [..., D]."""
        return mx.rsqrt(mx.square(keys).mean(axis=-1) + self.eps)


@dataclass(frozen=True, eq=False)
class KeyForm:
    """What a layer does to keys before they are cached.

    Args:
        rope: of keys [N, H_kv, n, D] from `offset` on.
        norm: of keys, before rope; None for none.
    """

    rope: Rope
    norm: KeyNorm | None

    def rotated(self, delta: mx.array, factor: mx.array | None, starts: mx.array) -> mx.array:
        """What an adapter adds to base's cached keys: float32 [N, H_kv, n, D].

        Args:
            delta: x·A·B float32 [N, n, H_kv, D].
            factor: ρ of the keys with the adapter, [N, n, H_kv]; None without a norm.
            starts: position of the first of the n tokens, int32 [N].
        """
        if self.norm is not None and factor is not None:
            delta = delta * self.norm.weight * factor[..., None]
        rotated: mx.array = self.rope(delta.swapaxes(1, 2), offset=starts)
        return rotated


@dataclass(frozen=True, eq=False)
class LayerMatrices:
    """An adapter's part in one layer's keys and values, float32; None where it has none.

    Args:
        key_a, value_a: [in, r].
        key_b: [r, H_kv * D_k].
        value_b: [H_kv, r, D_v].
    """

    key_a: mx.array | None
    key_b: mx.array | None
    value_a: mx.array | None
    value_b: mx.array | None


@dataclass(frozen=True, eq=False)
class RowOverlay:
    """One residual row in one layer.

    Args:
        row: its place in the step.
        reads: base's blocks that it reads.
        residual_ids: slots of the residuals of the same tokens, int32 [num_blocks].
        form: how the layer makes its keys.
        matrices: the adapter's.
        key_a, key_norms, value_a: where the residuals lie; None where there are none.
    """

    row: int
    reads: Reads
    residual_ids: mx.array
    form: KeyForm
    matrices: LayerMatrices
    key_a: TensorArena | None
    key_norms: TensorArena | None
    value_a: TensorArena | None


@dataclass(frozen=True, eq=False)
class LayerOverlay:
    """The rows of a step in one layer, where some have residuals.

    Args:
        plain: places of the others, int32.
        plain_reads: of these; None where there is none.
        rows: those with residuals.
        order: each row's place when the plain ones come first, and then these; int32 [B].
    """

    plain: mx.array
    plain_reads: Reads | None
    rows: Sequence[RowOverlay]
    order: mx.array
