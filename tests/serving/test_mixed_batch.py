"""Every row of a mixed batch says what it says alone, whoever is beside it and wherever its cache comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import pytest

from agentcache.api.report import TokenLogprob, Update
from tests.conftest import ModelFolder
from tests.held_memory import held_bytes
from tests.marks import slow
from tests.serving import inside
from tests.serving.by_hand import ByHand, Receiver, by_hand
from tests.serving.conversation import greedy, make_ids
from tests.serving.simulation import cached_of

TOKENS = 6
# Prompts go before decoding, however long they take here: so the rows meet, on a busy machine too.
PROMPTS_FIRST = {"max_stall_ms": 1e6, "decode_share": 1e-6}


@dataclass(frozen=True)
class Talk:
    """A first turn, kept by an agent (None: forgotten), and a second one."""

    agent: str | None
    first: int
    second: int
    seed: int

    @property
    def ids(self) -> list[int]:
        return make_ids(self.first + self.second, seed=self.seed)


TALKS = [
    Talk(None, 0, 1, 1),  # cold, a single token
    Talk(None, 0, 300, 2),  # cold
    Talk("warm", 300, 20, 3),
    Talk("hot", 511, 1, 4),
    Talk("fork1", 290, 40, 5),  # two forks of one agent: they share a tail
    Talk("fork2", 290, 2, 5),
]


def prepare(hand: ByHand) -> None:
    """First turns; afterwards "warm" is on disk only, and "fork2" is a fork of "fork1"."""
    for talk in TALKS:
        if talk.agent is not None and talk.agent != "fork2":
            hand.run(hand.submit(talk.ids[: talk.first], greedy(0), talk.agent))
    saved: list[object] = []
    inside.fork_agent(hand.engine, "fork1", "fork2", saved.append)
    while not saved:
        hand.posted.get(timeout=30)()
    hand.evict("warm")


def logprobs_of(receiver: Receiver) -> list[TokenLogprob]:
    return [logprob for update in receiver.updates if isinstance(update, Update) for logprob in update.logprobs]


def check_logprobs(pairs: Sequence[tuple[TokenLogprob, TokenLogprob]]) -> None:
    """Equal within 1e-3, but for the few behind a value that the quantiser has rounded the other way."""
    errors = sorted(abs((mine.logprob or 0) - (theirs.logprob or 0)) for mine, theirs in pairs)
    assert errors[int(0.8 * len(errors))] < 1e-3
    assert errors[-1] < 0.05


def alone(model: Path, cache_dir: Path, talks: Sequence[Talk]) -> list[Receiver]:
    with by_hand(model, cache_dir) as hand:
        receivers = []
        for talk in talks:
            receivers.append(hand.submit(talk.ids, greedy(TOKENS)))
            hand.run(receivers[-1])
        return receivers


# One architecture per kind of cache or row: full keys; windows, with and without sinks; latents; partial rotary
# embeddings; experts.
@pytest.mark.parametrize(
    "architecture",
    ["gpt_oss", *map(slow, ("llama", "mistral_sliding", "gemma3_text", "deepseek_v2", "phi3_partial", "qwen3_moe"))],
)
def test_cold_warm_and_hot_rows_and_forks(architecture: str, model_folder: ModelFolder, tmp_path: Path) -> None:
    model = model_folder(architecture)
    expected = alone(model, tmp_path / "alone", TALKS)
    with by_hand(model, tmp_path / "together", **PROMPTS_FIRST) as hand:
        prepare(hand)
        receivers = [hand.submit(talk.ids, greedy(TOKENS), talk.agent) for talk in TALKS]
        hand.run(*receivers)
        stats = hand.engine.stats()
        assert stats.decode_rows >= 2 * stats.decode_steps
        assert receivers[2].generation.progress.restored_bytes > 0
        assert cached_of(receivers[5].generation).own > 256
    for receiver, reference in zip(receivers, expected, strict=True):
        assert receiver.token_ids == reference.token_ids
    mine = [logprob for receiver in receivers for logprob in logprobs_of(receiver)]
    theirs = [logprob for receiver in expected for logprob in logprobs_of(receiver)]
    check_logprobs(list(zip(mine, theirs, strict=True)))


@pytest.mark.parametrize("num_rows", [2, *map(slow, (1, 5, 16))])
def test_any_number_of_rows(num_rows: int, model: Path, tmp_path: Path) -> None:
    talks = [Talk(None, 0, 5 + 53 * number % 700, number) for number in range(num_rows)]
    expected = alone(model, tmp_path / "alone", talks)
    with by_hand(model, tmp_path / "together", **PROMPTS_FIRST) as hand:
        receivers = [hand.submit(talk.ids, greedy(20)) for talk in talks]
        hand.run(*receivers)
        stats = hand.engine.stats()
        assert max(1, num_rows // 3) * stats.decode_steps <= stats.decode_rows
    for receiver, reference in zip(receivers, expected, strict=True):
        assert receiver.token_ids[:TOKENS] == reference.token_ids


@pytest.mark.slow
def test_joining_and_leaving_moves_no_cache(model: Path, tmp_path: Path) -> None:
    """A newcomer behind thousands of tokens is read where it lies: a step writes its own tokens and copies no block.

    An arena that is copied shows in MLX's peak of memory; a block that is copied, in the runner's counter.
    """
    with by_hand(model, tmp_path) as hand:
        context = make_ids(6000)
        hand.run(hand.submit(context[:-1], greedy(0), "long"))
        arenas = sum(inside.array_bytes(hand.engine))
        largest = max(inside.array_bytes(hand.engine))
        talker = hand.submit(make_ids(20), greedy(60))
        while len(talker.token_ids) < 10:
            hand.step()
        copied = hand.engine.stats().copied_blocks
        before = peak_of_steps(hand, 5)
        newcomer = hand.submit(context, greedy(10), "long")
        while not newcomer.token_ids:
            hand.step()
        during = peak_of_steps(hand, 5)
        hand.run(newcomer)
        after = peak_of_steps(hand, 5)
        hand.run(talker)
    assert hand.engine.stats().copied_blocks == copied
    assert arenas > 4 << 20
    assert max(before, after) < largest / 2
    # The row's blocks of one layer are gathered to be read; its keys alone are an arena's worth for a single row.
    assert during < arenas


def peak_of_steps(hand: ByHand, count: int) -> int:
    """Bytes beyond what is there anyway, at the worst moment of some steps."""
    before = held_bytes()
    mx.reset_peak_memory()
    for _ in range(count):
        hand.step()
    return mx.get_peak_memory() - before
