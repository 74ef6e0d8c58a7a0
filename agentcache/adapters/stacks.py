"""Borrows RAM for stacks: copies of adapters that speed up mixed steps, until a request needs their bytes."""

from __future__ import annotations

from collections.abc import Sequence

from agentcache.api.stats import BASE, STACKS
from agentcache.blocks.ledger import Account, Ledger
from agentcache.models.adapters import AdapterWeights, RowAdapter
from agentcache.models.lora import Stacks, can_stack, stacked_bytes

_SHARE = 0.5  # of what base's cache can spare
_REVIEW_STEPS = 256  # by then every row has needed a block


class StackLoan:
    """Decides which adapters are stacked. Engine thread only."""

    def __init__(self, stacks: Stacks, ledger: Ledger) -> None:
        self._stacks = stacks
        self._ledger = ledger
        self._account = ledger.open(STACKS, on_loan=True, used=lambda: stacks.nbytes, give_way=self._give_way)
        self._steps = 0
        self._used: set[AdapterWeights] = set()  # in mixed steps since the last review
        self._refused: frozenset[AdapterWeights] = frozenset()

    def prepare(self, rows: Sequence[RowAdapter | None]) -> None:
        """Stack the next step's adapters, if several and there is room."""
        self._review()
        adapters = frozenset(row.weights for row in rows if row is not None)
        if len(adapters) < 2:
            return
        self._used |= adapters
        if not self._stacks.covers(adapters) and not self._is_refused(adapters) and can_stack(adapters):
            self._stack(adapters)

    def _review(self) -> None:
        self._steps += 1
        if self._steps < _REVIEW_STEPS:
            return
        if not self._used.issuperset(self._stacks.adapters):
            self._stacks.clear()
        if not self._refused:
            self._account.borrow(self._stacks.nbytes)
        self._steps, self._used, self._refused = 0, set(), frozenset()

    def _is_refused(self, adapters: frozenset[AdapterWeights]) -> bool:
        return bool(self._refused) and adapters >= self._refused

    def _stack(self, adapters: frozenset[AdapterWeights]) -> None:
        if self._has_room(stacked_bytes(adapters)):
            self._stacks.cover(adapters)
        else:
            self._refused = adapters

    def _has_room(self, nbytes: int) -> bool:
        most = (self._ledger.left_for(BASE) - self._ledger.floors) * _SHARE
        if self._account.claimed < nbytes <= most:
            self._account.borrow(nbytes)
        return self._account.claimed >= nbytes

    def _give_way(self, num_bytes: int, asker: Account) -> None:
        self._refused = self._stacks.adapters or self._refused
        self._stacks.clear()
        self._account.set_bytes(0)

    def forget(self, weights: AdapterWeights) -> None:
        """Drop references to an adapter. The loan stays until the next review."""
        if weights in self._stacks.adapters:
            self._stacks.clear()
        self._used.discard(weights)
        self._refused = frozenset()
