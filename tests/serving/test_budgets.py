"""The budgets for RAM and disk hold all the time, and what had to go comes back right."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

import pytest

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.errors import StoreError
from agentcache.gateway.operations import ClearCache, SaveAgent
from agentcache.llm import LLM
from tests.conftest import ModelFolder
from tests.marks import slow
from tests.memos import BESIDE
from tests.serving import inside
from tests.serving.block_damage import block_files, metadata_of
from tests.serving.conversation import (
    BLOCK_BYTES,
    TokenTalk,
    cold_ids,
    greedy,
    make_ids,
    open_llm,
    transcript_of,
)


def bytes_below(folder: Path) -> int:
    """Bytes that the cache has on disk."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in BESIDE)
    return sum(path.stat().st_size for path in files)


@dataclass
class Peaks:
    """The largest values seen after any step of the engine or write of the store."""

    ram: int = 0
    arenas: int = 0
    disk: int = 0
    blocks: dict[str, int] = field(default_factory=dict)


@contextmanager
def watched(llm: LLM, cache_dir: Path) -> Iterator[Peaks]:
    """Looks at RAM after every step, and at the folder after every write."""
    engine, peaks = inside.engine_of(llm), Peaks()
    step, store = engine.step, inside.store(engine)

    def look_at_ram() -> None:
        step()
        peaks.ram = max(peaks.ram, engine.stats().ram_bytes)
        peaks.arenas = max(peaks.arenas, sum(inside.array_bytes(engine)))
        for group, count in inside.most_blocks_held(engine).items():
            peaks.blocks[group] = max(peaks.blocks.get(group, 0), count)

    def then_look_at_disk(write: Callable[..., object]) -> Callable[..., object]:
        def run(*arguments: object) -> object:
            try:
                return write(*arguments)
            finally:
                peaks.disk = max(peaks.disk, bytes_below(cache_dir))

        return run

    engine.step = look_at_ram  # type: ignore[method-assign]
    store.write_blocks = then_look_at_disk(store.write_blocks)  # type: ignore[method-assign]
    store.save_agent = then_look_at_disk(store.save_agent)  # type: ignore[method-assign]
    yield peaks


def make_agents(llm: LLM, count: int, length: int = 270) -> dict[str, TokenTalk]:
    """Agents a00, a01, … with one turn each, all different."""
    talks = {f"a{number:02}": TokenTalk(f"a{number:02}", ids=[10 + number]) for number in range(count)}
    for talk in talks.values():
        talk.turn(llm, length)
    return talks


def states(llm: LLM) -> dict[str, str]:
    return {info.id: str(info.cache_state) for info in llm.agents()}


@pytest.mark.slow
def test_ten_times_as_many_agents_as_fit_in_ram(model: Path, tmp_path: Path) -> None:
    budget = 6 * BLOCK_BYTES  # three agents of two blocks
    with open_llm(model, tmp_path, ram_budget=budget) as llm, watched(llm, tmp_path) as peaks:
        talks = make_agents(llm, 30)
        assert list(states(llm)) == list(talks)
        hot = [agent for agent, state in states(llm).items() if state == "hot"]
        assert hot == list(talks)[-len(hot) :]
        assert len(hot) in (2, 3)
        for agent in ("a00", "a13", "a28"):
            turn = talks[agent].turn(llm, 290)
            assert turn.report.cache_state == ("hot" if agent in hot else "warm")
            assert turn.report.computed_tokens < 40
            assert cold_ids(llm, turn.prompt_token_ids, 3) == turn.token_ids
            hot = [agent for agent, state in states(llm).items() if state == "hot"]
    assert 0 < peaks.ram <= budget
    assert 0 < peaks.arenas <= budget


@pytest.mark.slow
def test_the_least_recently_used_leave_ram_first(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path, ram_budget=6 * BLOCK_BYTES) as llm:
        talks = make_agents(llm, 3)
        assert set(states(llm).values()) == {"hot"}
        talks["a00"].turn(llm, 290)
        TokenTalk("new").turn(llm, 270)
        assert states(llm) == {"a00": "hot", "a01": "warm", "a02": "hot", "new": "hot"}


