"""Check sampled greedy answers by computing them again on a quiet server.

4-bit rounding depends on how a prompt was chunked and batched, which occasionally changes a token, also in mlx-lm. So
other cuts are tried if the prompt in one piece does not explain an answer. An answer from wrong memory fails with all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.soak.watch import Sample

NEARLY = 0.1  # allowed gap in log probability to the likeliest token
MAX_WAYS = 64  # to cut a prompt
_MAX_CUTS = 6
_TOP = 20

Ask = Callable[[Mapping[str, Any]], Any]  # sends a body to /v1/completions


@dataclass(frozen=True)
class Verdict:
    """Verdict on one answer.

    Args:
        gap: largest log probability gap of a chosen token to the likeliest one, with the prompt in one piece.
        smallest_gap: the same for the best of all cuts.
        ways: cuts tried, one piece included.
    """

    gap: float
    smallest_gap: float
    ways: int

    @property
    def right(self) -> bool:
        return self.smallest_gap <= NEARLY


class Judge:
    """Needs a server without other load; tries `max_ways` cuts before it calls an answer wrong."""

    def __init__(self, ask: Ask, seed: int = 0, max_ways: int = MAX_WAYS) -> None:
        self._ask = ask
        self._rng = random.Random(seed)
        self._max_ways = max_ways
        self._num_salts = 0

    def judge(self, sample: Sample) -> Verdict:
        gap, texts = self._in_one_piece(sample)
        smallest, ways = gap, 1
        while smallest > NEARLY and ways < self._max_ways:
            smallest = min(smallest, self._in_pieces(sample, texts, limit=smallest))
            ways += 1
        return Verdict(gap, smallest, ways)

    def _in_one_piece(self, sample: Sample) -> tuple[float, Sequence[str]]:
        """Return the gap, and the text of each answer token."""
        body = {"prompt": [*sample.prompt_token_ids, *sample.token_ids], "max_tokens": 0, "echo": True, "logprobs": 1}
        logprobs = _logprobs(self._ask(body | sample.asked))
        first = len(sample.prompt_token_ids)
        texts, chosen = logprobs["tokens"][first:], logprobs["token_logprobs"][first:]
        tops = logprobs["top_logprobs"][first:]
        return max(max(top.values()) - one for one, top in zip(chosen, tops, strict=True)), texts

    def _in_pieces(self, sample: Sample, texts: Sequence[str], limit: float) -> float:
        """Compute after a random cut, token by token; stop once the gap reaches `limit`."""
        self._num_salts += 1
        # A new salt prevents reuse of cached blocks.
        cache = {"agentcache": {"salt": f"cut {self._num_salts}"}, **sample.asked}
        ids = [*sample.prompt_token_ids, *sample.token_ids]
        for cut in self._cuts(len(sample.prompt_token_ids)):
            self._ask({"prompt": ids[:cut], "max_tokens": 0, **cache})
        gap = 0.0
        for place, text in enumerate(texts, start=len(sample.prompt_token_ids)):
            sampling = {"max_tokens": 1, "temperature": 0, "ignore_eos": True, "logprobs": _TOP}
            [top] = _logprobs(self._ask({"prompt": ids[:place], **sampling, **cache}))["top_logprobs"]
            gap = max(gap, max(top.values()) - top.get(text, float("-inf")))
            if gap >= limit:
                break
        return gap

    def _cuts(self, num_tokens: int) -> list[int]:
        places = range(1, num_tokens)
        return sorted(self._rng.sample(places, min(len(places), self._rng.randint(1, _MAX_CUTS))))


def _logprobs(answer: Any) -> Any:
    return answer["choices"][0]["logprobs"]
