"""The ledger against a plain model: budgets and floors hold, whoever asks whom in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from agentcache.api.stats import ADAPTERS, BASE, HIDDEN_STATES, RESIDUAL, STACKS, RamUse
from agentcache.blocks.ledger import Account, Ledger
from agentcache.errors import BrokenInvariant
from tests.examples import examples

BUDGET, OWN, SHARE = 100, 30, 25
FLOORS = {"base.full": 15, "base.window": 10}
RESIDUALS = ("residual.x.full", "residual.y.full")
KINDS = (*FLOORS, ADAPTERS, STACKS, *RESIDUALS)
ASKS = {  # who is asked by whom, in order
    "base.full": ["base.window", STACKS],
    "base.window": ["base.full", STACKS],
    ADAPTERS: ["base.full", "base.window", STACKS, *RESIDUALS],
    STACKS: ["base.full", "base.window"],
    RESIDUALS[0]: ["base.full", "base.window", STACKS, RESIDUALS[1]],
    RESIDUALS[1]: ["base.full", "base.window", STACKS, RESIDUALS[0]],
}
BYTES = st.integers(0, BUDGET)


class LedgerMachine(RuleBasedStateMachine):
    """Accounts that claim, release and ask, and what each must have by then.

    Of what a cache kind has claimed, a part is `read` and stays; beyond that and its floor it gives what is asked for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(BUDGET, {RESIDUAL: SHARE})
        self.accounts = {kind: self.open(kind) for kind in KINDS}
        self.hidden_states = self.ledger.open(HIDDEN_STATES, apart=OWN)
        self.claimed = dict.fromkeys(KINDS, 0)
        self.read = dict.fromkeys(KINDS, 0)

    def open(self, kind: str) -> Account:
        return self.ledger.open(
            kind,
            floor=FLOORS.get(kind, 0),
            on_loan=kind == STACKS,
            used=lambda: self.read[kind],
            give_way=None if kind == ADAPTERS else lambda num_bytes, asker: self.give_way(kind, num_bytes, asker),
        )

    def give_way(self, kind: str, num_bytes: int, asker: Account) -> None:
        assert kind in ASKS[asker.kind]
        given = self.would_give(kind, num_bytes)
        self.accounts[kind].release(given)
        self.claimed[kind] -= given
        self.read[kind] = min(self.read[kind], self.claimed[kind])

    def would_give(self, kind: str, num_bytes: int) -> int:
        if kind == STACKS:
            return self.claimed[kind]
        return min(num_bytes, max(0, self.claimed[kind] - max(FLOORS.get(kind, 0), self.read[kind])))

    def share_left(self, kind: str) -> int:
        return SHARE - sum(self.claimed[each] for each in RESIDUALS) if kind in RESIDUALS else 2 * BUDGET

    def room(self, kind: str) -> int:
        return min(self.common_room(kind), self.share_left(kind))

    def common_room(self, kind: str) -> int:
        others = sum(max(self.claimed[other], FLOORS.get(other, 0)) for other in KINDS if other != kind)
        return BUDGET - others - self.claimed[kind]

    def after_asking(self, kind: str, num_bytes: int) -> dict[str, int]:
        """What everybody has when `kind` has asked for room: nobody gives more than is missing then, but for loans."""
        before = dict(self.claimed)
        for other in RESIDUALS:
            if other != kind and (short := num_bytes - self.share_left(kind)) > 0:
                self.claimed[other] -= self.would_give(other, short)
        for other in ASKS[kind] if num_bytes <= self.share_left(kind) else ():
            if (short := num_bytes - self.common_room(kind)) > 0:
                self.claimed[other] -= self.would_give(other, short)
        left, self.claimed = self.claimed, before
        return left

    # -- rules --------------------------------------------------------------------------------------------------------

    @rule(kind=st.sampled_from(KINDS), num_bytes=BYTES)
    def claim(self, kind: str, num_bytes: int) -> None:
        if num_bytes > self.room(kind):
            with pytest.raises(BrokenInvariant):
                self.accounts[kind].claim(num_bytes)
        else:
            self.accounts[kind].claim(num_bytes)
            self.claimed[kind] += num_bytes

    @rule(kind=st.sampled_from(KINDS), num_bytes=BYTES)
    def release(self, kind: str, num_bytes: int) -> None:
        if num_bytes > self.claimed[kind] - self.read[kind]:
            return
        self.accounts[kind].release(num_bytes)
        self.claimed[kind] -= num_bytes

    @rule(kind=st.sampled_from(KINDS), num_bytes=BYTES)
    def ask(self, kind: str, num_bytes: int) -> None:
        left = self.after_asking(kind, num_bytes)
        granted = self.accounts[kind].ask(num_bytes)
        assert self.claimed == left
        assert granted == (self.room(kind) >= num_bytes)

    @rule(num_bytes=BYTES)
    def borrow(self, num_bytes: int) -> None:
        before = self.claimed[STACKS]
        self.accounts[STACKS].borrow(num_bytes)
        lent = self.claimed[STACKS] = self.accounts[STACKS].claimed
        self.read[STACKS] = min(self.read[STACKS], lent)
        assert min(before, num_bytes) <= lent <= num_bytes
        spare = [self.would_give(kind, BUDGET) for kind in FLOORS]
        assert lent == num_bytes or (self.room(STACKS), *spare) == (0, 0, 0), "as much as there is"

    @rule(kind=st.sampled_from(KINDS), part=st.floats(0, 1))
    def use(self, kind: str, part: float) -> None:
        self.read[kind] = int(part * self.claimed[kind])

    @rule(num_bytes=BYTES)
    def fill_trunk(self, num_bytes: int) -> None:
        """Its budget is nobody else's, and the other way round."""
        if num_bytes > OWN - self.hidden_states.claimed:
            with pytest.raises(BrokenInvariant):
                self.hidden_states.claim(num_bytes)
        else:
            self.hidden_states.claim(num_bytes)

    # -- what has to hold ---------------------------------------------------------------------------------------------

    @invariant()
    def accounts_are_as_they_should_be(self) -> None:
        self.ledger.check_integrity()
        assert {kind: account.claimed for kind, account in self.accounts.items()} == self.claimed
        for kind, account in self.accounts.items():
            assert account.room == self.room(kind)
            back = 0 if kind == STACKS else self.claimed[STACKS]
            in_time = self.share_left(kind) if kind in RESIDUALS else self.room(kind) + back
            assert account.room_without_loans == in_time
        for kind, floor in FLOORS.items():
            assert self.room(kind) + self.claimed[kind] >= floor, "nobody takes what is kept for it"
        others = self.claimed[ADAPTERS] + sum(self.claimed[kind] for kind in RESIDUALS)
        assert self.ledger.left_for(BASE) == BUDGET - others
        assert self.ledger.left_for(RESIDUAL) == SHARE


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=examples(150), stateful_step_count=30, deadline=None)


