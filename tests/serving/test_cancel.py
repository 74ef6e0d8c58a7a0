"""A cancelled request holds no block from that moment on, whatever it was at, and leaves its agent as it was."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.gateway.operations import ReadStats
from tests.marks import slow
from tests.serving import inside
from tests.serving.by_hand import ByHand, Receiver, by_hand
from tests.serving.conversation import (
    BLOCK_BYTES,
    Stream,
    TokenTalk,
    check_idle,
    cold_ids,
    greedy,
    make_ids,
    open_llm,
)

CONTEXT = 600


def waiting(hand: ByHand) -> Receiver:
    first = hand.submit(make_ids(50, seed=9), greedy(2))
    second = hand.submit(make_ids(CONTEXT), greedy(9), "alice")
    hand.step()
    assert inside.is_waiting(hand.engine, second.generation)
    hand.run(first)
    return second


def loading(hand: ByHand) -> Receiver:
    hand.evict("alice")
    receiver = hand.submit(make_ids(CONTEXT), greedy(9), "alice")
    hand.step()
    assert inside.is_loading(hand.engine, receiver.generation)
    assert hand.live_blocks > 0
    return receiver


def prefilling(hand: ByHand) -> Receiver:
    receiver = hand.submit(make_ids(3000, seed=4), greedy(9), "alice")
    while not (receiver.generation.num_computed and receiver.generation.progress.in_flight > 1):
        hand.step()
    return receiver


def decoding(hand: ByHand) -> Receiver:
    receiver = hand.submit(make_ids(CONTEXT + 9), greedy(30), "alice")
    while len(receiver.token_ids) < 4:
        hand.step()
    assert receiver.generation.progress.in_flight == 1
    return receiver


@pytest.mark.parametrize("state", [waiting, loading, prefilling, decoding])
def test_blocks_are_free_at_once(state: Callable[[ByHand], Receiver], model: Path, tmp_path: Path) -> None:
    slots = 1 if state is waiting else 4
    with by_hand(model, tmp_path, max_concurrent_requests=slots) as hand:
        hand.run(hand.submit(make_ids(CONTEXT), greedy(3), "alice"))
        before = inside.record(hand.engine, "alice")
        receiver = state(hand)
        hand.engine.cancel(receiver.generation)
        assert hand.live_blocks == 0
        assert inside.requests(hand.engine) == []
        seen = len(receiver.updates)
        hand.engine.check_integrity()
        following = hand.submit(make_ids(CONTEXT), greedy(3), "alice")
        hand.run(following)
        assert len(receiver.updates) == seen, "nothing comes after a cancel"
        assert inside.record(hand.engine, "alice").transcript.ids == before.transcript.ids
        stats = hand.engine.stats()
        assert (stats.cancelled, stats.failed) == (1, 0), "nor does it fail when its files have been read"


def test_a_request_without_room_is_admitted_when_one_leaves_while_another_is_read(model: Path, tmp_path: Path) -> None:
    """The disk may take long: the room that a client leaves must not stay empty until its answer."""
    with by_hand(model, tmp_path, ram_budget=6 * BLOCK_BYTES) as hand:
        prompts = {name: make_ids(300, seed=seed) for seed, name in enumerate(("alice", "bob"))}
        for name, ids in prompts.items():
            hand.run(hand.submit(ids, greedy(1), name))
            hand.evict(name)
        read = [hand.submit(ids, greedy(1), name) for name, ids in prompts.items()]
        waits = hand.submit(make_ids(600, seed=2), greedy(1))
        hand.engine.step()
        assert all(inside.is_loading(hand.engine, each.generation) for each in read)
        assert inside.is_waiting(hand.engine, waits.generation) and not hand.engine.has_work
        hand.engine.cancel(read[0].generation)
        assert hand.engine.has_work
        hand.engine.step()
        assert not inside.is_waiting(hand.engine, waits.generation)
        hand.run(read[1], waits)


@pytest.mark.slow
def test_the_place_under_way_is_written_by_somebody_else_next(model: Path, tmp_path: Path) -> None:
    """A slot may be given away while the device still writes the cancelled row's token into it."""
    ids = make_ids(300, seed=3)
    with by_hand(model, tmp_path / "alone") as hand:
        alone = hand.submit(ids, greedy(20))
        hand.run(alone)
    with by_hand(model, tmp_path / "after", ram_budget=6 * BLOCK_BYTES) as hand:
        for number in range(6):
            receiver = hand.submit(make_ids(700, seed=number), greedy(50))
            while len(receiver.token_ids) < 3:
                hand.step()
            hand.engine.cancel(receiver.generation)
            following = hand.submit(ids, greedy(20))
            hand.run(following)
            assert following.token_ids == alone.token_ids
            hand.engine.clear()


