"""Building the next step before the last one's tokens are known changes nothing but the time it takes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentcache.api.sampling import SamplingParams
from agentcache.blocks.block_tables import BlockTables
from agentcache.engine.batch import BatchRow
from agentcache.engine.running_request import RunningRequest
from agentcache.llm import LLM, Completion
from agentcache.models.sampler import Sampler
from tests.conftest import ModelFolder
from tests.marks import slow
from tests.serving import inside
from tests.serving.conversation import BLOCK_BYTES, TokenTalk, greedy, make_ids, open_llm, outcome
from tests.serving.simulation import make_generation, take_plan


def test_a_penalty_counts_each_token_once() -> None:
    """The step itself adds the last token, which may not be known when the row is made."""
    generation = make_generation(5, wanted=9)
    generation.progress.sampler = Sampler(SamplingParams(frequency_penalty=1.0))
    take_plan(generation, BlockTables("root", None, array("I", generation.token_ids), [], []))
    for token, counts in ((7, {}), (7, {7: 1}), (8, {7: 2}), (7, {7: 2, 8: 1})):
        generation.token_ids.append(token)
        row = BatchRow.of(generation, 1, 1).sampler_row(len(generation.token_ids))
        assert dict(row.counts) == counts


@contextmanager
def waiting_for_every_step(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No row goes on from a token that is not known yet."""
    with monkeypatch.context() as patch:
        patch.setattr(
            RunningRequest, "can_decode", property(lambda g: not g.progress.in_flight and g.num_to_launch == 1)
        )
        yield


def files_of(cache_dir: Path) -> dict[str, bytes]:
    """Every block file, by name: the names are content addresses."""
    return {path.name: path.read_bytes() for path in (cache_dir / "blocks").rglob("*.safetensors")}


def ends_in_every_way(llm: LLM, eos: int, lengths: Sequence[int]) -> list[Completion]:
    """Turns that end by length, by a stop string, by the end token, around a block's end, and go on after each."""
    done = []
    for length in lengths:
        ids = make_ids(length, seed=length)
        done.append(llm.generate(ids, greedy(12), agent=f"length{length}"))
        stop = done[-1].text[-3:-1]
        done.append(llm.generate(ids, greedy(30, stop=(stop,)), agent=f"stop{length}"))
        for seed in range(3):
            likely_end = greedy(40, temperature=1.0, seed=seed, ignore_eos=False, logit_bias={eos: 3.0})
            done.append(llm.generate(ids, likely_end, agent=f"end{length}.{seed}"))
        context = [*done[-1].prompt_token_ids, *done[-1].token_ids]
        done.append(llm.generate([*context, *make_ids(9)], greedy(8), agent=f"end{length}.2"))
    return done


