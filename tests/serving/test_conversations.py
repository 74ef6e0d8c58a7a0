"""One agent, several conversations: none erases another, and going back to any that is kept costs what is new."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from agentcache.api.report import Update
from agentcache.api.request import ChatPrompt, Request
from agentcache.errors import StoreError
from agentcache.gateway.operations import ClearCache, CreateAgent
from agentcache.llm import LLM, Completion
from agentcache.store.verify import verify_folder
from tests.marks import slow
from tests.serving import inside
from tests.serving.by_hand import by_hand
from tests.serving.conversation import (
    Chat,
    Stream,
    TokenTalk,
    goes_on,
    greedy,
    make_ids,
    make_text,
    manifests,
    open_llm,
)
from tests.serving.gate import Gate

SIDE = [{"role": "system", "content": "Give a title."}, {"role": "user", "content": "hi"}]


def title(llm: LLM, agent: str = "alice", words: str = "hi") -> Completion:
    """A side request as coding agents send it, with a system prompt of its own."""
    messages = [SIDE[0], {"role": "user", "content": words}]
    return llm.chat(messages, greedy(4), agent=agent)


@pytest.mark.slow
def test_a_side_request_takes_no_memory_away(model: Path, tmp_path: Path) -> None:
    chat = Chat()
    with open_llm(model, tmp_path) as llm:
        first = chat.turn(llm, make_text(300))
        before = llm.agent("alice")
        side = title(llm)
        assert side.report.saved and side.report.match == "NEW"
        assert side.report.lineage != first.report.lineage == "first"
        after = llm.agent("alice")
        assert after.tokens == before.tokens and after.disk_bytes > before.disk_bytes
        assert [lineage.id for lineage in after.lineages] == ["first", side.report.lineage]
    with open_llm(model, tmp_path) as llm:
        again = chat.turn(llm, "And now?")
        goes_on(again, before.tokens)
        assert (again.report.cache_state, again.report.lineage, again.report.lost_tokens) == ("warm", "first", 0)
        goes_on(title(llm), side.report.prompt_tokens)


@pytest.mark.slow
def test_a_side_request_that_comes_first(model: Path, tmp_path: Path) -> None:
    chat = Chat()
    with open_llm(model, tmp_path) as llm:
        title(llm)
        chat.turn(llm, make_text(300))
        title(llm, words="what else")
        tokens = llm.agent("alice").tokens
    with open_llm(model, tmp_path) as llm:
        goes_on(chat.turn(llm, "And now?"), tokens)


Rewrite = Callable[[Chat], list[dict[str, object]]]


def regenerate(chat: Chat) -> list[dict[str, object]]:
    return chat.messages[:-1]


def edit_in_the_middle(chat: Chat) -> list[dict[str, object]]:
    return [*chat.messages[:2], {"role": "user", "content": "Something else: " + make_text(40, seed=5)}]


def compact(chat: Chat) -> list[dict[str, object]]:
    """A summary in place of all that was said, behind the same system prompt."""
    return [chat.messages[0], {"role": "user", "content": "What was said before: " + make_text(60, seed=6)}]


def start_over(chat: Chat) -> list[dict[str, object]]:
    return [{"role": "user", "content": make_text(100, seed=7)}]


@pytest.mark.parametrize(
    ("rewrite", "restart"),
    [
        *((regenerate, False), slow(edit_in_the_middle, True), slow(compact, False), slow(start_over, True)),
        *(slow(regenerate, True), slow(edit_in_the_middle, False), slow(compact, True), slow(start_over, False)),
    ],
)
def test_what_a_rewrite_leaves_behind_can_be_gone_back_to(
    rewrite: Rewrite, restart: bool, model: Path, tmp_path: Path
) -> None:
    chat = Chat(messages=[{"role": "system", "content": make_text(120, seed=1)}])
    with open_llm(model, tmp_path) as llm:
        for seed in (2, 3, 4):
            chat.turn(llm, make_text(80, seed=seed))
        before = llm.agent("alice").tokens
        other = Chat(messages=rewrite(chat))
        ask = other.messages.pop()
        changed = other.turn(llm, str(ask["content"]), max_tokens=9)
        assert changed.report.saved and changed.report.lineage != "first"
        if not restart:
            goes_on(chat.turn(llm, "Back here."), before)
            goes_on(other.turn(llm, "And there."), changed.report.prompt_tokens + 9)
    if restart:
        with open_llm(model, tmp_path) as llm:
            goes_on(chat.turn(llm, "Back here."), before)
        with open_llm(model, tmp_path) as llm:
            goes_on(other.turn(llm, "And there."), changed.report.prompt_tokens + 9)


def test_a_rewrite_keeps_what_it_shares(model: Path, tmp_path: Path) -> None:
    chat = Chat()
    with open_llm(model, tmp_path) as llm:
        chat.turn(llm, make_text(300))
        report = llm.chat(chat.messages[:-1], greedy(9), agent="alice").report
        assert report.computed_tokens == 1 and report.cached_tokens.own == report.prompt_tokens - 1
        assert (report.cached_tokens.shared, report.lost_tokens) == (0, 0)
        assert report.match in ("PARTIAL", "DIVERGE")


def test_an_identical_prompt_replaces_its_twin(model: Path, tmp_path: Path) -> None:
    """A client that asks the same five times over leaves one lineage, whose last answer can be continued."""
    talk = Chat()
    with open_llm(model, tmp_path) as llm:
        for length in (9, 4, 7, 2, 6):
            chat = Chat()
            report = chat.turn(llm, make_text(300), max_tokens=length).report
            assert report.saved and report.lineage == "first"
        assert [lineage.tokens for lineage in llm.agent("alice").lineages] == [report.prompt_tokens + 6]
        talk.turn(llm, make_text(20, seed=2))
        answered = llm.agent("alice").lineages[1].tokens
        llm.chat(talk.messages[:1], greedy(0), agent="alice")
        assert llm.agent("alice").lineages[1].tokens == answered, "a prompt that is only cached replaces no answer"
    with open_llm(model, tmp_path) as llm:
        goes_on(chat.turn(llm, "And now?"), report.prompt_tokens + 6)
    assert verify_folder(tmp_path).problems == ()


def test_answers_given_anew_leave_the_old_one_and_the_newest(model: Path, tmp_path: Path) -> None:
    chat = Chat()
    with open_llm(model, tmp_path) as llm:
        chat.turn(llm, make_text(60))
        chat.turn(llm, make_text(60, seed=2))
        tokens = llm.agent("alice").tokens
        reports = [llm.chat(chat.messages[:-1], greedy(3 + again), agent="alice").report for again in range(4)]
        assert len({report.lineage for report in reports}) == 1 and reports[0].lineage != "first"
        assert len(llm.agent("alice").lineages) == 2
        goes_on(chat.turn(llm, "Back here."), tokens)


@pytest.mark.slow
def test_two_programs_under_one_name(model: Path, tmp_path: Path) -> None:
    """They share the system prompt and take turns."""
    system = {"role": "system", "content": make_text(150, seed=1)}
    chats = [Chat(messages=[system]), Chat(messages=[system])]
    tokens = [0, 0]
    for turn in range(3):
        for number, chat in enumerate(chats):
            with open_llm(model, tmp_path) as llm:
                completion = chat.turn(llm, make_text(60, seed=10 * number + turn))
                if turn:
                    goes_on(completion, tokens[number])
                tokens[number] = completion.report.prompt_tokens + completion.report.completion_tokens
    assert len(manifests(tmp_path)) == 2


@pytest.mark.slow
def test_twenty_beginnings_stay_within_the_bound(model: Path, tmp_path: Path) -> None:
    talks: dict[str, TokenTalk] = {}
    for seed in range(20):
        with open_llm(model, tmp_path, max_lineages=4) as llm:
            talk = TokenTalk(ids=make_ids(300, seed=seed))
            completion = talk.turn(llm, 320 + seed)
            assert completion.report.lineage is not None
            talks[completion.report.lineage] = talk
            kept = llm.agent("alice").lineages
            assert len(kept) == min(seed + 1, 4)
    assert {name.rpartition("~")[2] for name in manifests(tmp_path)} == {lineage.id for lineage in kept}
    assert {lineage.id for lineage in kept} <= set(list(talks)[-8:]), "the oldest went first"
    for lineage in kept:
        with open_llm(model, tmp_path, max_lineages=4) as llm:
            talk = talks[lineage.id]
            before = len(talk.ids)
            completion = talk.turn(llm, before + 30)
            goes_on(completion, before)
            assert completion.report.lineage == lineage.id
    report = verify_folder(tmp_path)
    assert (report.unnamed_blocks, report.missing_blocks, report.problems) == (0, 0, ())


@pytest.mark.slow
def test_titles_and_regenerations_do_not_push_a_long_conversation_out(model: Path, tmp_path: Path) -> None:
    chat = Chat()
    with open_llm(model, tmp_path, max_lineages=3) as llm:
        chat.turn(llm, make_text(400))
        tokens = llm.agent("alice").tokens
        for seed in range(8):
            title(llm, words=make_text(5, seed=seed))
            llm.chat(chat.messages[:-1], greedy(5 + seed), agent="alice")
    with open_llm(model, tmp_path, max_lineages=3) as llm:
        goes_on(chat.turn(llm, "And now?"), tokens)


@pytest.mark.slow
def test_a_lower_bound_holds_from_the_start(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:
        for seed in range(5):
            llm.generate(make_ids(280 + 20 * seed, seed=seed), greedy(2), agent="alice")
        llm.generate(make_ids(280, seed=9), greedy(2), agent="bob")
    with open_llm(model, tmp_path, max_lineages=2) as llm:
        assert len(llm.agent("alice").lineages) == 2
        assert len(llm.agent("bob").lineages) == 1
    assert len(manifests(tmp_path)) == 3


@pytest.mark.slow
def test_a_title_does_not_wait_for_the_main_request(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:

        async def run() -> tuple[int, int]:
            main = Stream(llm, make_ids(300), max_tokens=400)
            await main.updates.get()
            await asyncio.wait_for(Stream(llm, make_ids(40, seed=1), max_tokens=3).task, 30)
            assert not main.task.done()
            waits = Stream(llm, make_ids(300) + [11, 12], max_tokens=2)
            await main.task
            assert not waits.task.done(), "it goes on from what the main request is at work on"
            await waits.task
            return len(await main.rest()), len(await waits.rest())

        inside.on_loop(llm, run())
        assert len(llm.agent("alice").lineages) == 3
        llm.check_integrity()


@pytest.mark.slow
def test_one_lineage_takes_one_request_at_a_time(model: Path, tmp_path: Path) -> None:
    """The second one finds that the first has gone on elsewhere, and becomes a lineage of its own."""
    with open_llm(model, tmp_path) as llm:
        held = make_ids(300) + list(llm.generate(make_ids(300), greedy(4), agent="alice").token_ids)

        async def run() -> None:
            first = Stream(llm, held + make_ids(20, seed=1), max_tokens=100)
            second = Stream(llm, held + make_ids(20, seed=2), max_tokens=5)
            await asyncio.wait({first.task, second.task}, return_when=asyncio.FIRST_COMPLETED)
            assert first.task.done() and not second.task.done()
            await second.task
            reports = [(await stream.rest())[-1].report for stream in (first, second)]
            assert [report.lineage == "first" for report in reports if report] == [True, False]
            assert all(report.saved and report.computed_tokens <= 21 for report in reports if report)

        inside.on_loop(llm, run())


@pytest.mark.parametrize("is_done", [False, True])
def test_a_turn_that_was_matched_before_another_one_began_overwrites_nothing(
    is_done: bool, model: Path, tmp_path: Path
) -> None:
    """Both go on from the same state of the agent: the later one becomes a lineage of its own."""
    with by_hand(model, tmp_path) as hand:
        begun = hand.submit(make_ids(40), greedy(3), "alice")
        hand.run(begun)
        held, before = [*make_ids(40), *begun.token_ids], inside.record(hand.engine, "alice")
        first = hand.submit([*held, 11], greedy(3), "alice", found=before)
        if is_done:
            hand.run(first)
        second = hand.submit([*held, 12], greedy(3), "alice", found=before)
        hand.run(first, second)
        kept = [record.transcript.ids.tolist() for record in inside.records(hand.engine, "alice")]
        assert kept == [[*held, 11, *first.token_ids], [*held, 12, *second.token_ids]]
        assert (first.report.lineage == before.lineage) != (second.report.lineage == before.lineage)


def test_a_conversation_with_a_salt_goes_on_where_it_was_saved(model: Path, tmp_path: Path) -> None:
    ids = make_ids(40)
    with by_hand(model, tmp_path) as hand:
        first = hand.submit(ids, greedy(3), "alice", salt="s")
        hand.run(first)
        again = hand.submit([*ids, *first.token_ids, 9], greedy(1), "alice", salt="s")
        hand.run(again)
        assert (again.report.lineage, again.report.computed_tokens) == (first.report.lineage, 2)
        other = hand.submit([*ids, *first.token_ids, 9], greedy(1), "alice")
        hand.run(other)
        assert other.report.lineage != first.report.lineage and other.report.computed_tokens == 44


@pytest.mark.slow
def test_clearing_the_cache_leaves_everything_on_disk(model: Path, tmp_path: Path) -> None:
    chat = Chat()
    with open_llm(model, tmp_path) as llm:
        chat.turn(llm, make_text(300))
        title(llm)
        before, tokens = manifests(tmp_path), llm.agent("alice").tokens
        inside.on_loop(llm, inside.async_engine(llm).call(ClearCache()))
        assert manifests(tmp_path) == before
        assert llm.stats().blocks_cached == 0
        again = chat.turn(llm, "And now?")
        goes_on(again, tokens)
        assert again.report.cache_state == "warm"


def keep_rewriting(llm: LLM) -> None:
    """Every turn takes back the answer before it; one lineage may stay."""
    chat = Chat()
    for seed in range(5):
        chat.turn(llm, make_text(60, seed=seed))
        llm.chat(chat.messages[:-1], greedy(7), agent="alice")


def cut_words(llm: LLM) -> None:
    """Every text ends inside a word, and goes on in the next one: the last token is another one then."""
    text = make_text(400)
    for length in (700, 731, 742, 803, 904):
        llm.generate(text[:length], greedy(0), agent="alice")


@pytest.mark.parametrize("work", [slow(keep_rewriting), cut_words])
def test_evicting_frees_all_that_only_the_agent_holds(work: Callable[[LLM], None], model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path, max_lineages=1) as llm:
        Chat("bob").turn(llm, make_text(200, seed=1))
        quiet = llm.stats().blocks_cached
        work(llm)
        assert llm.stats().blocks_cached > quiet
        evicted = llm.evict("alice")
        assert (evicted.ram_bytes, evicted.cache_state) == (0, "warm")
        assert llm.stats().blocks_cached == quiet


def test_a_cancelled_branch_leaves_no_lineage(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:
        llm.generate(make_ids(300), greedy(4), agent="alice")

        async def run() -> None:
            stream = Stream(llm, make_ids(280, seed=3), max_tokens=400)
            await stream.updates.get()
            stream.task.cancel()
            await asyncio.wait({stream.task})

        inside.on_loop(llm, run())
        assert [lineage.tokens for lineage in llm.agent("alice").lineages] == [304]
        llm.check_integrity()


@pytest.mark.slow
def test_what_was_not_found_is_reported(model: Path, tmp_path: Path) -> None:
    talk = TokenTalk()
    with open_llm(model, tmp_path) as llm:
        talk.turn(llm, 600)
        llm.evict("alice")
    for path in sorted(tmp_path.glob("blocks/*/*")):
        path.write_bytes(b"damaged")
    with open_llm(model, tmp_path) as llm:
        report = talk.turn(llm, 640).report
        assert report.lost_tokens == 599 and report.cached_tokens.own == 0 and report.saved
    with open_llm(model, tmp_path) as llm:
        assert talk.turn(llm, 660).report.lost_tokens == 0


def fail_manifests(llm: LLM) -> Callable[[], None]:
    """No manifest can be written until the result is called."""

    def fault(step: str) -> None:
        if step == "manifest-before-temp":
            raise OSError(errno.ENOSPC, "No space left on device")

    return inside.set_fault(inside.engine_of(llm), fault, blocks=False)


@pytest.mark.parametrize("bound", [1, 3])
def test_no_saved_conversation_goes_for_one_that_is_not_saved(bound: int, model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path, max_lineages=bound) as llm:
        for seed in range(bound):
            llm.generate(make_ids(200, seed=seed), greedy(3), agent="alice")
        saved = set(manifests(tmp_path))
        repair = fail_manifests(llm)
        for seed in range(10, 13):
            assert llm.generate(make_ids(200, seed=seed), greedy(3), agent="alice").report.saved is False
            assert len(llm.agent("alice").lineages) == bound
        assert set(manifests(tmp_path)) == saved
        repair()
        assert llm.generate(make_ids(200, seed=20), greedy(3), agent="alice").report.saved
        inside.flush(inside.engine_of(llm))  # the removal of the one that it took the place of
        assert len(manifests(tmp_path)) == bound
    report = verify_folder(tmp_path)
    assert (report.unnamed_blocks, report.missing_blocks, report.problems) == (0, 0, ())


@pytest.mark.slow
def test_a_fork_that_fails_leaves_nothing_and_can_be_repeated(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:
        for seed in range(3):
            llm.generate(make_ids(200, seed=seed), greedy(3), agent="alice")
        written = 0

        def fault(step: str) -> None:
            nonlocal written
            written += step == "manifest-before-temp"
            if step == "manifest-before-temp" and written == 2:
                raise OSError(errno.ENOSPC, "No space left on device")

        repair = inside.set_fault(inside.engine_of(llm), fault, blocks=False)
        with pytest.raises(StoreError):
            llm.fork("alice", "bob")
        repair()
        assert [info.id for info in llm.agents()] == ["alice"]
        assert len(llm.fork("alice", "bob").lineages) == 3
    assert len(manifests(tmp_path)) == 6


def test_a_request_that_waits_for_its_agent_to_be_made_has_its_system_text(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:

        async def run() -> int:
            gate = await inside.on_thread(inside.async_engine(llm), Gate.of)
            making = asyncio.ensure_future(
                inside.async_engine(llm).call(CreateAgent("alice", system=make_text(60, seed=1)))
            )
            await gate.reached()
            request = Request("1", ChatPrompt([{"role": "user", "content": "Hi"}]), greedy(1), "alice")
            updates: list[Update] = []
            asking = asyncio.ensure_future(inside.async_engine(llm).generate(request, updates.append))
            await asyncio.sleep(0.05)
            gate.opened.set()
            await asyncio.gather(making, asking)
            report = updates[-1].report
            assert report is not None
            return report.prompt_tokens

        assert inside.on_loop(llm, run()) > 60


@pytest.mark.slow
def test_thoughts_that_are_left_out_are_no_other_lineage(model: Path, tmp_path: Path) -> None:
    """The client sends the answer without its beginning, as templates of reasoning models do."""
    chat = Chat()
    with open_llm(model, tmp_path) as llm:
        for turn in range(4):
            completion = chat.turn(llm, make_text(30, seed=turn), max_tokens=60)
            thought, answer = completion.text[:20], completion.text[20:]
            assert thought and len(answer) > 40
            chat.messages[-1]["content"] = answer
            assert completion.report.lineage == "first"
            if turn:
                assert completion.report.match in ("PARTIAL", "DIVERGE")
        assert len(llm.agent("alice").lineages) == 1
    assert list(manifests(tmp_path)) == ["alice"]
