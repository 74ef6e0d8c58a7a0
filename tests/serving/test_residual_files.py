"""Residuals on disk: what comes back, what goes for room, what a crash or damage leaves. Without a model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from agentcache.agents.block_files import BlockFiles
from agentcache.agents.caches import lay_out
from agentcache.agents.disk import Committed, Reduced, Saved
from agentcache.agents.disk_jobs import is_wanted
from agentcache.agents.turn_write import CacheTurn
from agentcache.blocks.keys import BASE_CACHE, BLOCK_SIZE, BlockName, block_key
from agentcache.store.archive import ArchiveRejected, export_agent
from agentcache.store.archived_agent import read_archive
from agentcache.store.model_files import ModelNames
from agentcache.store.verify import verify_folder
from agentcache.store.writing import Writer
from tests.serving.residual_damage import RESIDUAL_DAMAGE, damage_residuals
from tests.serving.residual_desk import MATH, POET, Desk, desk, files_of, make_ids
from tests.store.forge import Forgery
from tests.store.store_cases import MODEL, RESIDUAL_SPEC, SPEC, open_store

IDS = make_ids(600)
LONGER = [*IDS, *make_ids(60, seed=1)]


def check_all_there(made: Desk, ids: list[int] = IDS) -> None:
    """Base and residuals are known of all the tokens, and files hold what they should."""
    assert [made.cached(cache, ids) for cache in (BASE_CACHE, MATH)] == [len(ids)] * 2
    made.restore("alice")
    made.check()
    assert made.info("alice").cache_state == "hot"


# -- there and back ---------------------------------------------------------------------------------------------------


def test_they_come_back_with_base_after_a_restart(ram_path: Path) -> None:
    with desk(ram_path) as made:
        assert made.turn("alice", IDS).error is None
        before = made.info("alice")
        assert before.cache_state == "hot"
        assert 0 < before.residual_disk_bytes < before.residual_bytes < before.ram_bytes
        assert made.store.usage.by_kind["residual"] > before.residual_disk_bytes
    assert verify_folder(ram_path).problems == ()
    with desk(ram_path) as made:
        after = made.info("alice")
        assert (after.cache_state, after.ram_bytes, after.residual_bytes) == ("warm", 0, 0)
        assert (after.disk_bytes, after.residual_disk_bytes) == (before.disk_bytes, before.residual_disk_bytes)
        check_all_there(made)
        assert made.info("alice").residual_bytes == before.residual_bytes
        assert made.turn("alice", LONGER).error is None
    with desk(ram_path) as made:
        check_all_there(made, LONGER)


def test_a_turn_writes_only_what_it_added(ram_path: Path) -> None:
    with desk(ram_path) as made:
        made.turn("alice", IDS)
        before = files_of(ram_path, made.record("alice"))
        made.turn("alice", LONGER)
        after = files_of(ram_path, made.record("alice"))
        kept = [path for path in after if path in before]
        assert len(kept) == 4 and not any(path.exists() for path in set(before) - set(kept)), "only tails go"


@pytest.mark.parametrize("kind", ["base", "residual", None])
def test_evictions_of_one_kind_leave_the_other(kind: str | None, ram_path: Path) -> None:
    with desk(ram_path) as made:
        made.turn("alice", IDS)
        hot = made.info("alice")
        of_base = hot.ram_bytes - hot.residual_bytes
        made.evict("alice", kind)
        left = made.info("alice")
        assert left.residual_bytes == (hot.residual_bytes if kind == "base" else 0)
        assert left.ram_bytes - left.residual_bytes == (of_base if kind == "residual" else 0)
        assert left.cache_state == "warm" and left.disk_bytes == hot.disk_bytes
        evicted = made.caches.evicted_blocks
        assert (evicted["base"] > 0, evicted["residual"] > 0) == (kind != "residual", kind != "base")
        check_all_there(made)


def test_adapters_have_residuals_of_their_own(ram_path: Path) -> None:
    with desk(ram_path, [MATH, POET]) as made:
        made.turn("alice", IDS, MATH)
        made.turn("alice", LONGER, POET)
        residuals = {each.cache: each.num_saved for each in made.record("alice").residuals}
        assert residuals == {MATH: 600, POET: 660}
    with desk(ram_path, [MATH, POET]) as made:
        assert [made.cached(cache, LONGER) for cache in (BASE_CACHE, MATH, POET)] == [660, 600, 660]


def test_a_changed_conversation_keeps_what_still_is_its_own(ram_path: Path) -> None:
    """The template leaves out what was thought: tokens in the middle are others now."""
    changed = [*IDS[:300], *make_ids(200, seed=2)]
    with desk(ram_path) as made:
        made.turn("alice", IDS)
        made.turn("alice", changed, adapter=None)
        [residual] = made.record("alice").residuals
        assert residual.num_saved == 256
        assert all(path.exists() for path in files_of(ram_path, made.record("alice")))
    assert verify_folder(ram_path).problems == ()
    assert verify_folder(ram_path).unnamed_blocks == 0


# -- adapters that are not loaded -------------------------------------------------------------------------------------


def test_without_the_adapter_agent_and_files_stay_as_they_are(ram_path: Path) -> None:
    with desk(ram_path) as made:
        made.turn("alice", IDS)
        info = made.info("alice")
        files = files_of(ram_path, made.record("alice"))
    with desk(ram_path, []) as made:
        without = made.info("alice")
        assert without.adapter == MATH and without.residual_bytes == 0
        assert without.residual_disk_bytes >= info.residual_disk_bytes  # whole files: nobody knows more of them
        made.restore("alice")
        assert made.turn("alice", LONGER, adapter=None).error is None
        assert made.info("alice").cache_state == "hot"
        assert all(path.exists() for path in files)
        made.open(MATH)
        assert [made.cached(cache, LONGER) for cache in (BASE_CACHE, MATH)] == [660, 600]
    assert verify_folder(ram_path).problems == ()


def test_a_cache_that_is_closed_and_opened_again(ram_path: Path) -> None:
    with desk(ram_path) as made:
        made.turn("alice", IDS)
        made.unload(MATH)
        assert made.turn("bob", make_ids(300, seed=3), adapter=None).error is None
        made.open(MATH)
        check_all_there(made)


# -- room on disk -----------------------------------------------------------------------------------------------------


def test_residuals_that_there_is_no_room_for_are_left_out(ram_path: Path) -> None:
    with desk(ram_path / "measured") as made:
        made.turn("alice", IDS, adapter=None)
        room = made.store.usage.total + 8_000  # not for the residuals of 600 tokens, and their headers
    with desk(ram_path / "small", disk_budget=room) as made:
        assert made.turn("alice", IDS).error is None
        assert made.record("alice").residuals == () and made.record("alice").num_saved == 600
        assert made.store.usage.by_kind["residual"] == 0, "what was written early goes"
        assert made.store.usage.total <= room


def test_residuals_that_are_lost_meanwhile_do_not_cost_the_turn(ram_path: Path) -> None:
    with desk(ram_path) as made:
        made.turn("alice", IDS)
        made.evict("alice", "residual")
        for path in files_of(ram_path, made.record("alice"))[:2]:
            path.unlink()
        known = made.caches.get(MATH).prefix
        nodes = [node for node in known.tree.walk() if node.stored]
        assert nodes, "nobody has noticed"
        saved = made.turn("alice", LONGER)
        assert saved.error is None and made.record("alice").num_saved == 660
        made.turn("alice", LONGER)
    with desk(ram_path) as made:
        check_all_there(made, LONGER)


def test_residuals_that_neither_disk_nor_ram_has_are_not_named(ram_path: Path) -> None:
    """Their files went while the turn was on its way, and RAM had given them up before."""
    with desk(ram_path) as made:
        made.turn("alice", IDS)
        record, cache = made.record("alice"), made.caches.get(MATH)
        made.evict("alice", "residual")
        files_of(ram_path, record)[0].unlink()
        blocks = [lay_out(made.caches, kept, record, 600) for kept in (made.caches.base, cache)]
        saved: list[Saved] = []
        turns = [CacheTurn(BASE_CACHE, 600, blocks[0]), CacheTurn(MATH, 600, blocks[1])]
        made.persistence.commit(record, turns, saved.append)
        made.settle(lambda: bool(saved))
        assert saved[0].error is None
        assert made.record("alice").residuals == () and made.record("alice").num_saved == 600
        assert made.store.usage.by_kind["residual"] == 0
    assert verify_folder(ram_path).problems == ()


# -- forks and archives -----------------------------------------------------------------------------------------------


def test_a_fork_shares_residuals_and_one_with_another_adapter_base_only(ram_path: Path) -> None:
    with desk(ram_path) as made:
        made.turn("alice", IDS)
        before = made.store.usage.by_kind
        for name, adapter in (("bob", None), ("carl", "poet")):
            done: list[object] = []
            made.operations.fork("alice", name, done.append, adapter=adapter, policy=adapter and "residual")
            made.settle(lambda done=done: bool(done))
        bob, carl = made.record("bob"), made.record("carl")
        assert bob.residuals == made.record("alice").residuals and carl.residuals == ()
        assert (carl.adapter, carl.policy, carl.blocks) == ("poet", "residual", bob.blocks)
        after = made.store.usage.by_kind
        assert (after["base"], after["residual"]) == (before["base"], before["residual"])
        for name in ("alice", "carl"):
            done = []
            made.operations.delete(name, done.append)
            made.settle(lambda done=done: bool(done))
        assert made.store.usage.by_kind["residual"] == before["residual"], "bob has them"
        made.operations.delete("bob", lambda saved: None)
        made.settle()
        assert made.store.usage.by_kind["residual"] == 0 == made.store.usage.by_kind["base"]


@pytest.mark.parametrize("adapters", [[MATH], []], ids=["loaded", "not loaded"])
def test_an_archive_carries_them(adapters: list[str], ram_path: Path) -> None:
    with desk(ram_path / "here") as made:
        made.turn("alice", IDS)
    exported = export_agent(ram_path / "here", "alice", ram_path / "file")
    assert (exported.blocks, exported.missing_blocks) == (12, 0)
    with desk(ram_path / "there", adapters) as made:
        done: list[object] = []
        made.operations.bring_in(read_archive(ram_path / "file", SPEC, MODEL, "alice"), done.append)
        made.settle(lambda: bool(done))
        if adapters:
            check_all_there(made)
    assert verify_folder(ram_path / "there").problems == ()
    with desk(ram_path / "there") as made:
        check_all_there(made)
    for name in ("here", "there"):
        files = sorted((ram_path / name / "blocks").rglob("*.safetensors"))
        assert len(files) == 12
    assert [path.read_bytes() for path in sorted((ram_path / "here" / "blocks").rglob("*.safetensors"))] == [
        path.read_bytes() for path in files
    ]


def test_an_archive_leaves_them_behind_where_the_model_has_another_name(ram_path: Path) -> None:
    """They have addresses by the name, and without their adapter nothing reads them."""
    with desk(ram_path / "here") as made:
        made.turn("alice", IDS)
        before = made.record("alice")
    export_agent(ram_path / "here", "alice", ram_path / "file")
    archive = read_archive(ram_path / "file", SPEC, ModelNames("f" * 32, others=(MODEL,)), "alice")
    [record] = archive.records
    assert (record.model, record.residuals, record.num_saved) == ("f" * 32, (), before.num_saved)
    assert set(record.block_names) == set(archive.names) and not set(archive.names) & set(before.block_names)
    with open_store(ram_path / "there", spec=SPEC, model="f" * 32) as store:
        for writes in archive.writes():
            store.write_blocks(writes)
        store.save_agent(record)
    report = verify_folder(ram_path / "there")
    assert (report.problems, report.missing_blocks, report.unnamed_blocks) == ((), 0, 0)


def test_an_archive_whose_residuals_have_other_groups_harms_no_agent(ram_path: Path) -> None:
    """Of a known adapter it is refused; of another it is taken, and computed anew once the adapter is there."""
    with desk(ram_path / "here") as made:
        made.turn("alice", IDS)
    export_agent(ram_path / "here", "alice", ram_path / "file")
    forgery = Forgery.of(ram_path / "file")
    residuals = forgery.manifest["caches"][1]
    left_out = residuals["groups"].pop(0)
    marks = (b'"residual.layers.', f'"group":"{left_out}"'.encode())
    forgery.blocks = [(kind, data) for kind, data in forgery.blocks if not all(mark in data for mark in marks)]
    (ram_path / "forged").write_bytes(forgery.archive())
    with desk(ram_path / "here", []) as made:
        done: list[Saved] = []
        archive = read_archive(ram_path / "forged", SPEC, MODEL, "bob")
        with pytest.raises(ArchiveRejected, match="groups of residuals"):
            made.operations.bring_in(archive, done.append)
    with desk(ram_path / "there", []) as made:
        made.operations.bring_in(archive, done.append)
        made.settle(lambda: bool(done))
        assert done[0].error is None
    with desk(ram_path / "there") as made:
        assert made.turn("alice", IDS).error is None
        made.info("bob")
        made.operations.delete("bob", done.append)
        made.settle(lambda: len(done) == 2)
    with desk(ram_path / "there") as made:
        check_all_there(made)
    assert verify_folder(ram_path / "there").problems == ()


def test_a_group_that_a_cache_does_not_have_is_in_no_file(ram_path: Path) -> None:
    with desk(ram_path) as made:
        files = BlockFiles(made.store)
        files.know_cache(MATH, RESIDUAL_SPEC)
        name = BlockName("0" * 40, len(RESIDUAL_SPEC.groups), MATH)
        assert not files.has(name) and files.bytes_of([name]) == 0


# -- crashes and damage -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_kill_at_any_step_leaves_the_turn_before_or_this_one(ram_path: Path) -> None:
    """What the folder holds at each step is what a process would find that was killed there."""
    with desk(ram_path / "first") as made:
        made.turn("alice", IDS)
    steps: list[str] = []

    def note(step: str) -> None:
        shutil.copytree(ram_path / "cache", ram_path / str(len(steps)))
        steps.append(step)

    shutil.copytree(ram_path / "first", ram_path / "cache")
    with desk(ram_path / "cache", fault=note) as made:
        made.turn("alice", LONGER)
    assert {step.partition("-")[0] for step in steps} == {"block", "log", "manifest"}
    found = set()
    for number in range(len(steps)):
        with desk(ram_path / str(number)) as made:
            length = made.record("alice").num_saved
            found.add(length)
            check_all_there(made, LONGER[:length])
            assert [each.num_saved for each in made.record("alice").residuals] == [length]
            assert made.store.usage.quarantine.count == 0
        report = verify_folder(ram_path / str(number))
        assert (report.problems, report.missing_blocks, report.unnamed_blocks) == ((), 0, 0)
        shutil.rmtree(ram_path / str(number))
    assert found == {600, 660}


@pytest.mark.slow
def test_a_failure_at_any_step_leaves_the_agent_as_it_was(ram_path: Path) -> None:
    steps: list[str] = []
    with desk(ram_path / "dry", fault=steps.append) as made:
        made.turn("alice", IDS)
        first = len(steps)
        made.turn("alice", LONGER)
    total = len(steps)
    for number in range(first, total):
        seen: list[str] = []

        def fail(step: str, seen: list[str] = seen, number: int = number) -> None:
            seen.append(step)
            if len(seen) == number + 1:
                raise OSError(28, "No space left on device")

        with desk(ram_path / str(number), fault=fail) as made:
            made.turn("alice", IDS)
            failed = made.turn("alice", LONGER).error is not None
            made.turn("alice", LONGER)
        with desk(ram_path / str(number)) as made:
            check_all_there(made, LONGER)
        assert failed or seen[number].startswith(("block", "delete", "log-")), seen[number]
        assert verify_folder(ram_path / str(number)).problems == ()
        shutil.rmtree(ram_path / str(number))


@pytest.mark.parametrize("how", RESIDUAL_DAMAGE)
def test_a_damaged_file_is_quarantined_and_written_again(how: str, ram_path: Path) -> None:
    with desk(ram_path / "cache") as made:
        made.turn("alice", IDS)
        files = files_of(ram_path / "cache", made.record("alice"))
    contents = {path: path.read_bytes() for path in files}
    damage_residuals(ram_path / "cache", RESIDUAL_DAMAGE[how])
    assert verify_folder(ram_path / "cache").problems or how.startswith("NaN"), "it looks at no values"
    with desk(ram_path / "cache") as made:
        made.restore("alice")
        made.check()
        assert made.store.usage.quarantine.count > 0
        assert made.cached(BASE_CACHE, IDS) == 600, "base is whole"
        assert made.cached(MATH, IDS) < 600
        assert made.turn("alice", LONGER).error is None
        check_all_there(made, LONGER)
    full = [path for path, group in zip(files, range(6), strict=True) if group < 4]
    assert [path.read_bytes() for path in full] == [contents[path] for path in full]
    assert verify_folder(ram_path / "cache").problems == ()


def test_a_missing_base_file_is_a_partial_hit(ram_path: Path) -> None:
    with desk(ram_path) as made:
        made.turn("alice", IDS)
        second = made.record("alice").blocks[1].chain
    key = block_key(second, SPEC.groups[0].name)
    (ram_path / "blocks" / key[:2] / f"{key}.safetensors").unlink()
    with desk(ram_path) as made:
        assert [made.cached(cache, IDS) for cache in (BASE_CACHE, MATH)] == [256, 600]
        assert made.turn("alice", LONGER).error is None
        check_all_there(made, LONGER)


def test_a_turn_that_cannot_be_queued_has_not_happened(ram_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with desk(ram_path) as made:
        made.turn("alice", IDS)
        before = made.record("alice")

        def fail(targets: object) -> None:
            raise RuntimeError("no memory")

        with monkeypatch.context() as patch:
            patch.setattr(made.persistence.jobs, "copy_out", fail)
            for agent, ids in (("alice", make_ids(50, seed=8)), ("bob", make_ids(40, seed=9))):
                with pytest.raises(RuntimeError, match="no memory"):
                    made.turn(agent, ids)
                made.pins.let_lineage_go(agent)  # as the turn's own end does
        assert made.record("alice") == before and made.agents.known("bob") == ()


@pytest.mark.parametrize("job", ["early blocks", "fork"])
def test_a_job_that_cannot_be_queued_pins_nothing_and_is_written_later(
    job: str, ram_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the disk keeps what no agent needs, and later turns name blocks that are never written."""
    with desk(ram_path) as made:
        made.turn("alice", IDS, None)

        submit = Writer.submit

        def fail(writer: Writer, run: Any, done: Any, num_bytes: int = 0) -> None:
            if job == "fork" or num_bytes:
                raise RuntimeError("no memory")
            submit(writer, run, done)

        with monkeypatch.context() as patch:
            patch.setattr(Writer, "submit", fail)
            with pytest.raises(RuntimeError, match="no memory"):
                if job == "fork":
                    made.operations.fork("alice", "bob", lambda saved: None)
                else:
                    made._compute(made.caches.base, make_ids(300, seed=8))
        made.check_nothing_is_held()
        assert not made.persistence.jobs.is_writing
        assert made.turn("carl", make_ids(300, seed=8), None).error is None
    assert verify_folder(ram_path).missing_blocks == 0


