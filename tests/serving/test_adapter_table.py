"""Names, users and room for weights, against a model that keeps everything in plain sets."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentcache.adapters.table import AdapterTable, ServedAdapter, check_adapter_name, resolve_policy
from agentcache.api.policy import Policy
from agentcache.errors import InvalidRequest, NotFound
from agentcache.models.adapters import Adapter
from agentcache.models.decoder import Decoder

BUDGET = 100
SIZES = {"d1": 30, "d2": 40, "d3": 50, "d4": 100}


def make_source(digest: str = "d1", invocation: tuple[int, ...] | None = None, nbytes: int = 30) -> Adapter:
    return Adapter(digest, Path("/adapters") / digest, "peft", {}, 0, 0, nbytes, invocation, 0)


def make_served(name: str, digest: str = "d1") -> ServedAdapter:
    return ServedAdapter(name, make_source(digest, nbytes=SIZES[digest]), Policy.EXACT, frozenset([0]))


class TableMachine(RuleBasedStateMachine):
    """Requests come, name an adapter and go, adapters are renamed, and weights come and make room."""

    def __init__(self) -> None:
        super().__init__()
        self.table = AdapterTable(BUDGET)
        self.named: dict[str, str] = {}
        self.running: list[ServedAdapter] = []
        self.resident: list[str] = []  # least recently used first

    @rule(name=st.sampled_from("xyz"), digest=st.sampled_from(sorted(SIZES)))
    def put(self, name: str, digest: str) -> None:
        self.table.put(make_served(name, digest))
        self.named[name] = digest

    @precondition(lambda self: self.named)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.named)))
        self.table.remove(name)
        del self.named[name]

    @precondition(lambda self: self.named)
    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        served = self.table.get(data.draw(st.sampled_from(sorted(self.named))))
        assert served.digest == self.named[served.name]
        self.table.claim(served)
        self.running.append(served)
        if served.digest in self.resident:
            self.resident.remove(served.digest)
            self.resident.append(served.digest)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.table.release(self.running.pop(data.draw(st.integers(0, len(self.running) - 1))))

    @rule(digest=st.sampled_from(sorted(SIZES)))
    def load(self, digest: str) -> None:
        if digest in self.resident:
            return
        used = {served.digest for served in self.running}
        victims = self.table.victims(SIZES[digest])
        kept = sum(SIZES[other] for other in self.resident if other in used)
        assert (victims is None) == (kept + SIZES[digest] > BUDGET)
        if victims is None:
            return
        idle = [other for other in self.resident if other not in used]
        assert victims == idle[: len(victims)], "least recently used first"
        for victim in victims:
            self.table.set_dropped(victim)
            self.resident.remove(victim)
        if victims:  # one fewer would not have been enough
            held = sum(SIZES[other] for other in self.resident) + SIZES[victims[-1]]
            assert held + SIZES[digest] > BUDGET
        self.table.set_resident(digest, SIZES[digest])
        self.resident.append(digest)

    @rule()
    def drop_orphans(self) -> None:
        wanted = set(self.named.values()) | {served.digest for served in self.running}
        orphans = self.table.orphans()
        assert set(orphans) == set(self.resident) - wanted
        for digest in orphans:
            self.table.set_dropped(digest)
            self.resident.remove(digest)

    @invariant()
    def adds_up(self) -> None:
        assert self.table.resident_bytes == sum(SIZES[digest] for digest in self.resident) <= BUDGET
        assert [adapter.name for adapter in self.table] == sorted(self.named)
        for adapter in self.table:
            info = self.table.info(adapter)
            assert info.resident == (adapter.digest in self.resident)
            assert info.running == sum(served.digest == adapter.digest for served in self.running)


TestTable = TableMachine.TestCase


def test_unknown_names() -> None:
    table = AdapterTable(BUDGET)
    for call in (table.get, table.remove):
        with pytest.raises(NotFound) as caught:
            call("poet")
        assert caught.value.code == "adapter_not_found"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "a:b", "a b", "é", "x" * 65, "a\n"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(InvalidRequest):
        check_adapter_name(name)


@given(st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}", fullmatch=True))
def test_names(name: str) -> None:
    assert check_adapter_name(name) == name


def test_what_auto_stands_for() -> None:
    plain, activated, decoder = make_source(), make_source(invocation=(1,)), Decoder("d", Path("/d"), 1, ())
    assert resolve_policy(Policy.AUTO, plain) is Policy.EXACT
    assert resolve_policy(Policy.AUTO, activated) is Policy.ACTIVATED
    assert resolve_policy(Policy.EXACT, activated) is Policy.EXACT
    assert resolve_policy(Policy.AUTO, decoder) is resolve_policy(Policy.PREFILL_SHARE, decoder) is Policy.PREFILL_SHARE
    with pytest.raises(InvalidRequest, match="whole model"):
        resolve_policy(Policy.EXACT, decoder)


def test_what_was_used_last_leaves_last() -> None:
    table = AdapterTable(BUDGET)
    for digest in ("d1", "d2"):
        table.set_resident(digest, SIZES[digest])
    served = make_served("x", "d1")
    table.claim(served)
    table.release(served)
    assert table.victims(50) == ["d2"]
