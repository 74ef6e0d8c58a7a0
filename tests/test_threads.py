from __future__ import annotations

import asyncio
import logging
import queue

import pytest

from agentcache.errors import InternalError
from agentcache.threads import as_exception, contained, start_thread
from tests.throwing import THROWN, PanicException


@pytest.mark.parametrize("kind", THROWN)
def test_a_future_takes_whatever_was_thrown(kind: type[BaseException]) -> None:
    async def wait() -> None:
        future = asyncio.get_running_loop().create_future()
        future.set_exception(as_exception(kind("the trie is full")))
        await future

    with pytest.raises(Exception, match="the trie is full"):
        asyncio.run(wait())


def test_an_ordinary_error_stays_what_it_is() -> None:
    error = ValueError("x")
    assert as_exception(error) is error
    with pytest.raises(ValueError, match="x") as raised:
        contained(int)("x")
    assert raised.value.__cause__ is None


@pytest.mark.parametrize("kind", THROWN)
def test_a_task_waits_for_a_thread_that_throws(kind: type[BaseException]) -> None:
    def work() -> None:
        raise kind("the trie is full")

    with pytest.raises(Exception, match="the trie is full"):
        asyncio.run(asyncio.wait_for(asyncio.to_thread(contained(work)), 5))


def test_a_wrapped_error_names_its_cause() -> None:
    panic = PanicException("the trie is full")
    wrapped = as_exception(panic)
    assert isinstance(wrapped, InternalError) and wrapped.__cause__ is panic
    assert str(wrapped) == "PanicException: the trie is full"


@pytest.mark.parametrize("kind", THROWN)
def test_a_thread_that_dies_says_so(kind: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    def run() -> None:
        raise kind("the trie is full")

    told: queue.SimpleQueue[Exception] = queue.SimpleQueue()
    with caplog.at_level(logging.ERROR):
        thread = start_thread("some-thread", run, told.put)
        assert "the trie is full" in str(told.get(timeout=5))
        thread.join(5)
    assert thread.daemon and "some-thread" in caplog.text