def test_a_saved_turn_leaves_the_pins_of_other_work_on_its_lineage(ram_path: Path) -> None:
    """A fork of the agent that is still under way counts on the blocks."""
    with desk(ram_path) as made:
        made.turn("alice", IDS, None)
        made.pins.pin_lineage("alice")
        made.turn("alice", LONGER, None)
        assert made.pins.has_lineage("alice")
        made.pins.let_lineage_go("alice")


def test_a_lineage_that_was_saved_again_survives_the_news_that_the_old_one_was_dropped(ram_path: Path) -> None:
    with desk(ram_path) as made:
        made.turn("alice", IDS, None)
        old = made.record("alice")
        made.turn("alice", LONGER, None)
        new = made.record("alice")
        made.persistence.jobs.apply(Committed(reduced=[Reduced(old, old.without_blocks())]))
        made.persistence.jobs.apply(Committed(removed=[old]))
        assert made.record("alice") == new
        assert made.info("alice").cache_state == "hot"


def test_a_block_that_is_written_again_stays_in_ram_when_its_old_file_goes(ram_path: Path) -> None:
    """A longer conversation has outgrown this tail, and another one ends with it."""
    with desk(ram_path) as made:
        made.turn("alice", LONGER, None)
        made.turn("bob", IDS, None)
        tail = next(node for node in made.caches.base.prefix.tree.walk() if node.num_tokens == 600 % BLOCK_SIZE)
        before = dict(tail.block_ids)
        tail.pending.update(before)
        made.persistence.jobs.apply(Committed(deleted=[BlockName(tail.chain, group) for group in before]))
        tail.pending.clear()
        assert before and tail.block_ids == before