@pytest.mark.parametrize("lengths", [(245, 250), slow((240, 245, 250, 500))], ids=str)
def test_the_same_tokens_logprobs_and_files(
    lengths: Sequence[int], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_llm(model, tmp_path / "ahead") as llm:
        eos = next(iter(inside.tokenizer(inside.engine_of(llm)).eos_ids))
        ahead = ends_in_every_way(llm, eos, lengths)
        computed_ahead = llm.stats().computed_tokens
    with waiting_for_every_step(monkeypatch), open_llm(model, tmp_path / "waiting") as llm:
        waiting = ends_in_every_way(llm, eos, lengths)
        computed_waiting = llm.stats().computed_tokens
    assert {completion.finish_reason for completion in ahead} == {"length", "stop"}
    assert [outcome(completion) for completion in ahead] == [outcome(completion) for completion in waiting]
    assert [completion.text for completion in ahead] == [completion.text for completion in waiting]
    assert files_of(tmp_path / "ahead") == files_of(tmp_path / "waiting")
    # One token too many for each that ended before its length: that is what lookahead costs, and a sign that it is on.
    stopped = sum(completion.finish_reason == "stop" and bool(completion.token_ids) for completion in ahead)
    assert 0 < computed_ahead - computed_waiting <= stopped


@pytest.mark.parametrize("architecture", ["gemma3_text", slow("gpt_oss"), slow("deepseek_v2")])
def test_the_same_with_windows_and_latents(
    architecture: str, model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(cache_dir: Path) -> list[list[tuple[int, float | None]]]:
        with open_llm(model_folder(architecture), cache_dir) as llm:
            talk = TokenTalk(max_tokens=8)  # from the end of a block into the next
            return [outcome(talk.turn(llm, length)) for length in (260, 516, 772)]

    ahead = run(tmp_path / "ahead")
    with waiting_for_every_step(monkeypatch):
        assert run(tmp_path / "waiting") == ahead
    assert files_of(tmp_path / "ahead") == files_of(tmp_path / "waiting")


@pytest.mark.slow
def test_a_token_that_is_penalised_before_it_is_known(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = [
        greedy(40, repetition_penalty=1.8),
        greedy(40, frequency_penalty=0.3, presence_penalty=0.2),
        greedy(40, temperature=0.9, seed=3, frequency_penalty=-0.3, min_tokens=30, ignore_eos=False),
        greedy(40, temperature=0.9, top_p=0.8, seed=3, repetition_penalty=1.3, logit_bias={20: 2.0}),
        greedy(40, temperature=1.2, top_k=30, min_p=0.01, seed=4),
    ]

    def run(cache_dir: Path) -> list[tuple[int, ...]]:
        with open_llm(model, cache_dir) as llm:
            return [llm.generate(make_ids(30), each).token_ids for each in sampling]

    ahead = run(tmp_path / "ahead")
    with waiting_for_every_step(monkeypatch):
        assert run(tmp_path / "waiting") == ahead


SAMPLING = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2},
    {"temperature": 1.0, "top_k": 20, "logprobs": 3},
    {"repetition_penalty": 1.5},
    {"frequency_penalty": 0.8},
    {"temperature": 0.8, "presence_penalty": 1.5},
    {"temperature": 1.3, "min_p": 0.02, "logit_bias": {30: 2.0}},
]


@pytest.mark.slow
def test_rows_that_come_and_go(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch whose rows begin and end at different steps: each says what it says alone, one step at a time."""
    lengths = [3, 30, 7, 18, 1, 25, 11, 40, 5, 12]

    def one(llm: LLM, number: int) -> tuple[int, ...]:
        sampling = greedy(lengths[number], seed=number, **SAMPLING[number % len(SAMPLING)])
        return llm.generate(make_ids(20 + 40 * number, seed=number), sampling).token_ids

    with waiting_for_every_step(monkeypatch), open_llm(model, tmp_path / "alone") as llm:
        alone = [one(llm, number) for number in range(len(lengths))]
    with open_llm(model, tmp_path / "together", max_concurrent_requests=6) as llm:
        with ThreadPoolExecutor(len(lengths)) as pool:
            together = list(pool.map(lambda number: one(llm, number), range(len(lengths))))
        assert llm.stats().decode_rows > llm.stats().decode_steps
    assert together == alone
    assert [len(tokens) for tokens in together] == lengths


@pytest.mark.slow
def test_the_last_token_that_fits(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the RAM budget ends, the token under way still counts."""

    def run(cache_dir: Path) -> Completion:
        with open_llm(model, cache_dir, ram_budget=4 * BLOCK_BYTES) as llm:
            return llm.generate(make_ids(1000), greedy(100), agent="alice")

    ahead = run(tmp_path / "ahead")
    with waiting_for_every_step(monkeypatch):
        waiting = run(tmp_path / "waiting")
    assert len(ahead.token_ids) == 24
    assert outcome(ahead) == outcome(waiting)
    assert files_of(tmp_path / "ahead") == files_of(tmp_path / "waiting")
