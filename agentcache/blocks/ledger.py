"""Who has taken how much RAM, who keeps how much in any case, and who gives way to whom.

One budget, shared by accounts. Each has a floor: bytes that are kept for it, taken or not. Room is what is left of the
budget beside all that is claimed and all floors. Where an account lacks room it asks others, in the order of
`GIVES_WAY`. Claimed is capacity, the memory that an account holds; used is what of it holds something.

    base.KIND     slots of the base cache, by attention kind; floor: what one short sequence needs
    residual.ADAPTER.KIND   slots of one adapter's residuals; all adapters have one share of the budget, which base
                  may use as long as they do not
    adapters      weights of adapters on the device
    stacks        copies of adapters for steps that mix them: on loan, so all comes back when another account asks
    weights       of the model; loaded before there was a cache, and counted beside its budget
    trunk         hidden states; a budget of its own
    state         recurrent state of running rows, and snapshots of it; its floor is its budget, so nobody gives way
    transcripts   of agents used last; more than its floor where some are not on disk yet
    temporaries   what the step that was let through last takes, by estimate; the device's free memory is its limit
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from agentcache.errors import BrokenInvariant

BASE, ADAPTERS, STACKS, TRUNK, STATE, TEMPORARIES = "base", "adapters", "stacks", "trunk", "state", "temporaries"
RESIDUAL, WEIGHTS, TRANSCRIPTS = "residual", "weights", "transcripts"
UNBOUNDED = 2**62

_NO_SHARES: Mapping[str, int] = {}

# Who is asked for room, first to last, by whom. Weights never give way: they leave when no request needs them.
GIVES_WAY: Mapping[str, tuple[str, ...]] = {
    BASE: (BASE, STACKS),  # slots of another attention kind that nobody reads
    RESIDUAL: (BASE, STACKS, RESIDUAL),  # base holds more than its own then: residuals are within their share
    ADAPTERS: (BASE, STACKS, RESIDUAL),
    STACKS: (BASE,),
}


@dataclass(frozen=True)
class RamUse:
    """One account's bytes. `capacity_bytes` is what it holds, `used_bytes` what of that holds something."""

    kind: str
    capacity_bytes: int
    used_bytes: int
    floor_bytes: int = 0


@dataclass(eq=False)
class Account:
    """Bytes of one kind. Made by `Ledger.open`.

    Args:
        kind: `family` or `family.part`.
        floor: bytes that are kept for it.
        apart: bytes of a budget that is its own; None where it shares the ledger's.
        on_loan: all of it comes back when another account asks.
        measure: tells how many of the claimed bytes hold something; None where all do.
        give_way: called as `give_way(num_bytes, asker)`: releases so many bytes or as many as it can. It must neither
            claim nor ask.
        claimed: bytes that it has taken.
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
        """Bytes that are not there for others: claimed, or kept for it."""
        return max(self.claimed, self.floor)

    @property
    def room(self) -> int:
        """Bytes that it can claim with nobody giving way."""
        if self.apart is not None:
            return self.apart - self.claimed
        return min(self._common_room, self.share_left)

    @property
    def _common_room(self) -> int:
        """What is left of the one budget."""
        return self.ledger.budget - self.claimed - sum(each.held for each in self.ledger.sharing if each is not self)

    @property
    def share_left(self) -> int:
        """What is left of its family's share; without a bound where the family has none."""
        return self.ledger.share_left(self.family)

    @property
    def room_without_loans(self) -> int:
        """The same, if all that is on loan came back: of its family's share too, which others may hold meanwhile."""
        if self.family in self.ledger.shares:
            return self.share_left
        loans = (each for each in self.ledger.sharing if each.on_loan and each is not self)
        return self.room + (0 if self.apart is not None else sum(each.claimed for each in loans))

    def claim(self, num_bytes: int) -> None:
        """Take bytes, for which there is room."""
        if num_bytes > self.room:
            raise BrokenInvariant(f"{self.kind} claims {num_bytes} bytes and has room for {self.room}")
        self.claimed += num_bytes

    def release(self, num_bytes: int) -> None:
        """Give bytes back."""
        if not 0 <= num_bytes <= self.claimed:
            raise BrokenInvariant(f"{self.kind} releases {num_bytes} of {self.claimed} bytes")
        self.claimed -= num_bytes

    def settle(self, num_bytes: int) -> None:
        """Have claimed exactly so many bytes."""
        if num_bytes > self.claimed:
            self.claim(num_bytes - self.claimed)
        else:
            self.release(self.claimed - num_bytes)

    def borrow(self, num_bytes: int) -> None:
        """Have claimed so many bytes, for which others are asked; less where they cannot spare as much."""
        missing = num_bytes - self.claimed
        if missing > 0 and not self.ask(missing):
            num_bytes = self.claimed + max(0, self.room)
        self.settle(num_bytes)

    def ask(self, num_bytes: int) -> bool:
        """Have others give way until there is room for so many bytes; False where what they can spare is not enough.

        Where its family's share is too small, nobody else can help: the others of the family go first.
        """
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
    """All accounts. Plain counting: whoever holds the memory sees to it that it is as claimed.

    Args:
        budget: bytes that all accounts without a budget of their own may take together.
        shares: of it, what the accounts of a family may take together at most. Others may use what they do not.

    Attributes:
        accounts: all; of a family with a share, those used least recently first.
        sharing: the accounts of the one budget.
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
        """A new account, with nothing claimed; the arguments are those of `Account`."""
        if any(account.kind == kind for account in self.accounts):
            raise BrokenInvariant(f"there are two accounts {kind}")
        account = Account(self, kind, floor, apart, on_loan, used, give_way)
        self.accounts.append(account)
        if apart is None:
            self.sharing.append(account)
        return account

    def close(self, account: Account) -> None:
        """There is no such account any more; it has given all back."""
        if account.claimed:
            raise BrokenInvariant(f"{account.kind} still has {account.claimed} bytes")
        self.accounts.remove(account)
        if account.apart is None:
            self.sharing.remove(account)

    def note_use(self, account: Account) -> None:
        """An account of a family with a share is in use: the family's others are asked before it."""
        if account.family in self.shares:
            self.accounts.remove(account)
            self.accounts.append(account)

    def share_left(self, family: str) -> int:
        """What is left of a family's share; without a bound where it has none."""
        if family not in self.shares:
            return UNBOUNDED
        return self.shares[family] - sum(each.claimed for each in self.accounts if each.family == family)

    @property
    def room(self) -> int:
        """Bytes of the budget that nobody has claimed, nor has kept for it."""
        return self.budget - sum(each.held for each in self.sharing)

    @property
    def floors(self) -> int:
        """Bytes below which the budget must not be."""
        return sum(account.floor for account in self.sharing)

    def left_for(self, family: str) -> int:
        """Bytes that the accounts of a family may take together, if all that is on loan came back."""
        if family in self.shares:
            return self.shares[family]
        return self.budget - sum(each.held for each in self.sharing if each.family != family and not each.on_loan)

    def statement(self) -> tuple[RamUse, ...]:
        """All accounts as they are now."""
        return tuple(RamUse(each.kind, each.claimed, each.used, each.floor) for each in self.accounts)

    def check_integrity(self) -> None:
        """Raise BrokenInvariant unless all keep within their budgets, off others' floors, and use what they claim."""
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
            raise BrokenInvariant("what is kept for somebody has been taken by others")