def test_the_disk_budget_holds_with_many_agents(model: Path, tmp_path: Path) -> None:
    budget = 8 * BLOCK_BYTES  # not quite as much as seven agents of 270 tokens and their records take
    ram = 4 * BLOCK_BYTES
    with open_llm(model, tmp_path, disk_budget=budget, ram_budget=ram) as llm, watched(llm, tmp_path) as peaks:
        talks = make_agents(llm, 16)
        assert llm.stats().save_failures == 0
        now = states(llm)
        kept = [agent for agent in talks if now[agent] != "cold"]
        assert kept == list(talks)[-len(kept) :]
        assert 4 <= len(kept) <= 7
        assert llm.stats().disk_bytes == bytes_below(tmp_path)
        for agent in ("a00", kept[-1]):
            turn = talks[agent].turn(llm, 290)
            assert cold_ids(llm, turn.prompt_token_ids, 3) == turn.token_ids
            assert (turn.report.computed_tokens == turn.report.prompt_tokens) == (agent == "a00")
    assert budget // 2 < peaks.disk <= budget
    with open_llm(model, tmp_path, disk_budget=budget) as llm:
        assert llm.stats().quarantined == 0
        assert states(llm)["a15"] == "warm"
        assert states(llm)["a01"] == "cold"


@pytest.mark.slow
def test_a_start_with_less_disk_than_is_in_use(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:
        talks = make_agents(llm, 6)
        talks["a00"].turn(llm, 290)
    held = bytes_below(tmp_path)
    with open_llm(model, tmp_path, disk_budget=held // 2) as llm:
        assert llm.stats().disk_bytes <= held // 2
        assert bytes_below(tmp_path) <= held // 2
        now = states(llm)
        assert (now["a00"], now["a05"], now["a01"], now["a02"]) == ("warm", "warm", "cold", "cold")
        for agent in ("a00", "a01"):
            turn = talks[agent].turn(llm, 320)
            assert cold_ids(llm, turn.prompt_token_ids, 3) == turn.token_ids
            assert turn.report.saved


@pytest.mark.slow
def test_another_models_blocks_give_way(model: Path, model_folder: ModelFolder, tmp_path: Path) -> None:
    with open_llm(model_folder("mistral", seed=1, num_hidden_layers=2), tmp_path) as llm:
        make_agents(llm, 4)
    budget = bytes_below(tmp_path) + 1000
    with open_llm(model, tmp_path, disk_budget=budget) as llm, watched(llm, tmp_path) as peaks:
        assert TokenTalk().turn(llm, 270).report.saved
    assert peaks.disk <= budget


@pytest.mark.parametrize("window", [32, slow(300), slow(512)])
def test_sliding_windows_bound_ram(window: int, model_folder: ModelFolder, tmp_path: Path) -> None:
    """Blocks per window group never exceed the window's and a chunk's, in prefill, in decoding and after a turn."""
    model = model_folder("gemma3_text", sliding_window=window)
    with open_llm(model, tmp_path) as llm, watched(llm, tmp_path) as peaks:
        talk = TokenTalk(max_tokens=6)
        talk.turn(llm, 1500)
        talk.turn(llm, 1540)
        info = llm.agent("alice")
        engine = inside.engine_of(llm)
        groups, chunk = inside.loaded_model(engine).spec.groups, inside.largest_chunk(engine)
    most = math.ceil(window / BLOCK_SIZE) + math.ceil(chunk / BLOCK_SIZE)
    for group in groups:
        assert peaks.blocks[group.name] <= (most if group.window else 7), group.name
    bounds = ((most if group.window else 7) * group.bytes_per_block for group in groups)
    assert info.ram_bytes <= sum(bounds)


def test_mla_keeps_the_latent_only(model_folder: ModelFolder, tmp_path: Path) -> None:
    with open_llm(model_folder("deepseek_v2"), tmp_path) as llm:
        TokenTalk().turn(llm, 512 + 1)  # the last token is not computed
        info = llm.agent("alice")
        assert info.ram_bytes == 512 * 4 * (64 + 32) * (4 + 2 * 16 / 32) / 8
        decompressed = 512 * 4 * 4 * (64 + 48) * (4 + 2 * 16 / 32) / 8
        assert info.ram_bytes < decompressed / 4
        assert info.disk_bytes == info.ram_bytes


@pytest.mark.slow
def test_long_after_many_short(model_folder: ModelFolder, tmp_path: Path) -> None:
    """RAM that short requests have taken for their windows is there for one long context."""
    with open_llm(model_folder("gpt_oss"), tmp_path, ram_budget=7 * 4 * 36864) as llm:
        for number in range(10):
            llm.generate(make_ids(40, seed=number), greedy(1))
        length = inside.max_cached_tokens(inside.engine_of(llm)) - 10
        assert length > 2000
        assert len(llm.generate(make_ids(length), greedy(2)).token_ids) == 2


def test_a_request_without_an_agent_leaves_nothing_on_disk(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:
        before = bytes_below(tmp_path)
        llm.generate(make_ids(300), greedy(2))
        assert bytes_below(tmp_path) == before == llm.stats().disk_bytes


@pytest.mark.slow
def test_a_shared_prefix_is_kept_once(model: Path, tmp_path: Path) -> None:
    """Agents with the same system prompt share its blocks in RAM and on disk."""
    with open_llm(model, tmp_path) as llm:
        one = TokenTalk("one", ids=make_ids(520))
        two = TokenTalk("two", ids=make_ids(520))
        one.turn(llm, 540)
        disk, ram = llm.stats().disk_bytes, llm.stats().blocks_cached
        turn = two.turn(llm, 541)
        assert turn.report.cached_tokens.shared >= 512
        assert turn.report.cached_tokens.own == 0
        assert llm.stats().disk_bytes - disk < BLOCK_BYTES // 2
        assert llm.stats().blocks_cached - ram == 2  # a tail in each group
        llm.delete("one")
        assert transcript_of(llm, "two").ids.tolist() == two.ids
    with open_llm(model, tmp_path) as llm:
        again = two.turn(llm, 560)
        assert again.report.cache_state == "warm"
        assert again.report.computed_tokens < 40


def saved_on_disk(llm: LLM) -> dict[str, int]:
    return {info.id: info.disk_bytes for info in llm.agents()}


@pytest.mark.slow
def test_transcripts_count_and_a_turn_that_cannot_be_saved_drops_nothing(model: Path, tmp_path: Path) -> None:
    """The transcripts of all agents stay: sooner or later there is no room beside them for one more turn."""
    with open_llm(model, tmp_path, disk_budget=240_000) as llm:
        outcomes: list[bool | None] = []
        for number in range(60):
            before = saved_on_disk(llm)
            talk = TokenTalk(f"a{number:02}", ids=[10 + number])
            saved = talk.turn(llm, 270).report.saved
            outcomes.append(saved)
            after = saved_on_disk(llm)
            if not saved:
                assert {agent: after[agent] for agent in before} == before
                assert after[talk.agent] == 0
        assert len(set(outcomes)) == 2 and outcomes == sorted(outcomes, reverse=True)
        assert outcomes.count(True) > 20
        # What cannot be saved by any means is not even tried: no file of it was written.
        assert llm.stats().disk_bytes == bytes_below(tmp_path) <= 240_000


def test_a_turn_beside_others_that_may_not_go_drops_nothing(model: Path, tmp_path: Path) -> None:
    """Others are at work, and what they have on disk stays: what could go is not enough, so it stays as well."""
    with open_llm(model, tmp_path, disk_budget=400_000) as llm:
        talks = make_agents(llm, 4, length=300)
        engine = inside.engine_of(llm)
        with inside.busy(engine, list(talks)[1:]):
            before = saved_on_disk(llm)
            assert before["a00"] and not inside.make_room(engine, 140_000)
            assert saved_on_disk(llm) == before
            assert inside.make_room(engine, 100_000)


@pytest.mark.slow
def test_side_conversations_go_before_long_ones_and_transcripts_of_the_longest_stay(
    model: Path, tmp_path: Path
) -> None:
    with open_llm(model, tmp_path, disk_budget=450_000) as llm:
        long = TokenTalk(ids=make_ids(700, seed=1))
        long.turn(llm, 800)
        sides = [TokenTalk(ids=make_ids(100, seed=seed)) for seed in (2, 3)]
        for side in sides:
            assert side.turn(llm, 120).report.saved
        other = TokenTalk("bob", ids=make_ids(500, seed=4))
        assert other.turn(llm, 600).report.saved
        kept = {lineage.tokens for lineage in llm.agent("alice").lineages}
        assert 800 in kept and len(kept) == 1, "the titles went, with their transcripts"
        assert saved_on_disk(llm)["alice"] > 0
        TokenTalk("carl", ids=make_ids(500, seed=5)).turn(llm, 600)
        assert llm.agent("alice").tokens == 800


def full_blocks(cache_dir: Path) -> dict[str, int]:
    """Every full block's file by name, and when it was written."""
    written = {}
    for path in block_files(cache_dir):
        with suppress(FileNotFoundError):  # the last turn's tail, which the writer deletes once the next one is saved
            if int(metadata_of(path)["total_tokens"]) % BLOCK_SIZE == 0:
                written[path.name] = path.stat().st_mtime_ns
    return written


def stalest(llm: LLM) -> str:
    """The agent whose blocks are to go first."""
    return min(llm.agents(), key=lambda info: info.last_used).id


@pytest.mark.parametrize("way", ["turn", slow("save")])
def test_the_older_blocks_of_an_agent_do_not_make_room_for_its_newer_ones(
    way: str, model: Path, tmp_path: Path
) -> None:
    """Nobody's were used longer ago, and others' can go: what the manifest that is being written names stays."""
    alice, bob = TokenTalk("alice", ids=[10]), TokenTalk("bob", ids=[11])
    with open_llm(model, tmp_path) as llm:
        alice.turn(llm, 600)
        own = full_blocks(tmp_path)
        bob.turn(llm, 600)
    assert len(own) == 4
    with open_llm(model, tmp_path, disk_budget=bytes_below(tmp_path) + BLOCK_BYTES // 2) as llm:
        assert stalest(llm) == "alice"
        if way == "turn":
            assert alice.turn(llm, 900).report.saved
        else:
            with mock.patch.object(
                inside.store(inside.engine_of(llm)), "write_blocks", side_effect=StoreError("broken")
            ):
                assert not alice.turn(llm, 900).report.saved
            assert bob.turn(llm, 604).report.saved
            llm.evict("alice")
            assert stalest(llm) == "alice"
            llm._wait(llm._engine.call(SaveAgent("alice")))
        assert saved_on_disk(llm)["bob"] == 0
        assert own.items() <= full_blocks(tmp_path).items(), "they were neither dropped nor written again"
        held = bytes_below(tmp_path)
    with open_llm(model, tmp_path, disk_budget=held + BLOCK_BYTES) as llm:
        assert llm.agent("alice").tokens == 900
        turn = alice.turn(llm, 940)
        assert (turn.report.cache_state, turn.report.computed_tokens) == ("warm", 38)
        assert turn.token_ids == cold_ids(llm, turn.prompt_token_ids, 3)


@pytest.mark.slow
def test_what_a_new_lineage_shares_with_the_one_that_makes_room_for_it_stays(model: Path, tmp_path: Path) -> None:
    alice, bob = TokenTalk("alice", ids=[10]), TokenTalk("bob", ids=[11])
    with open_llm(model, tmp_path) as llm:
        alice.turn(llm, 750)
        shared = full_blocks(tmp_path)
        bob.turn(llm, 600)
    assert len(shared) == 4
    edited = replace(alice, ids=alice.ids[:540])
    with open_llm(model, tmp_path, disk_budget=bytes_below(tmp_path) + 2000) as llm:
        turn = edited.turn(llm, 640)
        assert turn.report.saved and turn.report.cached_tokens.own >= 512
        by_tokens = {record.lineage: record.num_saved for record in inside.records(inside.engine_of(llm), "alice")}
        assert sorted(by_tokens.values()) == [0, 639], "the old one made room, and only that"
        assert saved_on_disk(llm)["bob"] > 0
        assert shared.items() <= full_blocks(tmp_path).items(), "they were neither dropped nor written again"
        held = bytes_below(tmp_path)
    with open_llm(model, tmp_path, disk_budget=held + BLOCK_BYTES) as llm:
        turn = edited.turn(llm, 680)
        assert (turn.report.cache_state, turn.report.computed_tokens) == ("warm", 38)
        assert turn.token_ids == cold_ids(llm, turn.prompt_token_ids, 3)


@pytest.mark.slow
def test_ram_is_told_by_kind_as_taken_and_as_used(model_folder: ModelFolder, tmp_path: Path) -> None:
    with open_llm(model_folder("gemma3"), tmp_path) as llm:
        TokenTalk().turn(llm, 700)
        stats = llm.stats()
        accounts = {each.kind: each for each in stats.ram_accounts}
        base = [each for kind, each in accounts.items() if kind.startswith("base.")]
        assert sorted(kind.partition(".")[2][:4] for kind in accounts if kind.startswith("base.")) == ["full", "wind"]
        assert sum(each.capacity_bytes for each in base) == stats.ram_capacity["base"]
        assert all(each.floor_bytes > 0 and 0 < each.used_bytes < each.capacity_bytes for each in base)
        assert stats.ram_used["base"] == sum(each.used_bytes for each in base)
        assert accounts["temporaries"].used_bytes > 0
        inside.on_loop(llm, inside.async_engine(llm).call(ClearCache()))
        after = llm.stats()
        assert after.ram_used == {"base": 0, "residual": None, "adapters": 0, "trunk": 0}
        assert after.ram_capacity == stats.ram_capacity, "memory is kept for what comes"
