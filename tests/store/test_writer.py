"""The writer thread: order, back-pressure, and that nothing ends it but `close`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from queue import Queue
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache.errors import DiskBudgetExceeded, StoreError
from agentcache.store.writing import Writer
from tests.examples import examples
from tests.throwing import THROWN, PanicException

TIMEOUT = 60


@pytest.fixture
def writer() -> Iterator[Writer]:
    writer = Writer(max_bytes=100)
    yield writer
    writer.close()


def fail(error: BaseException) -> int:
    raise error


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 150)), max_size=20))
def test_jobs_run_in_order_and_each_has_an_outcome(jobs: list[tuple[bool, int]]) -> None:
    writer, ran, outcomes = Writer(max_bytes=100), list[int](), list[int | StoreError]()

    def run(number: int, succeeds: bool) -> int:
        ran.append(number)
        return number if succeeds else fail(StoreError(str(number)))

    for number, (succeeds, num_bytes) in enumerate(jobs):
        writer.submit(lambda n=number, s=succeeds: run(n, s), outcomes.append, num_bytes)
    writer.close()
    assert ran == list(range(len(jobs)))
    assert [int(str(outcome)) for outcome in outcomes] == ran
    assert [not isinstance(outcome, StoreError) for outcome in outcomes] == [succeeds for succeeds, _ in jobs]
    assert writer._waiting_bytes == 0


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (DiskBudgetExceeded("full"), DiskBudgetExceeded, "full"),
        (OSError(28, "No space left"), StoreError, "OSError: .*No space left"),
        (ZeroDivisionError("of ours"), StoreError, "ZeroDivisionError: of ours"),
        (PanicException("of Rust"), StoreError, "PanicException: of Rust"),
        (SystemExit(1), StoreError, "SystemExit: 1"),
    ],
)
def test_every_failure_is_a_store_error(
    writer: Writer, error: BaseException, kind: type[StoreError], message: str
) -> None:
    outcomes: Queue[int | StoreError] = Queue()
    writer.submit(lambda: fail(error), outcomes.put)
    writer.submit(lambda: 7, outcomes.put)
    with pytest.raises(kind, match=message):
        raise outcomes.get(timeout=TIMEOUT)
    assert outcomes.get(timeout=TIMEOUT) == 7


def test_submit_waits_while_too_many_bytes_are_queued(writer: Writer) -> None:
    gate, outcomes, submitted = threading.Event(), Queue[int | StoreError](), threading.Event()
    writer.submit(lambda: gate.wait(TIMEOUT), outcomes.put, num_bytes=101)

    def submit() -> None:
        writer.submit(lambda: 2, outcomes.put, num_bytes=1)
        submitted.set()

    thread = threading.Thread(target=submit)
    thread.start()
    assert not submitted.wait(0.05)
    assert writer._waiting_bytes == 101
    gate.set()
    assert submitted.wait(TIMEOUT)
    thread.join()
    assert [outcomes.get(timeout=TIMEOUT) for _ in range(2)] == [True, 2]


def test_outcomes_come_on_the_writer_thread(writer: Writer) -> None:
    names: Queue[str] = Queue()
    writer.submit(lambda: 0, lambda _: names.put(threading.current_thread().name))
    assert names.get(timeout=TIMEOUT) == "agentcache-writer"


def test_a_receiver_that_fails_does_not_end_the_thread(writer: Writer, caplog: pytest.LogCaptureFixture) -> None:
    outcomes: Queue[int | StoreError] = Queue()
    with caplog.at_level(logging.ERROR):
        writer.submit(lambda: 1, lambda _: fail(RuntimeError("the loop is closed")), num_bytes=101)
        writer.submit(lambda: 2, outcomes.put, num_bytes=1)
        assert outcomes.get(timeout=TIMEOUT) == 2
    assert "the loop is closed" in caplog.text


def test_nothing_is_lost_silently_after_close() -> None:
    writer, outcomes = Writer(), list[int | StoreError]()
    writer.close()
    writer.submit(lambda: 1, outcomes.append)
    assert [str(outcome) for outcome in outcomes] == ["the writer is closed"]
    writer.close()


@pytest.mark.parametrize("kind", THROWN)
def test_an_outcome_that_is_not_taken_ends_nothing(writer: Writer, kind: type[BaseException]) -> None:
    outcomes: Queue[int | StoreError] = Queue()
    writer.submit(lambda: 1, lambda outcome: outcomes.put(fail(kind())))
    writer.submit(lambda: 2, outcomes.put)
    assert outcomes.get(timeout=TIMEOUT) == 2


def test_a_thread_that_dies_leaves_no_sender_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those whose jobs are queued, nor those that wait for room, nor those that come later."""
    writer, outcomes, next_job = Writer(max_bytes=100), Queue[int | StoreError](), Writer._next
    may_die = threading.Event()

    def dying(self: Writer) -> Any:
        if may_die.is_set():
            raise PanicException("no memory")
        return next_job(self)

    monkeypatch.setattr(Writer, "_next", dying)
    held = threading.Event()
    writer.submit(lambda: held.wait(TIMEOUT), lambda outcome: None, 200)
    waiting = threading.Thread(target=lambda: writer.submit(lambda: 2, outcomes.put))
    waiting.start()
    may_die.set()
    held.set()
    waiting.join(TIMEOUT)
    writer.submit(lambda: 3, outcomes.put)
    for _ in range(2):
        assert isinstance(outcomes.get(timeout=TIMEOUT), StoreError)
    writer.close()
