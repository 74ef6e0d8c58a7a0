"""Kernels behind a real server: right ones, and what becomes of a server whose kernels are broken.

They run in the emulator, in the server and in the child process that it tries them in.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentcache.server_process import ServerProcess
from tests.live.servers import BUDGETS, PATIENCE, complete, log_of, make_ids, outcome, serving, stats
from tests.metal_kernels import emulated_server
from tests.metal_kernels.emulator.build import clang

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(clang() is None, reason="the kernels' emulator needs clang 18 or newer"),
]

WARNING = "MLX's operations are used instead"
PROMPT = make_ids(300)


@contextmanager
def emulating(bug: str, model: Path, cache_dir: Path, mode: str = "on") -> Iterator[ServerProcess]:
    """A server on a device whose kernel for decoding has this bug."""
    with ServerProcess(
        cache_dir,
        cache_dir.parent / f"{cache_dir.name}.log",
        model=str(model),
        # The emulator copies the whole cache for each call of a kernel that writes into it.
        extra=(*BUDGETS, "--max-context", "1024", "--ram-budget", "4MB"),
        command=(sys.executable, emulated_server.__file__, bug, "serve"),
        ready_seconds=PATIENCE,
        environment={"AGENTCACHE_KERNELS": mode, "AGENTCACHE_KV": "4t"},
    ) as server:
        yield server


def two_turns(server: ServerProcess) -> list[dict[str, Any]]:
    """A prompt that is computed in a chunk, and one that goes on from it in a few tokens."""
    first = complete(server, PROMPT, 4, agent="alice")
    [choice] = first["choices"]
    return [first, complete(server, [*PROMPT, *choice["token_ids"], *make_ids(5, seed=1)], 4, agent="alice")]


@pytest.fixture(scope="module")
def expected(live_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What a server without a device answers."""
    with serving(live_model, tmp_path_factory.mktemp("expected") / "cache", kv="4t") as server:
        return two_turns(server)


def warnings(cache_dir: Path) -> int:
    return log_of(cache_dir).count(WARNING)


def launches(cache_dir: Path) -> int:
    """Of a server that has ended."""
    return int(log_of(cache_dir).rpartition(emulated_server.LAUNCHES)[2])


@pytest.mark.parametrize(
    ("bug", "reason"),
    [("wrong", "wrong numbers: decode"), ("syntax", "ended with code 1"), ("abort", "ended with code -6")],
)
def test_with_broken_kernels_it_starts_warns_once_and_answers_as_the_reference(
    bug: str, reason: str, expected: list[dict[str, Any]], live_model: Path, tmp_path: Path
) -> None:
    cache_dir = tmp_path / "cache"
    with emulating(bug, live_model, cache_dir) as server:
        answers = two_turns(server)
        assert server.client.healthy()
    assert [outcome(each) for each in answers] == [outcome(each) for each in expected]
    assert warnings(cache_dir) == 1
    assert reason in log_of(cache_dir)
    assert launches(cache_dir) == 0


def test_right_kernels_answer(expected: list[dict[str, Any]], live_model: Path, tmp_path: Path) -> None:
    cache_dir = tmp_path / "cache"
    with emulating("none", live_model, cache_dir) as server:
        answers = two_turns(server)
    for answer, other in zip(answers, expected, strict=True):
        (ids, logprobs), (expected_ids, expected_logprobs) = outcome(answer), outcome(other)
        assert ids == expected_ids
        assert logprobs == pytest.approx(expected_logprobs, abs=1e-3)
    assert warnings(cache_dir) == 0
    assert launches(cache_dir) > 0


def test_check_counts_no_differences(expected: list[dict[str, Any]], live_model: Path, tmp_path: Path) -> None:
    """Everything is computed both ways, and the reference's numbers are those that are used."""
    cache_dir = tmp_path / "cache"
    with emulating("none", live_model, cache_dir, mode="check") as server:
        answers, counted = two_turns(server), stats(server)
    assert [outcome(each) for each in answers] == [outcome(each) for each in expected]
    assert counted["kernel_checks"] > 0
    assert counted["kernel_differences"] == 0
    assert launches(cache_dir) > 0