def test_an_agent_is_saved_up_to_the_block_whose_end_only_another_agent_has(ram_path: Path) -> None:
    """Its own tail is lost. The longer tail of the other agent holds the same tokens, but under another address."""
    with desk(ram_path) as made:
        made.turn("alice", IDS, None)
        made.turn("bob", LONGER, None)
        tree, record = made.caches.base.prefix.tree, made.record("alice")
        tail = tree.node(record.blocks[-1].chain)
        assert tail is not None
        for group in tuple(tail.block_ids):
            made.caches.base.prefix.mark_missing(tail, group)
        made.caches.base.prefix.slots.evict(tail)
        assert made.cached(BASE_CACHE, IDS) == 600
        saved: list[Saved] = []
        made.operations.save("alice", saved.append)
        made.settle(lambda: bool(saved))
        assert (saved[0].error, made.record("alice").num_saved) == (None, 512)
    assert verify_folder(ram_path).missing_blocks == 0


def test_blocks_that_are_being_written_are_not_written_again(ram_path: Path) -> None:
    with desk(ram_path) as made:
        made.turn("alice", IDS, None)
        node = next(node for node in made.caches.base.prefix.tree.walk() if node.is_full)
        assert not is_wanted(node, 0)
        node.stored.discard(0)
        node.pending.add(0)
        assert not is_wanted(node, 0)
        node.pending.discard(0)
        assert is_wanted(node, 0)
        node.stored.add(0)


def test_early_residuals_are_held_by_their_own_names(ram_path: Path) -> None:
    with desk(ram_path) as made:
        _, early = made._compute(made.caches.get(MATH), IDS)
        names = {name for block in early for name in block.named_in(MATH).names}
        assert names and made.pins.blocks() == names
        made.persistence.release(early, MATH)
        made.settle()
