"""RAM accounts: claims, floors, and which account releases memory for which.

A floor is reserved, claimed or not. Claimed bytes are allocated; used bytes hold data.

    base.KIND               KV by attention kind; `open` for open blocks (`Holds`)
    residual.ADAPTER.KIND   one share for all adapters, lent to base while unused
    adapters                their weights
    stacks                  stacked adapters; on loan
    state                   recurrent state; its floor is its budget
    trunk                   hidden states; apart
    weights                 the model's; apart
    transcripts             apart; above the floor while unsaved
    temporaries             estimate for the last step; apart
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from agentcache.api.stats import ADAPTERS, BASE, RESIDUAL, STACKS, RamUse
from agentcache.errors import BrokenInvariant

UNBOUNDED = 2**62

_NO_SHARES: Mapping[str, int] = {}

# Families to ask, by asking family. Never adapters: requests need their weights.
GIVES_WAY: Mapping[str, tuple[str, ...]] = {
    BASE: (BASE, STACKS),
    RESIDUAL: (BASE, STACKS, RESIDUAL),  # base may hold the residual share
    ADAPTERS: (BASE, STACKS, RESIDUAL),
    STACKS: (BASE,),
}


@dataclass(eq=False)
class Account:
    """Bytes of one kind, `family` or `family.part`.

    Args:
        apart: separate budget in bytes; None to share the ledger's.
        on_loan: all of it returns when another account asks.
        measure: returns used bytes; None if all are.
        give_way: releases up to `num_bytes`; must not claim or ask.
    """

    ledger: Ledger
    kind: str
    floor: int
    apart: int | None
    on_loan: bool
    measure: Callable[[], int] | None
    give_way: Callable[[int, Account], None] | None
    claimed: int = 0

    def __post_init__(self) -> None:
        self.family = self.kind.partition(".")[0]

    @property
    def used(self) -> int:
        return self.claimed if self.measure is None else self.measure()

    @property
    def held(self) -> int:
        return max(self.claimed, self.floor)

    @property
    def room(self) -> int:
        if self.apart is not None:
            return self.apart - self.claimed
        return min(self._common_room, self.share_left)

    @property
    def _common_room(self) -> int:
        return self.ledger.budget - self.claimed - sum(each.held for each in self.ledger.sharing if each is not self)

    @property
    def share_left(self) -> int:
        return self.ledger.share_left(self.family)

    @property
    def room_without_loans(self) -> int:
        if self.family in self.ledger.shares:
            return self.share_left
        loans = (each for each in self.ledger.sharing if each.on_loan and each is not self)
        return self.room + (0 if self.apart is not None else sum(each.claimed for each in loans))

    def claim(self, num_bytes: int) -> None:
        if num_bytes > self.room:
            raise BrokenInvariant(f"{self.kind} claims {num_bytes} bytes and has room for {self.room}")
        self.claimed += num_bytes

    def release(self, num_bytes: int) -> None:
        if not 0 <= num_bytes <= self.claimed:
            raise BrokenInvariant(f"{self.kind} releases {num_bytes} of {self.claimed} bytes")
        self.claimed -= num_bytes

    def set_bytes(self, num_bytes: int) -> None:
        if num_bytes > self.claimed:
            self.claim(num_bytes - self.claimed)
        else:
            self.release(self.claimed - num_bytes)

    def borrow(self, num_bytes: int) -> None:
        """Set the claim to `num_bytes`, or to all that there is room for."""
        missing = num_bytes - self.claimed
        if missing > 0 and not self.ask(missing):
            num_bytes = self.claimed + max(0, self.room)
        self.set_bytes(num_bytes)

    def ask(self, num_bytes: int) -> bool:
        """Have other accounts release memory; return whether `num_bytes` fit."""
        # If the family's share is too small, only the family can help.
        self._have_give_way((self.family,), lambda: num_bytes - self.share_left)
        if self.share_left >= num_bytes:
            families = GIVES_WAY.get(self.family, ())
            self._have_give_way(
                families, lambda: num_bytes - (self.room if self.apart is not None else self._common_room)
            )
        return self.room >= num_bytes

    def _have_give_way(self, families: Iterable[str], missing: Callable[[], int]) -> None:
        for family in families:
            for other in self.ledger.accounts:
                short = missing()
                if short <= 0:
                    return
                if other.family == family and other is not self and other.claimed and other.give_way is not None:
                    other.give_way(short, self)


class Ledger:
    """All RAM accounts. Owners keep their memory equal to the claim.

    `shares`: most bytes by family, within the budget; lent while unused. `accounts`: in families with a share, least
    recently used first. `sharing`: those of the common budget.
    """

    def __init__(self, budget: int, shares: Mapping[str, int] = _NO_SHARES) -> None:
        self.budget = budget
        self.shares = shares
        self.accounts: list[Account] = []
        self.sharing: list[Account] = []

    def open(
        self,
        kind: str,
        *,
        floor: int = 0,
        apart: int | None = None,
        on_loan: bool = False,
        used: Callable[[], int] | None = None,
        give_way: Callable[[int, Account], None] | None = None,
    ) -> Account:
        if any(account.kind == kind for account in self.accounts):
            raise BrokenInvariant(f"there are two accounts {kind}")
        account = Account(self, kind, floor, apart, on_loan, used, give_way)
        self.accounts.append(account)
        if apart is None:
            self.sharing.append(account)
        return account

    def close(self, account: Account) -> None:
        if account.claimed:
            raise BrokenInvariant(f"{account.kind} still has {account.claimed} bytes")
        self.accounts.remove(account)
        if account.apart is None:
            self.sharing.remove(account)

    def note_use(self, account: Account) -> None:
        if account.family in self.shares:
            self.accounts.remove(account)
            self.accounts.append(account)

    def share_left(self, family: str) -> int:
        if family not in self.shares:
            return UNBOUNDED
        return self.shares[family] - sum(each.claimed for each in self.accounts if each.family == family)

    @property
    def room(self) -> int:
        return self.budget - sum(each.held for each in self.sharing)

    @property
    def floors(self) -> int:
        return sum(account.floor for account in self.sharing)

    def left_for(self, family: str) -> int:
        if family in self.shares:
            return self.shares[family]
        return self.budget - sum(each.held for each in self.sharing if each.family != family and not each.on_loan)

    def statement(self) -> tuple[RamUse, ...]:
        return tuple(RamUse(each.kind, each.claimed, each.used, each.floor) for each in self.accounts)

    def check_integrity(self) -> None:
        for account in self.accounts:
            if not 0 <= account.used <= account.claimed:
                raise BrokenInvariant(f"{account.kind} uses {account.used} of {account.claimed} bytes")
            if account.apart is not None and account.claimed > account.apart:
                raise BrokenInvariant(f"{account.kind} has claimed {account.claimed} of {account.apart} bytes")
        for family in self.shares:
            if self.share_left(family) < 0:
                raise BrokenInvariant(f"the share of {family} is exceeded")
        if sum(account.claimed for account in self.sharing) > self.budget:
            raise BrokenInvariant("the RAM budget is exceeded")
        if sum(account.held for account in self.sharing) > max(self.budget, self.floors):
            raise BrokenInvariant("accounts have claimed the floors of other accounts")
