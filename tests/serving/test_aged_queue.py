"""Small items first, and no item waits for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentcache.gateway.aged_queue import AgedQueue


def test_items_that_came_together_go_by_cost() -> None:
    queue = AgedQueue[str]()
    for item in ("bbb", "a", "cc", "b"):
        queue.push(item, len(item))
    assert [queue.take(lambda item: True) for _ in range(5)] == ["a", "b", "cc", "bbb", None]


def test_items_that_may_not_go_let_others_go_and_keep_their_place() -> None:
    queue = AgedQueue[str]()
    for item in ("large", "a", "void"):
        queue.push(item, len(item))
    queue.drop(lambda item: item == "void")
    assert queue.take(lambda item: item != "a") == "large"
    assert list(queue) == ["a"] and queue.take(lambda item: item == "no") is None and len(queue) == 1
    queue.clear()
    assert queue.take(lambda item: True) is None


@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 4)), max_size=60))
def test_later_items_that_go_first_cost_less_than_twice_the_item_that_waits(arrivals: list[tuple[int, int]]) -> None:
    queue, costs = AgedQueue[int](), dict[int, int]()
    overtaken: dict[int, int] = {}  # cost of later items that went first, by item that waits

    def take() -> None:
        taken = queue.take(lambda item: True)
        if taken is not None:
            del overtaken[taken]
            for number in overtaken:
                overtaken[number] += costs[taken] if taken > number else 0
                assert overtaken[number] < 2 * costs[number]

    for number, (cost, num_taken) in enumerate(arrivals):
        queue.push(number, cost)
        costs[number], overtaken[number] = cost, 0
        for _ in range(num_taken):
            take()
    while overtaken:
        take()


def test_an_item_is_next_when_later_ones_have_cost_as_much() -> None:
    queue = AgedQueue[str]()
    queue.push("large", 3)
    for item in "abc":
        queue.push(item, 1)
        assert queue.take(lambda item: True) == item
    queue.push("d", 1)
    assert queue.take(lambda item: True) == "large"