@pytest.mark.parametrize("in_time", [slow(0), 1])
def test_a_read_that_comes_late_changes_nothing(in_time: int, model: Path, tmp_path: Path) -> None:
    """Somebody else has the slots by then. `in_time` reads are in place before the request is cancelled."""
    ids, prompt = make_ids(CONTEXT, seed=3), make_ids(CONTEXT)
    with by_hand(model, tmp_path / "alone") as hand:
        alone = hand.submit(ids, greedy(20))
        hand.run(alone)
    with by_hand(model, tmp_path / "late") as hand:
        hand.run(hand.submit(prompt, greedy(3), "alice"))
        hand.evict("alice")
        late = hand.submit(prompt, greedy(3), "alice")
        hand.engine.step()
        assert inside.is_loading(hand.engine, late.generation)
        slots = slots_of(late)
        for _ in range(in_time):
            hand.posted.get(timeout=30)()
        hand.engine.cancel(late.generation)
        following = hand.submit(ids, greedy(20))
        while len(following.token_ids) < 3:
            hand.engine.step()  # what the readers have posted has to wait
        assert slots_of(following) & slots
        before = bytes_of(hand, following)
        inside.finish_reading(hand.engine)  # all reads are done
        assert not hand.posted.empty()
        while not hand.posted.empty():
            hand.posted.get()()
        assert bytes_of(hand, following) == before
        assert inside.agent_info(hand.engine, "alice").cache_state == "warm"
        hand.engine.check_integrity()
        hand.run(following)
        assert following.token_ids == alone.token_ids
        again = hand.submit(ids, greedy(20))
        hand.run(again)
        assert again.report.cache_state == "hot"
        assert again.token_ids == alone.token_ids


def slots_of(receiver: Receiver) -> set[tuple[int, int]]:
    """Every slot of a request: its cache group and its number."""
    tables = receiver.generation.open_plan.sequence.tables
    return {(group, block_id) for group, table in enumerate(tables) for block_id in table.block_ids}


def bytes_of(hand: ByHand, receiver: Receiver) -> list[int]:
    """Hashes of the keys and values of all that a request has computed."""
    place = receiver.generation.open_plan.sequence
    hashes = []
    for group, table in enumerate(place.tables):
        for position, block_id in enumerate(table.block_ids, table.first_block):
            num_tokens = min(BLOCK_SIZE, place.num_tokens - position * BLOCK_SIZE)
            hashes.append(hash(inside.block_bytes(hand.engine, group, block_id, num_tokens).tobytes()))
    return hashes


@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
def test_random_cancels_among_others(seed: int, model: Path, tmp_path: Path) -> None:
    """Integrity holds after every step; whoever is left says what it says alone."""
    prompts = [make_ids(10 + 97 * number, seed=number % 3) for number in range(8)]
    with by_hand(model, tmp_path / "alone") as hand:
        alone = []
        for ids in prompts:
            alone.append(hand.submit(ids, greedy(15)))
            hand.run(alone[-1])
    generator = random.Random(seed)
    with by_hand(model, tmp_path / "busy", ram_budget=10 * BLOCK_BYTES, max_concurrent_requests=5) as hand:
        receivers = [hand.submit(ids, greedy(15), f"agent{number}") for number, ids in enumerate(prompts)]
        gone = set(generator.sample(range(len(prompts)), 3))
        due = {number: generator.randrange(1, 30) for number in gone}
        step = 0
        while not all(r.is_done for number, r in enumerate(receivers) if number not in gone):
            hand.step() if hand.engine.has_work else hand.posted.get(timeout=30)()
            hand.engine.check_integrity()
            step += 1
            for number in [number for number, at in due.items() if at == step]:
                hand.engine.cancel(receivers[number].generation)
        for number in gone:
            hand.engine.cancel(receivers[number].generation)
    for number, receiver in enumerate(receivers):
        if number not in gone:
            assert receiver.token_ids == alone[number].token_ids


@pytest.mark.parametrize("known", [False, True])
def test_cancel_in_the_middle_of_decoding(known: bool, model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:
        talk = TokenTalk()
        if known:
            talk.turn(llm, 300)
        before = [info.tokens for info in llm.agents()]

        async def take_three() -> None:
            stream = Stream(llm, talk.ids + make_ids(50, seed=5))
            for _ in range(3):
                await stream.updates.get()
            stream.task.cancel()
            await asyncio.wait({stream.task})

        inside.on_loop(llm, take_three())
        check_idle(llm)
        assert [info.tokens for info in llm.agents()] == before
        if known:
            kept = talk.turn(llm, 340)
            assert cold_ids(llm, kept.prompt_token_ids, 3) == kept.token_ids
            assert kept.report.computed_tokens < 60


def test_cancel_in_the_middle_of_a_prefill(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:
        talk = TokenTalk()
        talk.turn(llm, 300)

        async def start_and_cancel() -> None:
            task = Stream(llm, talk.ids + make_ids(5000, seed=5)).task
            while not (await inside.async_engine(llm).call(ReadStats())).blocks_live:
                assert not task.done()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        inside.on_loop(llm, start_and_cancel())
        check_idle(llm)
        assert llm.stats().computed_tokens < 5000
        assert llm.agent("alice").tokens == 300
        kept = talk.turn(llm, 340)
        assert kept.report.cached_tokens.own > 256
        assert cold_ids(llm, kept.prompt_token_ids, 3) == kept.token_ids


def test_cancel_while_waiting_for_the_agents_turn(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:

        async def cancel_second() -> int:
            first = Stream(llm, make_ids(30), max_tokens=20)
            await first.updates.get()
            second = Stream(llm, make_ids(30, seed=2)).task
            await asyncio.sleep(0)
            second.cancel()
            return len(await first.rest())

        assert inside.on_loop(llm, cancel_second()) > 0
        assert llm.agent("alice").tokens == 50
