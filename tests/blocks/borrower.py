"""Who borrows of a cache's ledger as copies of adapters do, and who takes of it as weights do."""

from __future__ import annotations

from agentcache.api.stats import ADAPTERS, STACKS
from agentcache.blocks.ledger import Account, Ledger
from agentcache.blocks.prefix_cache import PrefixCache


class Borrower:
    """Borrows, and gives all of it back when somebody needs it.

    Attributes:
        ended: how often that has been.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ended = 0
        self._account = find_or_open(ledger, STACKS)
        self._account.give_way = self._end

    def borrow(self, num_bytes: int) -> None:
        self._account.borrow(num_bytes)

    @property
    def lent(self) -> int:
        return self._account.claimed

    def _end(self, num_bytes: int, asker: Account) -> None:
        assert num_bytes > 0 and asker is not self._account
        self.ended += 1
        self._account.set_bytes(0)


def find_or_open(ledger: Ledger, kind: str) -> Account:
    known = (account for account in ledger.accounts if account.kind == kind)
    return next(known, None) or ledger.open(kind, on_loan=kind == STACKS)


def leave(cache: PrefixCache, num_bytes: int) -> bool:
    """Have weights take all but so many bytes; False if running requests, or floors, are in the way."""
    account = find_or_open(cache.ledger, ADAPTERS)
    wanted = cache.ledger.budget - num_bytes
    if wanted > account.claimed and not account.ask(wanted - account.claimed):
        return False
    account.set_bytes(wanted)
    return True
