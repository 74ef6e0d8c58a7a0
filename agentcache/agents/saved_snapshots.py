"""Which snapshots of recurrent state a lineage has on disk. For models without recurrent layers: none."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from agentcache.agents.caches import KeptCaches
from agentcache.agents.commit import is_wanted
from agentcache.blocks.lanes import NamedSnapshot
from agentcache.blocks.radix_tree import Node
from agentcache.blocks.snapshot_plan import choose_saved
from agentcache.blocks.transcript import Transcript
from agentcache.models.runner import ModelRunner
from agentcache.store.manifest import AgentRecord


@dataclass(frozen=True)
class _Unsaved:
    """A lineage whose last snapshots are in RAM only.

    Args:
        since: when its last turn ended, by `time.monotonic`.
        repeated: as of `SavedSnapshots.choose`.
    """

    since: float
    repeated: int


class SavedSnapshots:
    """Chooses them, and knows which lineages end with one that is in RAM only. Belongs to the engine thread.

    Args:
        fits: whether the disk budget could hold a lineage with so many tokens.
        first_thought: tokens in front of the first thought, which a chat template may not show again; None without one.
    """

    def __init__(
        self,
        caches: KeptCaches,
        runner: ModelRunner,
        fits: Callable[[AgentRecord, int], bool],
        first_thought: Callable[[Transcript], int | None],
    ) -> None:
        self._caches = caches
        self._runner = runner
        self._fits = fits
        self._first_thought = first_thought
        self._unsaved: dict[str, _Unsaved] = {}  # by lineage, oldest first

    def choose(self, record: AgentRecord, lasting: int, repeated: int, *, final: bool) -> AgentRecord:
        """The record with the snapshots that are to be on disk; those that there is no room for are left out.

        Args:
            lasting: the position of the snapshot behind its system prompt; 0 where that is not known.
            repeated: tokens that the next prompt repeats, as of `Submit`; of the last turn, if `final`.
            final: nothing of it is to be computed again after a restart.
        """
        cache = self._caches.base.prefix
        snapshots = cache.snapshots
        if snapshots is None:
            return record
        if final and record.name in self._unsaved:
            repeated = self._unsaved[record.name].repeated
        root = self._caches.root(self._caches.base, record.salt)
        nodes = cache.find_snapshots(root, record.transcript.ids, record.num_saved, record.producer)
        found = {node.end: node for node in nodes}
        saved = {end for end, node in found.items() if not is_wanted(node, snapshots.index)}
        lasting = lasting or min((each.num_tokens for each in record.snapshots), default=0)
        choose = partial(
            choose_saved,
            found,
            saved,
            lasting=lasting,
            num_tokens=record.num_saved,
            every=snapshots.every,
            returns=self._returns(record, repeated),
        )
        chosen = choose(final=final)
        # A file holds finite values only.
        sound = (end for end in chosen if end in saved or self._is_finite(found[end]))
        named = tuple(NamedSnapshot(end, found[end].chain, snapshots.index) for end in sound)
        self._unsaved.pop(record.name, None)
        if not final and not {each.num_tokens for each in named}.issuperset(choose(final=True)):
            self._unsaved[record.name] = _Unsaved(time.monotonic(), repeated)
        with_all = replace(record, snapshots=named)
        if self._fits(with_all, record.num_saved):
            return with_all
        return replace(record, snapshots=tuple(each for each in named if each.num_tokens in saved))

    def _returns(self, record: AgentRecord, repeated: int) -> list[int]:
        """Positions, beside the end, at which a prompt that continues the lineage may branch off."""
        start = None if record.producer is None else record.producer.start
        places = [self._first_thought(record.transcript), start, repeated or None]
        return [place for place in places if place is not None and place < record.num_saved]

    def _is_finite(self, node: Node) -> bool:
        return node.state is not None and self._runner.is_finite_state(node.state)

    def is_unsaved(self, name: str) -> bool:
        """Whether that lineage's last snapshot is in RAM only."""
        return name in self._unsaved

    def forget(self, name: str) -> None:
        """Nothing more is to be done for that lineage."""
        self._unsaved.pop(name, None)

    def idle(self, now: float, idle: float) -> list[str]:
        """Lineages whose last snapshot is in RAM only, and whose last turn ended `idle` seconds before `now`."""
        return [name for name, unsaved in self._unsaved.items() if now - unsaved.since >= idle]

    @property
    def unsaved_since(self) -> float | None:
        """When the first of the lineages ended its turn whose last snapshot is in RAM only; None if there is none."""
        return next((unsaved.since for unsaved in self._unsaved.values()), None)
