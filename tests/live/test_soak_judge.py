"""The judge of a soak: right answers pass, answers from wrong memory do not, however the prompt is cut."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import pytest

from agentcache.server_process import ServerProcess
from benchmarks.soak.clients import words
from benchmarks.soak.judge import NEARLY, Ask, Judge
from benchmarks.soak.watch import Sample

pytestmark = pytest.mark.slow

ANSWER_TOKENS = 6


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The embedded model: a trained one is sure of its words, so that a wrong one shows."""
    folder = tmp_path_factory.mktemp("judge")
    with ServerProcess(folder / "cache", folder / "log", model=None) as server:
        yield server


@pytest.fixture
def ask(server: ServerProcess) -> Ask:
    return partial(server.client.request, "POST", "/v1/completions")


def answered(server: ServerProcess, text: str) -> Sample:
    completion = server.client.complete(text, max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True)
    return Sample("/v1/completions", completion.prompt_token_ids, completion.token_ids)


def samples(server: ServerProcess, count: int) -> list[Sample]:
    rng = random.Random(7)
    return [answered(server, words(rng, 80)) for _ in range(count)]


def test_what_the_server_said_is_right_at_once(server: ServerProcess, ask: Ask) -> None:
    for sample in samples(server, 4):
        verdict = Judge(ask).judge(sample)
        assert verdict.right and verdict.ways == 1 and verdict.gap == verdict.smallest_gap < NEARLY


def test_answers_from_wrong_memory_are_wrong_behind_all_cuts(server: ServerProcess, ask: Ask) -> None:
    """Half of the context is another agent's: what comes of it are likely words, but not here."""
    said, found = samples(server, 7), 0
    for mine, other in zip(said, said[1:], strict=False):
        half = len(mine.prompt_token_ids) // 2
        mixed = (*other.prompt_token_ids[:half], *mine.prompt_token_ids[half:])
        completion = server.client.complete(mixed, max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True)
        if completion.token_ids != mine.token_ids:
            verdict = Judge(ask, max_ways=4).judge(Sample("", mine.prompt_token_ids, completion.token_ids))
            assert not verdict.right and verdict.ways == 4
            found += 1
    assert found >= 3


def test_one_wrong_token_is_found(server: ServerProcess, ask: Ask) -> None:
    [sample] = samples(server, 1)
    for place in range(ANSWER_TOKENS):
        tokens = list(sample.token_ids)
        tokens[place] = (tokens[place] + 1) % 1000
        verdict = Judge(ask, max_ways=3).judge(Sample("", sample.prompt_token_ids, tuple(tokens)))
        assert not verdict.right


class Torn:
    """A server to which token `b` is much less likely than `a`, but for one way of cutting in `of`."""

    def __init__(self, of: int) -> None:
        self._of = of
        self.salts: set[str] = set()

    def __call__(self, body: Mapping[str, Any]) -> Any:
        if body.get("echo"):
            logprobs = {"tokens": ["x", "y", "b"], "token_logprobs": [None, -1.0, -1.4]}
            return {"choices": [{"logprobs": logprobs | {"top_logprobs": [None, {"y": -1.0}, {"a": -0.9, "b": -1.4}]}}]}
        self.salts.add(body["agentcache"]["salt"])
        kind = len(self.salts) == self._of
        return {"choices": [{"logprobs": {"top_logprobs": [{"a": -1.0, "b": -1.05 if kind else -1.4}]}}]}


def test_what_another_cut_explains_is_right() -> None:
    torn = Torn(of=5)
    verdict = Judge(torn).judge(Sample("", (1, 2), (3,)))
    assert verdict.right and verdict.ways == 6 and len(torn.salts) == 5
    assert (verdict.gap, verdict.smallest_gap) == (pytest.approx(0.5), pytest.approx(0.05))


def test_the_search_ends() -> None:
    verdict = Judge(Torn(of=5), max_ways=5).judge(Sample("", (1, 2), (3,)))
    assert not verdict.right and verdict.ways == 5 and verdict.smallest_gap == pytest.approx(0.4)
