"""Whether an answer was as greedy as it was meant to be: what a quiet server that computes it again makes of it.

Keys and values are rounded to 4 bits, and a value at the edge of two steps falls to either side, depending on how the
prompt was cut into pieces and on who was in the batch. Now and then that decides a token: on the embedded model, fed
with random words, the likeliest token of one cut is more than 0.1 below the likeliest of another at one position of ten
thousand, and 0.9 below was seen (mlx-lm's own 4-bit cache does the same). So an answer that the prompt in one piece
does not explain is looked for behind other cuts. An answer from wrong memory is found behind none.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.soak.watch import Sample

NEARLY = 0.1  # how much less likely than the likeliest token a greedy choice may be
MAX_WAYS = 64  # of cutting a prompt
_MAX_CUTS = 6
_TOP = 20

Ask = Callable[[Mapping[str, Any]], Any]  # a request to /v1/completions, and its answer


@dataclass(frozen=True)
class Verdict:
    """What was found.

    Args:
        gap: how much likelier than the token that was chosen another one was, at worst, the prompt being computed in
            one piece; natural logarithm, 0 where none was.
        smallest_gap: the same behind the kindest of all cuts that were tried.
        ways: cuts that were tried, one piece included.
    """

    gap: float
    smallest_gap: float
    ways: int

    @property
    def right(self) -> bool:
        return self.smallest_gap <= NEARLY


class Judge:
    """Judges samples.

    Args:
        ask: a server with nothing else to do.
        seed: of the cuts.
        max_ways: to try before an answer is called wrong.
    """

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
        """The gap, and the text of each token of the answer."""
        body = {"prompt": [*sample.prompt_token_ids, *sample.token_ids], "max_tokens": 0, "echo": True, "logprobs": 1}
        logprobs = _logprobs(self._ask(body | sample.asked))
        first = len(sample.prompt_token_ids)
        texts, chosen = logprobs["tokens"][first:], logprobs["token_logprobs"][first:]
        tops = logprobs["top_logprobs"][first:]
        return max(max(top.values()) - one for one, top in zip(chosen, tops, strict=True)), texts

    def _in_pieces(self, sample: Sample, texts: Sequence[str], limit: float) -> float:
        """The gap behind a random cut, the answer's tokens one by one; `limit` or more as soon as it cannot be less."""
        self._num_salts += 1
        # It shares nothing with what was computed before.
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
