"""Rows of base, LoRA of several ranks and targets, and activated LoRA beside each other, in chunks of any size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path

import pytest

from agentcache.api.policy import Policy
from agentcache.api.request import Request, TokenPrompt
from agentcache.llm import LLM, Completion
from tests.conftest import ModelFolder
from tests.marks import slow
from tests.serving import inside
from tests.serving.adapter_cases import (
    INVOKE_A,
    INVOKE_B,
    ask,
    at_once,
    cached_bytes,
    check_differs,
    check_equal,
    cold,
    make_folders,
    open_adapters,
    preempt_often,
    same_bytes,
)
from tests.serving.conversation import greedy, make_ids

TOKENS = 12


@dataclass(frozen=True)
class Case:
    """A request of a mixed batch."""

    adapter: str | None
    ids: list[int]
    policy: Policy | None = None


CASES = [
    Case(None, make_ids(30, seed=1)),
    Case("plain", make_ids(310, seed=2)),
    Case("mlp", make_ids(1, seed=3)),
    Case("upper", make_ids(255, seed=4)),
    Case("a", make_ids(300, seed=5) + INVOKE_A + make_ids(9, seed=5)),
    Case("b", make_ids(20, seed=6) + INVOKE_B),
    Case("plain", make_ids(77, seed=7), Policy.PREFILL_SHARE),
    Case(None, make_ids(300, seed=5) + INVOKE_A + make_ids(9, seed=5)),
]


RESUMED = (0, 5)  # of those with an adapter: plain, shared prefill; the others in `make test-all`


@pytest.fixture(scope="module")
def qwen3(model_folder: ModelFolder) -> Path:
    """Half as deep as elsewhere: rows meet in every layer alike."""
    return model_folder("qwen3", num_hidden_layers=4)


@pytest.fixture(scope="module")
def folders(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_folders(tmp_path_factory.mktemp("adapters"), qwen3)


@pytest.fixture
def llm(qwen3: Path, folders: dict[str, Path], tmp_path: Path) -> Iterator[LLM]:
    # Prompts first, however long they take here: so the rows meet on a busy machine too.
    with open_adapters(qwen3, tmp_path / "cache", folders, max_stall_ms=1e6, decode_share=1e-6) as llm:
        inside.let_prompts_go_first(inside.engine_of(llm))
        yield llm


def run_together(llm: LLM, cases: list[Case], salt: str) -> list[Completion]:
    requests = [
        Request(
            f"{salt}{i}", TokenPrompt(case.ids), greedy(TOKENS), salt=salt, adapter=case.adapter, policy=case.policy
        )
        for i, case in enumerate(cases)
    ]
    inside.hold_until(llm, len(requests))
    return at_once(llm, requests)


def test_each_row_equals_the_same_alone(llm: LLM) -> None:
    alone = [ask(llm, case.ids, case.adapter, TOKENS, policy=case.policy, salt="alone") for case in CASES]
    before = llm.stats()
    together = run_together(llm, CASES, "together")
    after = llm.stats()
    steps, rows = after.decode_steps - before.decode_steps, after.decode_rows - before.decode_rows
    assert rows > 3 * steps, "they were in one batch"
    for mine, theirs in zip(together, alone, strict=True):
        check_equal(mine, theirs)
    base = [ask(llm, case.ids, tokens=TOKENS, salt="base") for case in CASES]
    for case, mine, theirs in zip(CASES, together, base, strict=True):
        if case.adapter is not None:
            check_differs(mine, theirs)


def test_base_is_bit_equal_after_any_traffic(llm: LLM) -> None:
    before = ask(llm, CASES[0].ids, tokens=TOKENS, salt="before")
    for salt in ("one", "two"):
        together = run_together(llm, CASES, salt)
        check_equal(together[0], before)
    assert ask(llm, CASES[0].ids, tokens=TOKENS, salt="after").logprobs == before.logprobs


@pytest.mark.parametrize(
    "case",
    [each if index in RESUMED else slow(each) for index, each in enumerate(CASES[1:7])],
    ids=lambda case: f"{case.adapter}-{case.policy}",
)
def test_preempted_and_resumed(case: Case, llm: LLM) -> None:
    """The same tokens; the invocation is not looked for again, though it may have been generated meanwhile."""
    expected = ask(llm, case.ids, case.adapter, TOKENS, policy=case.policy, salt="expected")
    preempt_often(llm, every=4)
    check_equal(ask(llm, case.ids, case.adapter, TOKENS, policy=case.policy, salt="again"), expected)
    assert llm.stats().preemptions == 2


@pytest.mark.slow
def test_a_generated_invocation_and_a_preemption(llm: LLM) -> None:
    """Resumed behind tokens that spell its invocation, an adapter still acts from where it did."""
    ids = make_ids(30) + INVOKE_A + make_ids(20, seed=3)
    sampling = greedy(9, logit_bias=dict.fromkeys(INVOKE_A, 100.0), repetition_penalty=1.5)
    expected = llm.generate(ids, sampling, adapter="a", salt="expected")
    preempt_often(llm, every=2)
    check_equal(llm.generate(ids, sampling, adapter="a", salt="again"), expected)
    assert llm.stats().preemptions == 4


@pytest.mark.parametrize(
    ("name", "chunk"), [("a", 7), *starmap(slow, [("a", 1), ("a", 256), ("a", 10_000), ("plain", 7)])]
)
def test_chunks_of_any_size(name: str, chunk: int, qwen3: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    ids = make_ids(258) + INVOKE_A + make_ids(30, seed=2)
    with open_adapters(qwen3, tmp_path / "whole", folders) as llm:
        expected = ask(llm, ids, name)
    with open_adapters(qwen3, tmp_path / "cache", folders) as llm:
        ask(llm, ids[:230], None if name == "a" else name, tokens=0)  # before it begins: who computes them
        inside.set_chunk(inside.engine_of(llm), chunk)
        said = ask(llm, ids, name)
        assert said.report.cached_tokens.shared == 230
        check_equal(said, expected)


@pytest.mark.parametrize(
    "architecture", [*map(slow, ["mistral_sliding", "gemma3_text", "llama_bias", "phi3"]), "gpt_oss"]
)
def test_other_architectures(architecture: str, model_folder: ModelFolder, tmp_path: Path) -> None:
    """Sliding windows, biases, fused projections, sinks."""
    model = model_folder(architecture)
    folders = make_folders(tmp_path, model, ("a", "plain"))
    with open_adapters(model, tmp_path / "cache", folders) as llm:
        base = ask(llm, make_ids(300), tokens=1)
        activated = ask(llm, make_ids(300) + INVOKE_A, "a")
        assert activated.report.cached_tokens.shared == 300
        check_equal(activated, cold(llm, activated))
        check_differs(activated, ask(llm, activated.prompt_token_ids))
        plain = ask(llm, make_ids(300), "plain")
        again = ask(llm, make_ids(300), "plain")
        assert again.report.computed_tokens == 1
        check_equal(again, plain)
        last = ask(llm, make_ids(300) + INVOKE_A)
        assert last.report.cached_tokens.shared >= 300
        assert base.report.computed_tokens == 300


@pytest.mark.parametrize("chunk", [7, 256])
def test_what_comes_before_the_invocation_is_bases_byte_for_byte(
    chunk: int, qwen3: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    """For adapters of everything, o_proj and the MLP too, wherever chunks straddle the start."""
    ids, start = make_ids(300) + INVOKE_A + make_ids(20, seed=1), 300
    found = []
    for name in (None, "a"):
        with open_adapters(qwen3, tmp_path / str(name), folders) as llm:
            inside.set_chunk(inside.engine_of(llm), chunk)
            options = {} if name is None else {"policy": "activated", "invocation_start": start}
            ask(llm, ids, name, tokens=1, **options)
            found.append(cached_bytes(llm, ids, start))
    assert sum(array.nbytes for array in found[0]) > 150_000
    assert same_bytes(*found)


@pytest.mark.parametrize("name", ["a", "plain"])
def test_after_a_restart(name: str, qwen3: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    """From disk as from RAM: by digest, so under another name too."""
    ids = make_ids(300) + INVOKE_A + make_ids(250, seed=1)
    with open_adapters(qwen3, tmp_path / "cache", folders) as llm:
        first = ask(llm, ids, name, agent="alice")
    with open_adapters(qwen3, tmp_path / "cache", {"renamed": folders[name]}) as llm:
        longer = [*ids, *first.token_ids, 77]
        second = ask(llm, longer, "renamed", agent="alice")
        assert second.report.cached_tokens.own == len(longer) - 2
        assert second.report.restored_bytes > 0
        check_equal(second, cold(llm, second))
