"""Streamed completions, each on a thread of its own, with the time of every token.

For any OpenAI-style server: what is timed is when a client has the token, on its side of the wire.
"""

from __future__ import annotations

import json
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from agentcache.client import TIMEOUT, ServerError
from agentcache.errors import AgentCacheError

_WAIT_SECONDS = 600.0
_ATTEMPTS = 3


class BenchmarkFailed(AgentCacheError):
    """What was to be measured did not happen."""


@dataclass(frozen=True)
class Stream:
    """One answer. Times are of this process's `time.perf_counter`, in seconds.

    Args:
        sent_at, ended_at: when the request was sent, and when the stream ended.
        token_times: when each token came, by the event that brought it.
        usage, report: of the last events; empty where the server sends none.
    """

    sent_at: float
    token_times: tuple[float, ...]
    ended_at: float
    text: str
    usage: Mapping[str, Any]
    report: Mapping[str, Any]

    @property
    def ttft_ms(self) -> float:
        return (self.token_times[0] - self.sent_at) * 1e3

    @property
    def total_ms(self) -> float:
        return (self.ended_at - self.sent_at) * 1e3

    @property
    def decode_seconds(self) -> float:
        """From the first token to the last."""
        return self.token_times[-1] - self.token_times[0]


@dataclass(frozen=True)
class _Last:
    """What the events so far said last."""

    usage: Mapping[str, Any]
    report: Mapping[str, Any]


class RunningStream:
    """A streamed request that is under way; `token_times` grows meanwhile.

    Args:
        url: the server's.
        path: of the route.
        body: of the request; `stream` is set here.
    """

    def __init__(self, url: str, path: str, body: Mapping[str, Any]) -> None:
        self.token_times: list[float] = []
        self._body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        self._url = url + path
        self._changed = threading.Condition()
        self._cancelled = False
        self._ended = False
        self._stream: Stream | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def result(self) -> Stream:
        """The whole answer, once it is there. Raises ServerError, or httpx.HTTPError."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._stream is not None
        return self._stream

    def cancel(self) -> None:
        """Leave at the next token; returns when the connection is closed."""
        self._cancelled = True
        self._thread.join()

    def wait_for_tokens(self, count: int) -> None:
        """Return when `count` tokens have come. Raises what ended the stream before."""
        with self._changed:
            came = self._changed.wait_for(lambda: len(self.token_times) >= count or self._ended, _WAIT_SECONDS)
        if not came:
            raise ServerError(f"no token for {_WAIT_SECONDS:.0f} s")
        if len(self.token_times) < count:
            self.result()
            raise ServerError(f"the stream ended after {len(self.token_times)} tokens")

    def wait_for_more(self, count: int) -> None:
        """Return when `count` further tokens have come."""
        self.wait_for_tokens(len(self.token_times) + count)

    def _run(self) -> None:
        try:
            self._stream = self._read()
        except Exception as error:
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _read(self) -> Stream:
        sent_at = time.perf_counter()
        text, last = "", _Last({}, {})
        with (
            # A benchmark's servers are on loopback; loading certificates would take longer than many an answer.
            httpx.Client(timeout=TIMEOUT, trust_env=False, verify=False) as http,
            http.stream("POST", self._url, json=self._body) as response,
        ):
            if response.is_error:
                raise ServerError(response.read().decode(errors="replace")[:300], status=response.status_code)
            for event in _events(response):
                text += self._note(event)
                last = _Last(event.get("usage") or last.usage, event.get("agentcache") or last.report)
                if self._cancelled:
                    break
        return Stream(sent_at, tuple(self.token_times), time.perf_counter(), text, last.usage, last.report)

    def _note(self, event: Mapping[str, Any]) -> str:
        """Time the tokens of an event; its text."""
        if "error" in event:
            raise ServerError(str(event["error"]))
        now, texts = time.perf_counter(), []
        for choice in event.get("choices", []):
            piece = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            texts.append(piece)
            # The finishing event may wait until the turn is saved: it times no token.
            if not choice.get("finish_reason"):
                self._add(now, len(choice.get("token_ids") or []) or bool(piece))
        return "".join(texts)

    def _add(self, now: float, count: int) -> None:
        with self._changed:
            self.token_times += [now] * count
            self._changed.notify_all()


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data:") and (data := line.removeprefix("data:").strip()) != "[DONE]":
            yield json.loads(data)


def run_together(url: str, path: str, bodies: Sequence[Mapping[str, Any]]) -> list[Stream]:
    """Send all requests at once; their answers, in the same order."""
    running = [RunningStream(url, path, body) for body in bodies]
    return [stream.result() for stream in running]


def run_at_once(run: Callable[[], list[Stream]]) -> list[Stream]:
    """The streams of `run`, again if there was no time when all of them were getting tokens.

    A reader that the machine keeps waiting gets its whole answer when the others have theirs.
    """
    for _ in range(_ATTEMPTS):
        streams = run()
        begin, end = _while_all_decode(streams)
        if begin < end:
            break
    return streams


def gaps_ms(token_times: Sequence[float], since: float = 0.0, until: float = float("inf")) -> list[float]:
    """Milliseconds between tokens that follow each other, where the later one came within [since, until]."""
    pairs = zip(token_times, token_times[1:], strict=False)
    return [(later - earlier) * 1e3 for earlier, later in pairs if since <= later <= until]


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def steady_rate(streams: Sequence[Stream]) -> float:
    """Tokens a second of all streams together, while all of them were getting tokens.

    Raises:
        BenchmarkFailed: there was no such time.
    """
    begin, end = _while_all_decode(streams)
    if begin >= end:
        raise BenchmarkFailed("one answer was over before another one began; let them decode more tokens")
    count = sum(begin < moment <= end for stream in streams for moment in stream.token_times)
    return count / (end - begin)


def _while_all_decode(streams: Sequence[Stream]) -> tuple[float, float]:
    return max(s.token_times[0] for s in streams), min(s.token_times[-1] for s in streams)


def overall_rate(streams: Sequence[Stream]) -> float:
    """Tokens a second of all streams together, from the first token that anyone got to the last one."""
    begin, end = min(s.token_times[0] for s in streams), max(s.token_times[-1] for s in streams)
    return (sum(len(s.token_times) for s in streams) - 1) / (end - begin)


def median_rate(streams: Sequence[Stream]) -> float:
    """Tokens a second of the median stream, from its first token to its last."""
    return statistics.median((len(s.token_times) - 1) / s.decode_seconds for s in streams)
