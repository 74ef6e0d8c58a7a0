"""The passes that compute a request.

For a residual request (ForkKV, arXiv 2604.06370), base computes KV. The adapter computes the same tokens again, reads
base's KV and writes the difference, the residual KV. A generated token takes both rows in one step.

Adapters with equal As (LRAgent, arXiv 2602.01053) form a family: base's rows compute its residuals, an adapter only the
last prompt token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentcache.adapters.activation import AdapterUse
from agentcache.agents.caches import KeptCache
from agentcache.blocks.block_tables import BlockTables
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.search import CachedHiddenStates

if TYPE_CHECKING:
    from agentcache.models.residual.arenas import ResidualArenas


@dataclass(frozen=True, eq=False)
class ResidualKV:
    """Residual KV on top of base's KV.

    Args:
        residuals, base: block tables in the two caches.
        paired_from: first token whose base KV is written in the same step as its residuals.
        is_family: whether base's rows write the residuals, for the adapter's family.
    """

    cache: KeptCache
    arenas: ResidualArenas
    residuals: BlockTables
    base: BlockTables
    paired_from: int
    is_family: bool = False

    def is_paired(self, position: int) -> bool:
        return position >= self.paired_from

    def written(self, base: KeptCache) -> list[tuple[KeptCache, BlockTables]]:
        written = [(self.cache, self.residuals)]
        if self.is_paired(self.residuals.num_tokens):
            written.append((base, self.base))
        return written


@dataclass(frozen=True)
class Pass:
    """A range of tokens, computed by the same layers of one model.

    It starts where its block tables end, so it needs no counter. Passes with different block tables may compute the
    same tokens.

    Args:
        computes: adapter use, active from its start; None for base.
        end: token count at which the pass is done; None for the last pass.
        cut: first layer to compute; KV and hidden states below it are cached.
        residual_kv: residual KV to write instead of KV.
    """

    computes: AdapterUse | None
    end: int | None
    writes: BlockTables
    cut: int = 0
    residual_kv: ResidualKV | None = None

    @property
    def decoder(self) -> str | None:
        """Digest of a separate decoder model; None for base or a LoRA."""
        return self.computes.digest if self.computes is not None and self.computes.is_decoder else None

    @property
    def is_done(self) -> bool:
        return self.end is not None and self.writes.num_tokens >= self.end


def plan_passes(
    use: AdapterUse | None,
    sequence: BlockTables,
    ahead: CachedHiddenStates | None,
    residual_kv: ResidualKV | None = None,
    last: int = 0,
    at_once: int = BLOCK_SIZE,
) -> list[Pass]:
    """Plan the passes of a request.

    Args:
        last: first token that the adapter must compute.
        at_once: largest chunk in tokens.
    """
    if residual_kv is not None:
        return list(
            _family_passes(use, residual_kv, last)
            if residual_kv.is_family
            else _residual_passes(use, residual_kv, at_once)
        )
    acts = None if use is None or use.start is None else use
    passes = []
    if ahead is not None:
        passes.append(Pass(acts, ahead.end, sequence, ahead.cut))
    if acts is not None and acts.is_decoder:
        passes.append(Pass(None, acts.start, sequence))
    return [*passes, Pass(acts, None, sequence)]


def _residual_passes(use: AdapterUse | None, residual_kv: ResidualKV, at_once: int) -> Iterator[Pass]:
    """With sliding windows, base and adapter alternate, so that the adapter reads base's window blocks in time."""
    if any(group.window is not None for group in residual_kv.cache.spec.groups):
        start = min(residual_kv.base.num_tokens, residual_kv.residuals.num_tokens)
        ahead = -(-at_once // BLOCK_SIZE) * BLOCK_SIZE
        for end in range(start - start % ahead + ahead, residual_kv.paired_from, ahead):
            yield Pass(None, end, residual_kv.base)
            yield Pass(use, end, residual_kv.residuals, residual_kv=residual_kv)
    yield Pass(None, residual_kv.paired_from, residual_kv.base)
    yield Pass(use, None, residual_kv.residuals, residual_kv=residual_kv)


def _family_passes(use: AdapterUse | None, residual_kv: ResidualKV, last: int) -> Iterator[Pass]:
    """Base over missing family residuals, tokens with base KV first; then the adapter."""
    yield Pass(None, min(residual_kv.base.num_tokens, last), residual_kv.residuals, residual_kv=residual_kv)
    yield Pass(None, last, residual_kv.residuals, residual_kv=residual_kv)
    yield Pass(use, None, residual_kv.residuals, residual_kv=residual_kv)
