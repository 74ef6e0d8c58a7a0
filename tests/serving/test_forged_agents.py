"""Agents whose files have right checksums and wrong values, on the real engine: it goes on, and starts again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcache.errors import RequestError
from agentcache.llm import LLM
from agentcache.store.archive import ArchiveRejected, export_agent
from agentcache.store.transcript_log import EMPTY, _changes, _replay
from agentcache.store.verify import verify_folder
from tests.serving.conversation import TokenTalk, greedy, make_ids, open_llm
from tests.serving.hybrids import EVERY
from tests.serving.saved import LENGTHS, Saved
from tests.store.forge import FORGERIES, Forgery, block_parts, packed, signed_block


@pytest.fixture(scope="module")
def archive(saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("archive") / "alice"
    export_agent(saved.cache_dir, "alice", file)
    return file


def test_a_server_starts_beside_agents_that_make_no_sense(saved: Saved, archive: Path, ram_path: Path) -> None:
    """They are set aside or rebuilt, one by one, and those that are there can be used; the sound one goes on."""
    folder = saved.copy(ram_path / "cache")
    agents = next((folder / "agents").glob("*/alice.json")).parent
    for number, change in enumerate(FORGERIES.values()):
        forgery = one_record(Forgery.of(archive)).renamed(f"a{number}")
        change(forgery)
        forgery.write_to(agents, f"a{number}")
    talk = saved.talk.fork("alice")
    with open_llm(saved.model, folder) as llm:
        known = [agent.id for agent in llm.agents()]
        assert "alice" in known and llm.stats().quarantined > 0
        third = talk.turn(llm, LENGTHS[2])
        assert (third.token_ids, third.report.cache_state) == (saved.third.token_ids, "warm")
        for agent in known[::40]:
            json.dumps(dataclasses.asdict(llm.agent(agent)), allow_nan=False)
            assert llm.generate(third.prompt_token_ids, greedy(1), agent=agent).report.saved
    with open_llm(saved.model, folder) as llm:
        assert ([agent.id for agent in llm.agents()], llm.stats().quarantined) == (known, 0)
        assert talk.turn(llm, LENGTHS[3]).token_ids == saved.fourth.token_ids


def one_record(forgery: Forgery) -> Forgery:
    """With a log of several turns as one that was written at once."""
    first, *rest = forgery.records
    forgery.records = [first, json.loads(json.dumps(_changes(EMPTY, _replay(rest))))]
    return forgery


# -- whatever the values are ------------------------------------------------------------------------------------------

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2**33),
    st.sampled_from([0, 1, 255, 256, 257, 530, 2**32 - 1, 2**63, 10**30]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["", "first", "exact", "auto", "residual", "base", "full.0", "recurrent", "prompt", "\ud83d"]),
    st.lists(st.integers(0, 300), max_size=3),
    st.just({}),
)
IDS = st.lists(st.integers(0, 500) | st.integers(0, 2**32 - 1), max_size=20)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def put(value: Any, path: tuple[Any, ...], new: Any) -> None:
    with suppress(LookupError, TypeError):  # an earlier change may have taken the place away
        for key in path[:-1]:
            value = value[key]
        value[path[-1]] = new


@st.composite
def changes(draw: st.DrawFn) -> Callable[[Forgery], None]:
    """What changes something of an agent's files, and nothing that a checksum would tell."""
    kind = draw(st.sampled_from(["manifest", "log", "ids", "ends", "lengths", "block", "tensor", "order"]))
    number, value, ids = draw(st.integers(0, 10_000)), draw(VALUES), draw(IDS)

    def change(forgery: Forgery) -> None:
        if kind in ("manifest", "log"):
            part: Any = forgery.manifest if kind == "manifest" else forgery.records
            found = list(places(part))
            put(part, found[number % len(found)], value)
        elif kind in ("ids", "ends"):
            put(forgery.records, (-1, kind), packed(ids))
        elif kind == "lengths":  # a conversation of these tokens, all of whose lengths agree
            with suppress(LookupError, TypeError, ValueError, AttributeError):
                forgery.base["num_saved"] = 0
                forgery.base.pop("snapshots", None)
                forgery.with_ids(lambda _: ids)
                ends = list(range(1, len(ids) + 1))
                put(forgery.records, (-1, "ends"), packed(ends))
                put(forgery.records, (-1, "text"), "x" * len(ids))
                put(forgery.records, (-1, "spans"), [["generated", len(ids)]] if ids else [])
                forgery.last["chains"] = {}
        elif forgery.blocks:
            index = number % len(forgery.blocks)
            name, data = forgery.blocks[index]
            head, tensors = block_parts(data)
            if kind == "order":
                forgery.blocks.append(forgery.blocks.pop(index))
            elif kind == "block":
                found = list(places(head))
                put(head, found[number % len(found)], value)
                with suppress(LookupError, TypeError, UnicodeError):
                    forgery.blocks[index] = name, signed_block(head, tensors)
            else:
                at = number % len(tensors)
                changed = tensors[:at] + bytes([number % 256]) + tensors[at + 1 :]
                forgery.blocks[index] = name, signed_block(head, changed)

    return change


