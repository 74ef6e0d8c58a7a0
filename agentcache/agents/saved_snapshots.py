from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from agentcache.agents.caches import KeptCaches
from agentcache.agents.disk_jobs import is_wanted
from agentcache.blocks.origin_paths import NamedSnapshot
from agentcache.blocks.radix_tree import Node
from agentcache.blocks.snapshots import choose_saved
from agentcache.blocks.transcript import Transcript
from agentcache.models.runner import ModelRunner
from agentcache.store.manifest import AgentRecord


@dataclass(frozen=True)
class _Unsaved:
    """A lineage whose last checkpoint is only in RAM; `since` by `time.monotonic`."""

    since: float
    repeated: int


class SavedSnapshots:
    """Selects checkpoints to save, and tracks lineages whose last one is only in RAM. Engine thread only.

    Args:
        fits: as `Disk.fits`.
        first_thought: tokens before the first thought, which a chat template may omit later.
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
        self._unsaved: dict[str, _Unsaved] = {}  # oldest first

    def choose(self, record: AgentRecord, lasting: int, repeated: int, *, final: bool) -> AgentRecord:
        """Return the record with the checkpoints to save; without new ones if the disk budget cannot hold them.

        Args:
            lasting: position after the system prompt; 0 if unknown.
            repeated: as in `Submit`; if `final`, that of the last turn.
            final: whether to save all that a restart would compute again.
        """
        cache = self._caches.base.prefix
        snapshots = cache.snapshots
        if snapshots is None:
            return record
        if final and record.name in self._unsaved:
            repeated = self._unsaved[record.name].repeated
        root = self._caches.root(self._caches.base, record.salt)
        nodes = cache.checkpoints.find(root, record.transcript.ids, record.num_saved, record.producer)
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
        # Files hold only finite values.
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
        """Positions before the end where a continuing prompt may branch."""
        start = None if record.producer is None else record.producer.start
        places = [self._first_thought(record.transcript), start, repeated or None]
        return [place for place in places if place is not None and place < record.num_saved]

    def _is_finite(self, node: Node) -> bool:
        return node.state is not None and self._runner.is_finite_state(node.state)

    def is_unsaved(self, name: str) -> bool:
        return name in self._unsaved

    def forget(self, name: str) -> None:
        self._unsaved.pop(name, None)

    def idle(self, now: float, idle: float) -> list[str]:
        return [name for name, unsaved in self._unsaved.items() if now - unsaved.since >= idle]

    @property
    def unsaved_since(self) -> float | None:
        return next((unsaved.since for unsaved in self._unsaved.values()), None)
