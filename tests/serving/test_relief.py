"""While the system is short of memory: agents leave RAM before anything is refused, and come back warm."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentcache.engine.messages import RelieveMemory, dispatch
from agentcache.errors import Overloaded
from agentcache.gateway.async_engine import AsyncEngine, never_failing, watch_pressure
from agentcache.gateway.operations import ReadStats
from agentcache.llm import LLM
from agentcache.models.memory import free_memory
from agentcache.settings.config import Config
from agentcache.system.memory import (
    MACOS_CRITICAL,
    MACOS_NORMAL,
    MACOS_WARNING,
    Level,
    PressureGauge,
    PressureReading,
    SystemMemory,
)
from tests.adapters_factory import make_adapter
from tests.marks import slow
from tests.serving import inside
from tests.serving.adapter_cases import open_adapters
from tests.serving.by_hand import ByHand, by_hand
from tests.serving.conversation import (
    BLOCK_BYTES,
    DISK_BUDGET,
    RAM_BUDGET,
    TokenTalk,
    check_idle,
    cold_ids,
    greedy,
    make_ids,
    open_llm,
    outcome,
)
from tests.serving.inside import relieve

PATIENCE = 60.0
NAMES = ("alice", "bob", "carol", "dave")


def talks(llm: LLM, length: int = 700) -> list[TokenTalk]:
    """Agents with so many tokens each, used in this order."""
    found = [TokenTalk(name) for name in NAMES]
    for index, talk in enumerate(found):
        talk.turn(llm, length + 40 * index)
    return found


def states(llm: LLM) -> list[str]:
    return [llm.agent(name).cache_state for name in NAMES]


@pytest.fixture
def expected(model: Path, tmp_path: Path) -> list[list[tuple[int, float | None]]]:
    """What each agent says in its second turn where memory is never short."""
    with open_llm(model, tmp_path / "calm") as llm:
        return [outcome(talk.turn(llm, 900)) for talk in talks(llm)]


def test_all_agents_leave_and_come_back_warm(
    model: Path, tmp_path: Path, expected: list[list[tuple[int, float | None]]]
) -> None:
    with open_llm(model, tmp_path / "short") as llm:
        each = talks(llm)
        before = llm.stats()
        relieve(llm, Level.CRITICAL)
        after = llm.stats()
        check_idle(llm)
        assert states(llm) == ["warm"] * 4
        assert after.ram_bytes == inside.min_ram_budget(inside.engine_of(llm)) < before.ram_bytes
        assert after.blocks_cached == 0 and after.pressure_evicted_blocks == before.blocks_cached
        assert after.pressure_freed_bytes == before.ram_bytes - after.ram_bytes
        turns = [talk.turn(llm, 900) for talk in each]
        assert [outcome(turn) for turn in turns] == expected
        assert [turn.report.cache_state for turn in turns] == ["warm"] * 4
        relieve(llm, Level.NORMAL)
        assert outcome(each[0].turn(llm, 940)) and llm.stats().memory_pressure is Level.NORMAL


@pytest.mark.slow
def test_a_warning_takes_half_the_oldest_first_and_what_stays_is_moved_together(
    model: Path, tmp_path: Path, expected: list[list[tuple[int, float | None]]]
) -> None:
    with open_llm(model, tmp_path / "short") as llm:
        each = talks(llm)
        before = llm.stats()
        relieve(llm, Level.WARNING)
        after = llm.stats()
        check_idle(llm)
        assert states(llm)[0] == "warm" and states(llm)[-1] == "hot"
        assert before.blocks_cached // 2 <= after.blocks_cached < before.blocks_cached
        assert after.ram_bytes < before.ram_bytes
        assert after.blocks_free * BLOCK_BYTES // 2 < after.ram_bytes // 2, "little of what is kept lies idle"
        # Dave's blocks lay last and were moved: what he says is computed from the bytes that were.
        turns = [talk.turn(llm, 900) for talk in reversed(each)]
        assert turns[0].report.cache_state == "hot"
        assert [outcome(turn) for turn in reversed(turns)] == expected


@pytest.mark.slow
def test_again_and_again_until_nothing_is_left(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:
        talks(llm)
        for _ in range(8):
            relieve(llm, Level.WARNING)
        assert (llm.stats().blocks_cached, states(llm)) == (0, ["warm"] * 4)


def test_what_could_not_be_saved_stays(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:
        saved, unsaved = TokenTalk("alice"), TokenTalk("bob")
        saved.turn(llm, 700)
        unsaved.turn(llm, 300)

        def full(step: str) -> None:
            raise OSError(28, "No space left on device")

        repair = inside.set_fault(inside.engine_of(llm), full)
        assert not unsaved.turn(llm, 800).report.saved
        repair()
        for level in (Level.WARNING, Level.CRITICAL, Level.CRITICAL):
            relieve(llm, level)
        assert llm.agent("alice").cache_state == "warm"
        assert llm.agent("bob").cache_state == "hot", "RAM is the only place where this is"
        relieve(llm, Level.NORMAL)
        turn = unsaved.turn(llm, 840)
        assert turn.report.computed_tokens < 60 and turn.report.saved
        assert cold_ids(llm, turn.prompt_token_ids, 3) == turn.token_ids


@pytest.mark.slow
def test_requests_wait_for_one_another_and_none_is_refused(model: Path, tmp_path: Path) -> None:
    prompts = [make_ids(600 + 30 * seed, seed=seed) for seed in range(3)]
    with by_hand(model, tmp_path / "calm") as hand:
        alone = []
        for prompt in prompts:
            hand.run(receiver := hand.submit(prompt, greedy(12)))
            alone.append(receiver.token_ids)
    with by_hand(model, tmp_path / "short") as hand:
        first, second = hand.submit(prompts[0], greedy(12), "alice"), hand.submit(prompts[1], greedy(12), "bob")
        while not (first.token_ids and second.token_ids):
            hand.step()
        tell(hand, Level.CRITICAL)
        assert len(hand.engine.requests.running) == 2, "first what nobody reads goes"
        tell(hand, Level.CRITICAL)
        assert [each.request.agent for each in hand.engine.requests.running] == ["alice"]
        third = hand.submit(prompts[2], greedy(12), "carol")
        most = 0
        while not (first.is_done and second.is_done and third.is_done):
            most = max(most, len(hand.engine.requests.running) + len(hand.engine.requests.loading))
            hand.step() if hand.engine.has_work else hand.posted.get(timeout=30)()
        assert most == 1
        assert [receiver.token_ids for receiver in (first, second, third)] == alone
        assert hand.engine.stats().preemptions == 1
        tell(hand, Level.NORMAL)
        both = [hand.submit(prompt, greedy(12)) for prompt in prompts[:2]]
        hand.step()
        hand.step()
        assert len(hand.engine.requests.running) == 2
        hand.run(*both)


def tell(hand: ByHand, level: Level) -> None:
    told: list[object] = []
    dispatch(hand.engine, RelieveMemory(level), told.append)
    assert told == [None]
    hand.engine.check_integrity()


@pytest.mark.slow
def test_a_request_under_way_keeps_its_blocks(model: Path, tmp_path: Path) -> None:
    with by_hand(model, tmp_path / "calm") as hand:
        hand.run(calm := hand.submit(make_ids(900), greedy(40)))
    with by_hand(model, tmp_path / "short") as hand:
        for seed in range(3):
            hand.run(hand.submit(make_ids(700, seed=seed + 5), greedy(1), NAMES[seed]))
        hand.finish_writing()
        receiver = hand.submit(make_ids(900), greedy(40))
        steps = 0
        while not receiver.is_done:
            if steps % 5 == 0:
                tell(hand, (Level.WARNING, Level.CRITICAL, Level.NORMAL)[steps // 5 % 3])
            hand.step() if hand.engine.has_work else hand.posted.get(timeout=30)()
            steps += 1
        assert receiver.token_ids == calm.token_ids and steps > 40


def test_each_change_is_told_once(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_llm(model, tmp_path) as llm, caplog.at_level(logging.INFO, "agentcache.engine"):
        for level in (Level.NORMAL, Level.WARNING, Level.WARNING, Level.CRITICAL, Level.CRITICAL, Level.NORMAL):
            relieve(llm, level)
        said = [record.getMessage().partition(";")[0] for record in caplog.records if "pressure" in record.getMessage()]
    assert said == [
        "memory pressure is warning, was normal",
        "memory pressure is critical, was warning",
        "memory pressure is normal, was critical",
    ]


@pytest.mark.slow
def test_the_trunk_gives_its_memory_back(qwen3: Path, tmp_path: Path) -> None:
    folders = {"poet": make_adapter(tmp_path / "poet", qwen3, layers=[6, 7])}
    with open_adapters(qwen3, tmp_path / "cache", folders, trunk_budget=16 << 20) as llm:
        llm.generate(make_ids(600), greedy(2), agent="alice")
        assert llm.stats().trunk_ram_bytes > 0
        relieve(llm, Level.CRITICAL)
        assert llm.stats().trunk_ram_bytes == 0
        llm.generate(make_ids(600), greedy(2), adapter="poet")


# -- what the machine can give, whatever the budget says --------------------------------------------------------------


@contextmanager
def free_bytes(llm: LLM, room: int) -> Iterator[None]:
    """The machine has `room` bytes for the cache beside those that it has now, as far as the engine can know."""
    relieve(llm, Level.CRITICAL)  # what was made ready at the start goes
    relieve(llm, Level.NORMAL)
    engine = inside.engine_of(llm)
    start = llm.stats().ram_bytes
    reserve = inside.reserve(engine)

    def free() -> int:
        taken = engine.cache.allocator.capacity_bytes - start
        return int((reserve + room - taken) / 0.9) + 1

    inside.set_free_memory(engine, free)
    try:
        yield
    finally:
        inside.set_free_memory(engine, free_memory)


@pytest.mark.slow
def test_the_cache_does_not_grow_beyond_what_the_machine_has(
    model: Path, tmp_path: Path, expected: list[list[tuple[int, float | None]]]
) -> None:
    with open_llm(model, tmp_path / "short") as llm:
        room = 6 * BLOCK_BYTES
        with free_bytes(llm, room):
            most = inside.min_ram_budget(inside.engine_of(llm)) + room
            each = talks(llm)
            turns = [talk.turn(llm, 900) for talk in each]
            stats = llm.stats()
            assert stats.ram_bytes <= most < stats.ram_budget // 4
            assert [outcome(turn) for turn in turns] == expected
            assert {turn.report.cache_state for turn in turns} <= {"warm", "hot"}
            assert "warm" in states(llm)
        each[0].turn(llm, 940)


def test_a_prompt_for_which_the_machine_has_no_memory_is_refused_as_that(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:
        with free_bytes(llm, 0):
            size = llm.stats().ram_bytes // BLOCK_BYTES * 256
            with pytest.raises(Overloaded, match="no memory left") as error:
                llm.generate(make_ids(size + 600), greedy(1))
            assert (error.value.code, error.value.status) == ("insufficient_memory", 503)
            assert llm.generate(make_ids(400), greedy(2)).token_ids
        assert llm.generate(make_ids(size + 600), greedy(1)).token_ids


# -- where the system says it -----------------------------------------------------------------------------------------


def test_the_watch_tells_of_changes_and_of_pressure_that_lasts() -> None:
    readings = iter([MACOS_NORMAL] * 3 + [MACOS_WARNING] * 4 + [MACOS_CRITICAL] * 2 + [MACOS_NORMAL] * 2)
    told: list[Level] = []

    def read() -> PressureReading:
        level = next(readings, None)
        if level is None:
            raise EOFError
        return PressureReading(macos_level=level)

    async def watch(repeat: float) -> None:
        with pytest.raises(EOFError):
            await watch_pressure(read, told.append, gauge=PressureGauge(calm_seconds=0), period=0, repeat=repeat)

    asyncio.run(watch(repeat=1000))
    assert told == [Level.WARNING, Level.CRITICAL, Level.NORMAL]
    readings = iter([MACOS_NORMAL] * 3 + [MACOS_WARNING] * 3)
    told.clear()
    asyncio.run(watch(repeat=0))
    assert told == [Level.WARNING] * 3


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says it in files")
@pytest.mark.parametrize("is_on", [True, slow(False)])
def test_the_system_says_it_in_a_file(is_on: bool, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "proc" / "pressure" / "memory"
    file.parent.mkdir(parents=True)
    stalls = "some avg10={0} avg60=0.00 avg300=0.00 total=0\nfull avg10={0} avg60=0.00 avg300=0.00 total=0\n"
    file.write_text(stalls.format("0.00"))
    budgets = {"ram_budget": RAM_BUDGET, "disk_budget": DISK_BUDGET, "memory_pressure": is_on}
    config = Config(model=str(model), cache_dir=tmp_path / "cache", **budgets)

    async def run() -> list[Level]:
        engine = AsyncEngine(config, system=SystemMemory(proc=tmp_path / "proc", cgroups=tmp_path / "cgroup"))
        await engine.start()
        try:
            seen = [engine.memory_pressure]
            file.write_text(stalls.format("45.50"))
            deadline = time.monotonic() + (PATIENCE if is_on else 2.5)
            while engine.memory_pressure is Level.NORMAL and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
            assert (await engine.call(ReadStats())).memory_pressure is engine.memory_pressure
            return [*seen, engine.memory_pressure]
        finally:
            await engine.close()

    assert asyncio.run(run()) == [Level.NORMAL, Level.CRITICAL if is_on else Level.NORMAL]


def test_a_reading_that_fails_does_not_end_the_watch(caplog: pytest.LogCaptureFixture) -> None:
    readings: list[PressureReading | None] = [None, PressureReading(macos_level=MACOS_WARNING)]
    told: list[Level] = []

    def read() -> PressureReading:
        if not readings:
            raise asyncio.CancelledError
        reading = readings.pop(0)
        if reading is None:
            raise ValueError("the kernel says something new")
        return reading

    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(watch_pressure(never_failing(read), told.append, period=0))
    assert told == [Level.WARNING]
    assert "the kernel says something new" in caplog.text
