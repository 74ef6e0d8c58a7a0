from __future__ import annotations

import asyncio
import gc
import logging
import queue
import subprocess
import sys
import threading

import pytest

from agentcache.errors import InternalError
from agentcache.system.threads import DaemonPool, as_exception, start_thread
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
    assert error.__cause__ is None


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
        assert "the trie is full" in str(told.get(timeout=60))
        thread.join(60)
    assert thread.daemon and "some-thread" in caplog.text


# -- pools ------------------------------------------------------------------------------------------------------------


def test_a_pool_runs_functions_on_a_few_threads() -> None:
    pool, gate = DaemonPool(2, "few"), threading.Barrier(2)
    assert len({pool.submit(lambda: (gate.wait(60), threading.get_ident())[1]) for _ in range(2)}) == 2
    idents = {pool.submit(threading.get_ident).result(60) for _ in range(50)}
    assert 1 <= len(idents) <= 2
    for kind in THROWN:
        with pytest.raises(Exception, match="no"):
            pool.submit(throw, kind).result(60)
    assert pool.submit(int, "7", base=8).result(60) == 7


def throw(kind: type[BaseException]) -> None:
    raise kind("no")


def test_threads_end_with_their_pool() -> None:
    pool = DaemonPool(3, "ending")
    gate = threading.Barrier(3)
    threads = [future.result(60) for future in [pool.submit(here, gate) for _ in range(3)]]
    assert len(set(threads)) == 3 and all(thread.daemon for thread in threads)
    del pool
    gc.collect()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def here(gate: threading.Barrier) -> threading.Thread:
    gate.wait(60)
    return threading.current_thread()


def test_a_pool_does_not_hold_up_the_end_of_the_process() -> None:
    program = (
        "import time; from agentcache.system.threads import DaemonPool; DaemonPool(1, 'slow').submit(time.sleep, 600)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
