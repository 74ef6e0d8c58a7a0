from __future__ import annotations

import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache.api.report import TokenLogprob, Update
from agentcache.server import completion
from agentcache.server.completion import Backlog
from tests.examples import examples

updates = st.lists(
    st.one_of(
        st.none(),
        st.builds(
            Update,
            text=st.text(max_size=4),
            token_ids=st.just((7,)),
            choice=st.integers(0, 1),
            markers=st.sampled_from([(), ((0, "<think>"),)]),
            prompt_token_ids=st.sampled_from([None, None, None, (1, 2)]),
        ),
    ),
    max_size=200,
)


def contents(pending: list[Update | Exception | None]) -> dict[int, tuple[str, list[int], list[tuple[int, str]]]]:
    """Of each answer its text, its tokens, and where in the text its markers stand."""
    said: dict[int, tuple[str, list[int], list[tuple[int, str]]]] = {}
    for update in pending:
        if isinstance(update, Update):
            text, ids, markers = said.get(update.choice, ("", [], []))
            markers = [*markers, *((len(text) + at, name) for at, name in update.markers)]
            said[update.choice] = text + update.text, [*ids, *update.token_ids], markers
    return said


@settings(max_examples=examples(100), deadline=None)
@given(updates)
def test_nothing_is_lost_by_merging(put: list[Update | None]) -> None:
    queue = Backlog()
    for update in put:
        queue.put(update)
    popped = [queue.pop() for _ in range(len(queue))]
    assert contents(popped) == contents(list(put))
    assert [update for update in popped if isinstance(update, Update) and update.prompt_token_ids] == [
        update for update in put if update is not None and update.prompt_token_ids
    ]
    assert not queue.is_full and queue._size == 0


def test_what_is_read_in_time_is_as_it_came() -> None:
    queue, update = Backlog(), Update("a", (1,))
    for _ in range(100):
        queue.put(update)
        assert queue.pop() is update


def test_a_client_far_behind_takes_little_memory() -> None:
    queue = Backlog()
    for _ in range(20_000):
        queue.put(Update("word ", (1,)))
    assert len(queue) <= completion._BEHIND + 20_000 / completion._TOGETHER + 1
    assert sum(sys.getsizeof(update.text) for update in queue._pending if isinstance(update, Update)) < 200_000


def test_one_with_many_logprobs_is_ended() -> None:
    token = TokenLogprob(1, b"a", -1.0, ((1, b"a", -1.0),) * 20)
    queue, count = Backlog(), 0
    while not queue.is_full:
        queue.put(Update("a", (1,), (token,)))
        count += 1
    assert 2000 < count < 3000
