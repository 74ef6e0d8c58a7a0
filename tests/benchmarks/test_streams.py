"""Streams time every token of a real HTTP stream, and say why one ended."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentcache.client import ServerError
from agentcache.server_process import ServerProcess
from benchmarks.streams import (
    BenchmarkFailed,
    RunningStream,
    Stream,
    gaps_ms,
    overall_rate,
    percentile,
    run_at_once,
    run_together,
    steady_rate,
)
from benchmarks.workload import turn_body

FAKE = (sys.executable, str(Path(__file__).parent.parent / "fake_server.py"))
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("streams")
    with ServerProcess(folder / "cache", folder / "log", command=FAKE) as server:
        yield server.client.url


def stream_of(times: list[float], sent_at: float = 0.0) -> Stream:
    return Stream(sent_at, tuple(times), times[-1] + 1, "", {}, {})


def test_every_token_is_timed_in_order(url: str) -> None:
    stream = RunningStream(url, PATH, turn_body("alice", [1, 2, 3], 6, return_token_ids=True)).result()
    assert stream.usage["completion_tokens"] == 6
    assert len(stream.token_times) in (5, 6)  # the last token may come with the end, which is not timed
    assert stream.sent_at < stream.token_times[0] <= stream.token_times[-1] <= stream.ended_at
    assert stream.report["agent"] == "alice"
    assert stream.text


def test_many_at_once_answer_in_the_order_they_were_asked(url: str) -> None:
    bodies = [turn_body(f"agent-{index}", [index], 3) for index in range(5)]
    reports = [stream.report["agent"] for stream in run_together(url, PATH, bodies)]
    assert reports == [f"agent-{index}" for index in range(5)]


def test_waiting_for_more_tokens_than_come_fails_at_once(url: str) -> None:
    stream = RunningStream(url, PATH, turn_body("bob", [1], 3))
    stream.wait_for_tokens(1)
    with pytest.raises(ServerError, match="ended after"):
        stream.wait_for_tokens(100)


def test_a_refusal_is_raised_by_whoever_waits(url: str) -> None:
    stream = RunningStream(url, PATH, turn_body("carol", [1] * 200_000, 3))
    for wait in (lambda: stream.wait_for_tokens(1), stream.result):
        with pytest.raises(ServerError, match="too long"):
            wait()


def test_gaps_are_those_whose_token_came_meanwhile() -> None:
    times = [1.0, 1.1, 1.3, 1.6]
    assert gaps_ms(times) == pytest.approx([100, 200, 300])
    assert gaps_ms(times, since=1.2, until=1.4) == pytest.approx([200])


def test_percentiles_are_values_that_occurred() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, percent) for percent in (1, 20, 50, 95, 100)] == [1, 1, 3, 5, 5]


def test_the_steady_rate_counts_only_while_all_decode() -> None:
    early = stream_of([float(t) for t in range(11)])  # 0 … 10
    late = stream_of([5.5 + t for t in range(11)])  # 5.5 … 15.5
    assert steady_rate([early, late]) == pytest.approx((5 + 4) / 4.5)
    assert overall_rate([early, late]) == pytest.approx(21 / 15.5)


def test_there_is_no_steady_rate_of_streams_that_do_not_meet() -> None:
    with pytest.raises(BenchmarkFailed):
        steady_rate([stream_of([1.0, 2.0]), stream_of([3.0, 4.0])])


def test_streams_that_do_not_meet_are_run_again_a_few_times() -> None:
    apart, meeting = [stream_of([1.0, 2.0]), stream_of([3.0, 4.0])], [stream_of([1.0, 3.0]), stream_of([2.0, 4.0])]
    assert run_at_once(iter([apart, meeting]).__next__) is meeting
    assert run_at_once(iter([apart] * 3).__next__) is apart