def test_a_statement_tells_what_is_used_from_what_is_claimed() -> None:
    ledger = Ledger(BUDGET)
    ledger.open("base.full", floor=20, used=lambda: 5).claim(30)
    ledger.open(ADAPTERS).claim(10)
    assert ledger.statement() == (RamUse("base.full", 30, 5, 20), RamUse(ADAPTERS, 10, 10))
    assert ledger.floors == 20


def test_integrity_notices_what_is_wrong() -> None:
    ledger = Ledger(BUDGET)
    used = 0
    account = ledger.open("base.full", used=lambda: used)
    ledger.open("base.window", floor=10)
    hidden_states = ledger.open(HIDDEN_STATES, apart=OWN)
    account.claim(90)
    ledger.check_integrity()
    used = 91
    with pytest.raises(BrokenInvariant, match="uses 91 of 90"):
        ledger.check_integrity()
    used, account.claimed = 0, 91
    with pytest.raises(BrokenInvariant, match="claimed the floors"):
        ledger.check_integrity()
    account.claimed = 101
    with pytest.raises(BrokenInvariant, match="budget is exceeded"):
        ledger.check_integrity()
    account.claimed, hidden_states.claimed = 90, OWN + 1
    with pytest.raises(BrokenInvariant, match="trunk has claimed"):
        ledger.check_integrity()


def test_what_cannot_be() -> None:
    ledger = Ledger(BUDGET)
    account = ledger.open(ADAPTERS)
    with pytest.raises(BrokenInvariant, match="two accounts"):
        ledger.open(ADAPTERS)
    with pytest.raises(BrokenInvariant, match="releases"):
        account.release(1)
    with pytest.raises(BrokenInvariant, match="room for 100"):
        account.claim(BUDGET + 1)
    account.claim(1)
    with pytest.raises(BrokenInvariant, match="still has 1 bytes"):
        ledger.close(account)


def test_a_closed_account_leaves_its_floor_to_the_others() -> None:
    ledger = Ledger(BUDGET)
    other, closed = ledger.open("base.full"), ledger.open("base.window", floor=40)
    assert other.room == BUDGET - 40
    ledger.close(closed)
    assert other.room == ledger.room == BUDGET
