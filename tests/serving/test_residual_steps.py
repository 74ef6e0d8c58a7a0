"""Residual requests step by step: whoever leaves, waits or has to give way, both caches are as they should be."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from agentcache.adapters.activation import AdapterUse
from agentcache.api.policy import Policy
from agentcache.api.report import RestoreReport
from agentcache.blocks.keys import BASE_CACHE
from agentcache.engine.messages import DropAdapter, PutAdapter, dispatch
from agentcache.models.adapters import AdapterContent, producer_groups, read_adapter
from tests.conftest import ModelFolder
from tests.marks import slow
from tests.serving import inside
from tests.serving.by_hand import ByHand, Receiver, by_hand
from tests.serving.conversation import greedy, make_ids
from tests.serving.residual_cases import UNLIMITED, residual_folders

PROMPT = make_ids(300)


@pytest.fixture(scope="module")
def small(model_folder: ModelFolder) -> Path:
    return model_folder("qwen3", num_hidden_layers=2)


@pytest.fixture(scope="module")
def two(small: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return residual_folders(tmp_path_factory.mktemp("two"), small, ("ann", "bob"))


@pytest.fixture(scope="module")
def family(small: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return residual_folders(tmp_path_factory.mktemp("family"), small, ("ann", "bob"), rank=3, family=77)


class Hand:
    """An engine by hand, with two adapters."""

    def __init__(self, hand: ByHand, contents: dict[str, AdapterContent]) -> None:
        self.hand, self.contents = hand, contents
        self.engine = hand.engine

    def say(
        self,
        name: str,
        ids: list[int],
        tokens: int,
        agent: str | None = None,
        policy: Policy = Policy.RESIDUAL,
        salt: str = "",
    ) -> Receiver:
        adapter = self.contents[name].adapter
        groups = producer_groups(adapter, inside.loaded_model(self.engine).spec)
        use = AdapterUse(name, adapter.digest, policy, 0, groups, family=adapter.family)
        return self.hand.submit(ids, greedy(tokens), agent, adapter=use, salt=salt)

    def run(self, *receivers: Receiver) -> None:
        self.hand.run(*receivers)

    @property
    def live(self) -> list[int]:
        """Blocks that are read, by cache."""
        return [cache.prefix.count_blocks().live for cache in self.engine.caches]

    @property
    def cached(self) -> list[int]:
        return [cache.prefix.count_blocks().cached for cache in self.engine.caches]


@contextmanager
def opened(model: Path, cache_dir: Path, folders: dict[str, Path], **settings: object) -> Iterator[Hand]:
    with by_hand(model, cache_dir, **{"max_divergence": UNLIMITED, **settings}) as hand:
        modules = inside.loaded_model(hand.engine).adapters.modules
        contents = {name: read_adapter(folder, modules) for name, folder in folders.items()}
        for content in contents.values():
            dispatch(hand.engine, PutAdapter(content), lambda there: None)
        mine = Hand(hand, contents)
        yield mine
        while hand.engine.has_work:
            hand.step()
        assert mine.live == [0] * len(mine.live)
        hand.engine.check_integrity()


@pytest.fixture
def hand(small: Path, two: dict[str, Path], tmp_path: Path) -> Iterator[Hand]:
    with opened(small, tmp_path / "cache", two) as hand:
        inside.set_chunk(hand.engine, 128)
        yield hand


@pytest.mark.parametrize("steps", [*map(slow, (0, 1, 3, 6, 7, 12)), 5, 9])
def test_who_leaves_at_any_step_leaves_nothing_behind(hand: Hand, steps: int) -> None:
    """In front of base's pass, within it, within the adapter's, and while both decode."""
    left = hand.say("ann", PROMPT, 8, agent="alice")
    other = hand.say("bob", PROMPT[:40], 20)
    for _ in range(steps):
        hand.hand.step()
        assert hand.engine.stats().blocks_live == sum(hand.live)
    hand.engine.cancel(left.generation)
    assert left.generation.plan is not None and not left.generation.plan.passes
    hand.engine.check_integrity()
    hand.run(other)
    assert hand.live == [0, 0, 0]
    again = hand.say("ann", PROMPT, 8, agent="alice")
    hand.run(again)
    fresh = hand.say("ann", [*PROMPT[:-1], PROMPT[-1]], 8)
    hand.run(fresh)
    assert again.token_ids == fresh.token_ids


@pytest.mark.parametrize("steps", [1, slow(3), slow(5), slow(6), 8, slow(9), slow(10), slow(12)])
def test_who_loses_its_place_goes_on_where_it_was(hand: Hand, steps: int) -> None:
    alone = hand.say("ann", PROMPT, 10)
    hand.run(alone)
    for cache in hand.engine.caches:
        inside.evict_all(cache.prefix)
    preempted = hand.say("ann", PROMPT, 10)
    for _ in range(steps):
        hand.hand.step()
    assert not preempted.is_done
    if preempted.generation in inside.running(hand.engine):
        inside.preempt(hand.engine, preempted.generation)
    hand.engine.check_integrity()
    hand.run(preempted)
    assert preempted.token_ids == alone.token_ids


def test_all_kinds_in_one_batch_each_as_alone(hand: Hand) -> None:
    prompts = {name: make_ids(30 + 50 * i, seed=i) for i, name in enumerate("abcde")}

    def ask(which: str) -> Receiver:
        match which:
            case "a" | "b":
                return hand.say("ann" if which == "a" else "bob", prompts[which], 9)
            case "c":
                return hand.say("ann", prompts[which], 9, policy=Policy.EXACT)
            case "d":
                return hand.say("bob", prompts[which], 9)
            case _:
                return hand.hand.submit(prompts[which], greedy(9))

    together = {which: ask(which) for which in prompts}
    hand.run(*together.values())
    for cache in hand.engine.caches:
        inside.evict_all(cache.prefix)
    for which, said in together.items():
        alone = ask(which)
        hand.run(alone)
        assert said.token_ids == alone.token_ids, which


def test_members_of_a_family_beside_base_say_what_they_say_alone(
    small: Path, family: dict[str, Path], tmp_path: Path
) -> None:
    """Base's rows make their residuals; rows without one stand in between."""
    with opened(small, tmp_path / "cache", family) as hand:

        def ask(which: int) -> Receiver:
            ids = make_ids(30 + 10 * which, seed=which)
            if which % 2 == 0:
                return hand.hand.submit(ids, greedy(6))
            return hand.say(["ann", "bob"][which // 2], ids, 6, policy=Policy.RESIDUAL_SHARED_A)

        together = [ask(which) for which in range(4)]
        hand.run(*together)
        for cache in hand.engine.caches:
            inside.evict_all(cache.prefix)
        for which, said in enumerate(together):
            alone = ask(which)
            hand.run(alone)
            assert said.token_ids == alone.token_ids


def test_a_familys_residuals_are_made_without_a_write_to_bases_blocks(
    small: Path, family: dict[str, Path], tmp_path: Path
) -> None:
    """Other requests read them meanwhile. The block is changed first, so that the same values would show."""
    with opened(small, tmp_path / "cache", family) as hand:
        hand.run(hand.hand.submit(PROMPT, greedy(1)))
        inside.change_blocks(hand.engine)
        before = inside.cached_bytes(hand.engine, PROMPT, 256)
        hand.run(hand.say("ann", PROMPT, 1, policy=Policy.RESIDUAL_SHARED_A))
        after = inside.cached_bytes(hand.engine, PROMPT, 256)
        assert all(map(np.array_equal, before, after))


@pytest.mark.slow
def test_pressure_on_residuals_makes_only_residual_requests_wait(
    small: Path, two: dict[str, Path], tmp_path: Path
) -> None:
    """Their share holds one such request: the others take turns, and base's request is never preempted."""
    with opened(small, tmp_path / "cache", two, residual_budget=40_000) as hand:
        base = hand.hand.submit(make_ids(50, seed=9), greedy(60))
        long = [hand.say("ann", make_ids(300, seed=i), 12) for i in range(3)]
        while not base.is_done:
            hand.hand.step()
            assert base.generation.progress.passed_over >= 0 and base.generation.state.value != "waiting"
            hand.engine.check_integrity()
        hand.run(*long)
        assert all(receiver.report.policy == "residual" for receiver in long)
        assert hand.engine.stats().preemptions == 0, "who would not fit was not let in"
        assert sum(use.capacity_bytes for use in hand.engine.stats().ram_accounts if "residual" in use.kind) <= 40_000


def test_without_room_for_residuals_a_request_is_exact_and_says_so(
    small: Path, two: dict[str, Path], tmp_path: Path
) -> None:
    with opened(small, tmp_path / "cache", two, residual_budget=40_000) as hand:
        said = hand.say("ann", make_ids(900), 3)
        hand.run(said)
        assert (said.report.policy, said.report.requested_policy) == ("exact", "residual")
        assert said.report.stepped_down == "memory"
        exact = hand.say("ann", make_ids(900), 3, policy=Policy.EXACT)
        hand.run(exact)
        assert said.token_ids == exact.token_ids


def test_too_far_from_base_is_answered_exactly_and_remembered(
    small: Path, two: dict[str, Path], tmp_path: Path
) -> None:
    with opened(small, tmp_path / "cache", two, max_divergence=1e-3) as hand:
        said = hand.say("ann", PROMPT, 6, agent="alice")
        hand.run(said)
        report = said.report
        assert (report.policy, report.requested_policy, report.stepped_down) == ("exact", "residual", "divergence")
        assert report.divergence is not None and report.divergence > 1e-3
        before = hand.engine.stats().computed_tokens
        again = hand.say("ann", [*PROMPT, *said.token_ids, 50], 6, agent="alice")
        hand.run(again)
        assert again.report.stepped_down == "divergence" and again.report.divergence == report.divergence
        assert hand.engine.stats().computed_tokens - before == 1 + 1 + 5, "nobody has tried again"
        exact = hand.say("ann", PROMPT, 6, policy=Policy.EXACT)
        hand.run(exact)
        assert said.token_ids == exact.token_ids
        other = hand.say("ann", make_ids(40, seed=5), 2)
        hand.run(other)
        assert other.report.divergence not in (None, report.divergence), "another beginning is measured anew"
        before = hand.engine.stats().computed_tokens
        hand.run(hand.say("ann", PROMPT, 1, salt="s"))
        assert hand.engine.stats().computed_tokens - before >= 3 * len(PROMPT), "nor do salts tell of one another"


@pytest.mark.parametrize("steps_down", [False, True])
def test_who_leaves_lets_go_once_of_residuals_that_it_wrote_early(
    steps_down: bool, small: Path, two: dict[str, Path], tmp_path: Path
) -> None:
    """Another turn, still to be saved, counts on the same files."""
    with opened(small, tmp_path / "cache", two, max_divergence=1e-3 if steps_down else UNLIMITED) as hand:
        left = hand.say("ann", PROMPT, 6, agent="alice")
        saved = left.generation.output.saved_early
        while not saved.keys() - {BASE_CACHE}:
            hand.hand.step()
        (cache,) = saved.keys() - {BASE_CACHE}
        blocks = list(saved[cache])
        names = [name for block in blocks for name in block.named_in(cache).names]
        pins = hand.engine.persistence._pins
        pins.hold_blocks(names)
        while steps_down and (plan := left.generation.plan) is not None and plan.stepped_down is None:
            hand.hand.step()
        hand.engine.cancel(left.generation)
        assert names and all(map(pins.has_block, names))
        hand.engine.persistence.release(blocks, cache)
        assert inside.pinned(hand.engine) == []


def test_base_from_before_residuals_were_allowed_is_measured_too(
    small: Path, two: dict[str, Path], tmp_path: Path
) -> None:
    """Nobody has kept what its rounding was."""
    with by_hand(small, tmp_path / "cache") as hand:
        hand.run(hand.submit(PROMPT, greedy(1), "alice"))
        hand.finish_writing()
    said = []
    for folder in ("cache", "fresh"):
        with opened(small, tmp_path / folder, two, max_divergence=1e-3) as hand:
            said.append(hand.say("ann", PROMPT, 2))
            hand.run(said[-1])
    old, fresh = (receiver.report for receiver in said)
    assert (old.restored_bytes > 0, old.policy, old.stepped_down) == (True, "exact", "divergence")
    assert old.divergence is not None and fresh.divergence is not None
    assert abs(old.divergence - fresh.divergence) < 0.02 * fresh.divergence


def test_a_weak_adapter_stays_within_the_limit(small: Path, tmp_path: Path) -> None:
    folders = residual_folders(tmp_path / "weak", small, ("ann",), strength=1e-3)
    with opened(small, tmp_path / "cache", folders, max_divergence=0.05) as hand:
        said = hand.say("ann", PROMPT, 4)
        hand.run(said)
        assert said.report.policy == "residual" and said.report.stepped_down is None
        assert said.report.divergence is not None and said.report.divergence < 0.05


@pytest.mark.slow
def test_base_and_adapter_take_turns_where_windows_are_read(model_folder: ModelFolder, tmp_path: Path) -> None:
    """Base leaves blocks behind that the adapter has still to read, so it is a chunk ahead; the answer is the same."""
    kinds = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    model = model_folder("mistral_sliding", **kinds)
    folders = residual_folders(tmp_path / "adapters", model, ("ann",))
    said, most = [], []
    for number, chunk in enumerate((128, 1024)):
        with opened(model, tmp_path / f"cache{number}", folders) as hand:
            inside.set_chunk(hand.engine, chunk)
            receiver, held = hand.say("ann", make_ids(1100), 3), 0
            while not receiver.is_done:
                hand.hand.step()
                held = max(held, inside.most_blocks_held(hand.engine).get("window32.0", 0))
            said.append(receiver.token_ids)
            most.append(held)
    assert said[0] == said[1]
    assert most == [2, 4], "a window, and a chunk of base's"


@pytest.mark.slow
def test_an_adapter_goes_while_its_residuals_are_read_from_disk(hand: Hand) -> None:
    hand.run(hand.say("ann", PROMPT, 4, agent="alice"))
    hand.hand.evict("alice")
    outcome: list[object] = []
    inside.restore_agent(hand.engine, "alice", outcome.append)
    dispatch(hand.engine, DropAdapter(hand.contents["ann"].adapter.digest), lambda dropped: None)
    while not outcome:
        hand.hand.posted.get(timeout=30)()
    assert isinstance(outcome[0], RestoreReport) and outcome[0].restored_bytes > 0, "what there still is"
    dispatch(hand.engine, PutAdapter(hand.contents["ann"]), lambda there: None)
    again = hand.say("ann", [*PROMPT, 50], 4, agent="alice")
    hand.run(again)
    assert again.report.computed_tokens == 1, "its files have stayed"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kv", "seed"), [("4t", 0), ("4", 1), ("4t", 2), ("4", 3)])
def test_many_random_operations(small: Path, two: dict[str, Path], tmp_path: Path, kv: str, seed: int) -> None:
    random_operations(small, two, tmp_path, num_operations=800, seed=seed, kv=kv)


def random_operations(
    model: Path, folders: dict[str, Path], tmp_path: Path, *, num_operations: int, seed: int, kv: str
) -> None:
    """Ask, step, cancel, preempt, evict by kind, fork, unload, load and restart, under budgets that are too small."""
    rng, done = random.Random(seed), 0
    while done < num_operations:
        budget = rng.choice([60_000, 120_000, 1 << 20])
        with opened(model, tmp_path / "cache", folders, residual_budget=budget, ram_budget=3 << 20, kv=kv) as hand:
            done += _some_operations(hand, rng, rng.randrange(30, 120), forks=done)
            hand.hand.finish_writing()


def _some_operations(hand: Hand, rng: random.Random, count: int, forks: int) -> int:
    engine, running = hand.engine, list[Receiver]()
    stems = [make_ids(400, seed=100 + i) for i in range(3)]
    for number in range(count):
        match rng.randrange(12):
            case 0 | 1 | 2 | 3:
                agent = rng.choice(["al", "bo", "cy", None])
                ids = [*rng.choice(stems)[: rng.randrange(1, 400)], *make_ids(rng.randrange(4), rng.randrange(99))]
                if agent is not None and rng.random() < 0.5 and agent in inside.agent_table(engine):
                    ids = [*inside.record(engine, agent).transcript.ids, *make_ids(2, rng.randrange(99))][:900]
                kind = rng.choice(["residual", "residual", "exact", "base"])
                name = rng.choice(list(hand.contents))
                if kind == "base":
                    running.append(hand.hand.submit(ids or [7], greedy(rng.randrange(1, 9)), agent))
                else:
                    running.append(hand.say(name, ids or [7], rng.randrange(1, 9), agent, Policy(kind)))
            case 4 if running:
                engine.cancel(rng.choice(running).generation)
            case 5 if inside.running(engine):
                inside.preempt(engine, rng.choice(inside.running(engine)))
            case 6:
                for cache in engine.caches:
                    if cache.kind == rng.choice(["base", "residual"]):
                        inside.evict_all(cache.prefix)
            case 7 if inside.agent_table(engine).ids:
                agent = rng.choice(inside.agent_table(engine).ids)
                engine.eviction.evict(agent, lambda _: None, kind=rng.choice(["base", "residual", None]))
            case 8 if "al" in inside.agent_table(engine):
                inside.fork_agent(engine, "al", f"fork{forks}-{number}", lambda saved: None)
            case 9 if not any(inside.requests(engine)) and not inside.is_saving(engine):
                digest = hand.contents[rng.choice(list(hand.contents))].adapter.digest
                dispatch(engine, DropAdapter(digest), lambda dropped: None)
                for content in hand.contents.values():
                    dispatch(engine, PutAdapter(content), lambda there: None)
            case _:
                for _ in range(rng.randrange(1, 6)):
                    hand.hand.step()
        engine.check_integrity()
    hand.run(*running)
    assert hand.live == [0] * len(hand.live)
    return count
