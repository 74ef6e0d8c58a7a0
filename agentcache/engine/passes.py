"""How a request is computed: a list of passes, one after the other.

Scheduler, builder and pace read the current one.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentcache.adapters.activation import AdapterUse
from agentcache.blocks.sequence import CacheSequence
from agentcache.blocks.trunk_match import TrunkMatch


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
    """

    computes: AdapterUse | None
    end: int | None
    writes: CacheSequence
    cut: int = 0

    @property
    def decoder(self) -> str | None:
        """Digest of the model of its own that computes the pass; None for the base model, with a LoRA or without."""
        return self.computes.digest if self.computes is not None and self.computes.is_decoder else None

    @property
    def is_done(self) -> bool:
        return self.end is not None and self.writes.num_tokens >= self.end


def plan_passes(use: AdapterUse | None, sequence: CacheSequence, ahead: TrunkMatch | None) -> list[Pass]:
    """The passes of a request that uses an adapter so, or None, and has its sequence.

    Args:
        ahead: what the trunk has for it.
    """
    acts = None if use is None or use.start is None else use
    passes = []
    if ahead is not None:
        passes.append(Pass(acts, ahead.end, sequence, ahead.cut))
    if acts is not None and acts.is_decoder:
        passes.append(Pass(None, acts.start, sequence))
    return [*passes, Pass(acts, None, sequence)]