@dataclass(frozen=True)
class Beside:
    """An engine with an agent of its own, a file of another agent, and a folder for what is made of it."""

    llm: LLM
    cache_dir: Path
    whole: Path
    folder: Path

    def bring_in_and_use(self, forgery: Forgery) -> bool:
        """Whether the agent is taken; then it can be listed, talked to, exported and deleted."""
        (self.folder / "forged").write_bytes(forgery.archive())
        try:
            self.llm.import_agent("forged", self.folder / "forged")
        except ArchiveRejected:
            assert [agent.id for agent in self.llm.agents()] == ["alice"]
            return False
        try:
            self._use()
        finally:
            self.llm.delete("forged")
        return True

    def _use(self) -> None:
        [_, info] = self.llm.agents()
        json.dumps(dataclasses.asdict(info), allow_nan=False)
        self.llm.restore("forged")
        for prompt, salt in ((make_ids(540, seed=3), ""), (make_ids(40, seed=3), "s"), ("xxxxxxxx and more", "")):
            with suppress(RequestError):  # its adapter, say, is not here
                report = self.llm.generate(prompt, greedy(2), agent="forged", salt=salt).report
                assert report.saved
        self.llm.evict("forged")
        export_agent(self.cache_dir, "forged", self.folder / "exported")
        (self.folder / "exported").unlink()


@pytest.fixture(scope="module", params=["plain", pytest.param("hybrid", marks=pytest.mark.slow)])
def beside(
    request: pytest.FixtureRequest, saved: Saved, qwen: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Beside]:
    folder = tmp_path_factory.mktemp("beside")
    model, options = (saved.model, {}) if request.param == "plain" else (qwen, {"snapshot_tokens": EVERY})
    with open_llm(model, folder / "here", **options) as llm:
        TokenTalk().turn(llm, 530)
    export_agent(folder / "here", "alice", folder / "whole")
    with open_llm(model, folder / "there", **options) as llm:
        TokenTalk().turn(llm, 300)
        yield Beside(llm, folder / "there", folder / "whole", folder)
        assert [agent.id for agent in llm.agents()] == ["alice"]
        llm.check_integrity()
    assert verify_folder(folder / "there").problems == ()
    with open_llm(model, folder / "there", **options) as llm:
        assert [agent.id for agent in llm.agents()] == ["alice"]


def forge_and_use(beside: Beside, made: list[Callable[[Forgery], None]]) -> None:
    forgery = Forgery.of(beside.whole)
    for change in made:
        with suppress(AssertionError):  # what it changes is no object any more, by a change before it
            change(forgery)
    beside.bring_in_and_use(forgery)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(made=st.lists(changes(), min_size=1, max_size=3))
def test_whatever_an_archive_says_the_engine_goes_on(beside: Beside, made: list[Callable[[Forgery], None]]) -> None:
    forge_and_use(beside, made)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(made=st.lists(changes(), min_size=1, max_size=4))
def test_whatever_many_archives_say_the_engine_goes_on(beside: Beside, made: list[Callable[[Forgery], None]]) -> None:
    forge_and_use(beside, made)


def test_what_is_not_changed_is_taken(beside: Beside) -> None:
    assert beside.bring_in_and_use(Forgery.of(beside.whole))
