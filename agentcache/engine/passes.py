"""How a request is computed: a list of passes, one after the other.

Scheduler, builder and pace read the current one. A residual request (ForkKV, arXiv 2604.06370) is two requests in one:
base computes the tokens into its own sequence, as it does for anybody; the adapter computes them again, reads base's
keys and values, and writes what it adds to them into a sequence of its own. From the first token that is generated on
both compute a token at a time in the same step: base's row is the adapter's companion.

Where adapters have the same As (LRAgent, arXiv 2602.01053), what they add is made of base's x, by base's rows: an
adapter computes no token of a prompt but the last one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentcache.adapters.activation import AdapterUse
from agentcache.agents.caches import KeptCache
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.sequence import CacheSequence
from agentcache.blocks.trunk_match import TrunkMatch

if TYPE_CHECKING:
    from agentcache.kv.residual_arenas import ResidualArenas


@dataclass(frozen=True, eq=False)
class Overlay:
    """An adapter's residuals on top of a base sequence.

    Args:
        cache: the adapter's.
        arenas: where its blocks lie.
        residuals: its sequence there.
        base: the sequence that it is read with.
        paired_from: the tokens from here on base computes in the same steps, and those before in others, or never: it
            has them.
        is_family: the residuals are those of the adapter's family. Base's rows make them, of base's x; the adapter
            reads them only.
    """

    cache: KeptCache
    arenas: ResidualArenas
    residuals: CacheSequence
    base: CacheSequence
    paired_from: int
    is_family: bool = False

    def is_paired(self, position: int) -> bool:
        """Whether the step that writes the token's residuals writes base's keys and values of it too."""
        return position >= self.paired_from

    def written(self, base: KeptCache) -> list[tuple[KeptCache, CacheSequence]]:
        """What the next tokens' residuals are written to, and what is written beside them."""
        written = [(self.cache, self.residuals)]
        if self.is_paired(self.residuals.num_tokens):
            written.append((base, self.base))
        return written


@dataclass(frozen=True)
class Pass:
    """A stretch of a request's tokens that the same layers of the same model compute.

    It begins where the sequence ends that it writes, and goes on from there. So how far it is needs no counter, and
    passes over the same tokens may follow one another where they write different sequences.

    Args:
        computes: the adapter that is at work, from its own start on; None for base alone.
        end: the pass is done when its sequence holds so many tokens; None for one without end, which generates.
        writes: where its keys and values go.
        cut: first layer that is computed. Below it, the cache has keys and values already, and the trunk the hidden
            states; 0 for all layers.
        overlay: what is written is this, on top of base; None for keys and values.
    """

    computes: AdapterUse | None
    end: int | None
    writes: CacheSequence
    cut: int = 0
    overlay: Overlay | None = None

    @property
    def decoder(self) -> str | None:
        """Digest of the model of its own that computes the pass; None for the base model, with a LoRA or without."""
        return self.computes.digest if self.computes is not None and self.computes.is_decoder else None

    @property
    def is_done(self) -> bool:
        return self.end is not None and self.writes.num_tokens >= self.end


def plan_passes(
    use: AdapterUse | None,
    sequence: CacheSequence,
    ahead: TrunkMatch | None,
    overlay: Overlay | None = None,
    last: int = 0,
    at_once: int = BLOCK_SIZE,
) -> list[Pass]:
    """The passes of a request that uses an adapter so, or None, and has its sequence.

    Args:
        ahead: what the trunk has for it.
        overlay: what a residual request writes on top of `sequence`.
        last: the token behind which the adapter is to choose the next one; 0 where it is to compute all.
        at_once: tokens of a prompt that are computed at once, at most.
    """
    if overlay is not None:
        return list(
            _family_passes(use, overlay, last) if overlay.is_family else _residual_passes(use, overlay, at_once)
        )
    acts = None if use is None or use.start is None else use
    passes = []
    if ahead is not None:
        passes.append(Pass(acts, ahead.end, sequence, ahead.cut))
    if acts is not None and acts.is_decoder:
        passes.append(Pass(None, acts.start, sequence))
    return [*passes, Pass(acts, None, sequence)]


def _residual_passes(use: AdapterUse | None, overlay: Overlay, at_once: int) -> Iterator[Pass]:
    """Base over what it lacks, then the adapter; where there are windows, in turns: what base leaves behind, the
    adapter has still to read, so base is one chunk ahead of it at most."""
    if any(group.window is not None for group in overlay.cache.spec.groups):
        start = min(overlay.base.num_tokens, overlay.residuals.num_tokens)
        ahead = -(-at_once // BLOCK_SIZE) * BLOCK_SIZE
        for end in range(start - start % ahead + ahead, overlay.paired_from, ahead):
            yield Pass(None, end, overlay.base)
            yield Pass(use, end, overlay.residuals, overlay=overlay)
    yield Pass(None, overlay.paired_from, overlay.base)
    yield Pass(use, None, overlay.residuals, overlay=overlay)


def _family_passes(use: AdapterUse | None, overlay: Overlay, last: int) -> Iterator[Pass]:
    """Base over the tokens whose residuals the family lacks, those first whose keys and values it has; and the member
    from the last one on."""
    yield Pass(None, min(overlay.base.num_tokens, last), overlay.residuals, overlay=overlay)
    yield Pass(None, last, overlay.residuals, overlay=overlay)
    yield Pass(use, None, overlay.residuals, overlay=overlay)
