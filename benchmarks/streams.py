"""Streamed completions, with the client's time of each token."""

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
    """The measured situation did not occur."""


@dataclass(frozen=True)
class Stream:
    """Times by `time.perf_counter`; usage and report are the last sent."""

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
        return self.token_times[-1] - self.token_times[0]


@dataclass(frozen=True)
class _Last:
    usage: Mapping[str, Any]
    report: Mapping[str, Any]


class RunningStream:
    """A streamed request on its own thread, which appends to `token_times`."""

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
        """Wait for the end. Raises ServerError or httpx.HTTPError."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._stream is not None
        return self._stream

    def cancel(self) -> None:
        """Stop at the next token; wait for the connection's end."""
        self._cancelled = True
        self._thread.join()

    def wait_for_tokens(self, count: int) -> None:
        with self._changed:
            came = self._changed.wait_for(lambda: len(self.token_times) >= count or self._ended, _WAIT_SECONDS)
        if not came:
            raise ServerError(f"no token for {_WAIT_SECONDS:.0f} s")
        if len(self.token_times) < count:
            self.result()
            raise ServerError(f"the stream ended after {len(self.token_times)} tokens")

    def wait_for_more(self, count: int) -> None:
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
            # Loading certificates takes longer than many answers.
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
        if "error" in event:
            raise ServerError(str(event["error"]))
        now, texts = time.perf_counter(), []
        for choice in event.get("choices", []):
            piece = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            texts.append(piece)
            # The finishing event may wait for the save.
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
    running = [RunningStream(url, path, body) for body in bodies]
    return [stream.result() for stream in running]


def run_at_once(run: Callable[[], list[Stream]]) -> list[Stream]:
    """Retry until the streams overlap, at most `_ATTEMPTS` times."""
    for _ in range(_ATTEMPTS):
        streams = run()
        begin, end = _while_all_decode(streams)
        if begin < end:
            break
    return streams


def gaps_ms(token_times: Sequence[float], since: float = 0.0, until: float = float("inf")) -> list[float]:
    """Gaps between consecutive tokens, the later one within [since, until]."""
    pairs = zip(token_times, token_times[1:], strict=False)
    return [(later - earlier) * 1e3 for earlier, later in pairs if since <= later <= until]


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def steady_rate(streams: Sequence[Stream]) -> float:
    """Total tokens/s while all streams decode. Raises BenchmarkFailed if they do not overlap."""
    begin, end = _while_all_decode(streams)
    if begin >= end:
        raise BenchmarkFailed("one answer was over before another one began; let them decode more tokens")
    count = sum(begin < moment <= end for stream in streams for moment in stream.token_times)
    return count / (end - begin)


def serial_rate(streams: Sequence[Stream]) -> float:
    """Tokens/s of streams one after the other."""
    return sum(len(s.token_times) - 1 for s in streams) / sum(s.decode_seconds for s in streams)


def whole_seconds(streams: Sequence[Stream]) -> float:
    """From the first request to the last answer's end."""
    return max(s.ended_at for s in streams) - min(s.sent_at for s in streams)


def _while_all_decode(streams: Sequence[Stream]) -> tuple[float, float]:
    return max(s.token_times[0] for s in streams), min(s.token_times[-1] for s in streams)


def overall_rate(streams: Sequence[Stream]) -> float:
    """Total tokens/s from the first token to the last."""
    begin, end = min(s.token_times[0] for s in streams), max(s.token_times[-1] for s in streams)
    return (sum(len(s.token_times) for s in streams) - 1) / (end - begin)


def median_rate(streams: Sequence[Stream]) -> float:
    return statistics.median((len(s.token_times) - 1) / s.decode_seconds for s in streams)
