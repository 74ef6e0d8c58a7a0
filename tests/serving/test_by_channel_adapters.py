"""Adapters over `--kv 4`: hot answers equal cold ones for any start in a block."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentcache.llm import LLM, Completion
from tests.adapters_factory import ATTENTION, make_adapter
from tests.conftest import ModelFolder
from tests.marks import slow
from tests.serving.adapter_cases import (
    INVOKE_A,
    INVOKE_B,
    all_ids,
    ask,
    check_differs,
    check_equal,
    make_folders,
    open_adapters,
)
from tests.serving.adapter_cases import cold as cold_again
from tests.serving.conversation import check_idle, greedy, logprob_errors, make_ids, outcome
from tests.serving.residual_cases import UNLIMITED, residual_folders
from tests.serving.test_decoders import fine_tune

SETTINGS: dict[str, Any] = {"kv": "4", "prefill_chunk": 300}
# Of log probabilities: an adapter's row reads its own block in 4 bits where base's was cached.
SEALED = 0.15


@contextmanager
def by_channel(model: Path, cache_dir: Path, folders: dict[str, Path], **settings: Any) -> Iterator[LLM]:
    with open_adapters(model, cache_dir, folders, **SETTINGS | settings) as llm:
        yield llm
        check_idle(llm)


def check_modes(
    start: Callable[[str], AbstractContextManager[LLM]],
    say: Callable[[LLM, int, list[int]], Completion],
    ids: list[int],
    *,
    turns: int,
    added: int,
) -> None:
    """A talk of alice is the same to the last bit if she is evicted or the engine restarted before each turn."""

    def talk(how: str) -> list[Completion]:
        said, prompt = list[Completion](), ids
        with ExitStack() as stack:
            llm = stack.enter_context(start(how))
            for turn in range(turns):
                if how == "evicted" and turn:
                    llm.evict("alice")
                if how == "restarted" and turn:
                    stack.close()
                    llm = stack.enter_context(start(how))
                said.append(say(llm, turn, prompt))
                prompt = [*all_ids(said[-1]), *make_ids(added, seed=turn)]
        return said

    hot = talk("hot")
    for how in ("evicted", "restarted"):
        for turn, (mine, theirs) in enumerate(zip(talk(how), hot, strict=True)):
            assert mine.report.computed_tokens == theirs.report.computed_tokens, (how, turn)
            assert outcome(mine) == outcome(theirs), (how, turn)


@pytest.fixture(scope="module")
def small(model_folder: ModelFolder) -> Path:
    return model_folder("qwen3", num_hidden_layers=4)


@pytest.fixture(scope="module")
def four(small: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_folders(tmp_path_factory.mktemp("four"), small)


@pytest.mark.parametrize(
    ("name", "start"),
    [("a", 300), ("a", 512), slow("upper", 255), slow("upper", 511), slow("plain", 511), slow("plain", 700)],
)
def test_base_then_an_adapter_then_base(
    name: str, start: int, small: Path, four: dict[str, Path], tmp_path: Path
) -> None:
    with by_channel(small, tmp_path, four) as llm:
        base = ask(llm, make_ids(start - 4))
        adapted = ask(llm, [*all_ids(base), *INVOKE_A, *make_ids(5, seed=1)], name, tokens=20)
        check_equal(adapted, cold_again(llm, adapted))
        again = ask(llm, [*all_ids(adapted), *make_ids(250, seed=2), *INVOKE_A], name)
        check_equal(again, cold_again(llm, again))
        last = ask(llm, [*all_ids(base), *make_ids(20, seed=9)])
        assert last.report.cached_tokens.shared >= start - 1 - start % 256
        check_equal(last, cold_again(llm, last))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a", "b", "upper", "plain"])
def test_hot_evicted_and_restarted_are_the_same(name: str, small: Path, four: dict[str, Path], tmp_path: Path) -> None:
    def say(llm: LLM, turn: int, ids: list[int]) -> Completion:
        adapter = None if turn == 1 and name in ("a", "b") else name
        invocation = (INVOKE_B if name == "b" else INVOKE_A) if adapter else ()
        return ask(llm, [*ids, *invocation], adapter, 12, agent="alice")

    check_modes(lambda how: by_channel(small, tmp_path / how, four), say, make_ids(490), turns=3, added=200)


@pytest.mark.slow
@pytest.mark.parametrize("length", [300, 511, 512, 513])
def test_a_decoder_equal_to_base_equals_base(length: int, small: Path, tmp_path: Path) -> None:
    folders = {"same": fine_tune(small, tmp_path / "same", 1, strength=0.0)}
    with by_channel(small, tmp_path / "cache", folders) as llm:
        same = ask(llm, make_ids(length), "same", tokens=8)
        assert same.report.policy == "prefill-share"
        plain = ask(llm, make_ids(length), tokens=8)
        check_equal(same, plain)
        check_equal(ask(llm, make_ids(length), "same", tokens=8, salt="alone"), plain)


# -- residuals ---------------------------------------------------------------------------------------------------------


Make = Callable[..., dict[str, Path]]


def family(root: Path, model: Path, names: tuple[str, ...], **options: Any) -> dict[str, Path]:
    given = {"rank": 3, "targets": ATTENTION, "family": 77, "strength": 0.3, **options}
    return {name: make_adapter(root / name, model, seed=i, **given) for i, name in enumerate(names)}


@pytest.mark.parametrize(("policy", "make"), [("residual", residual_folders), slow("residual-shared-a", family)])
def test_an_adapter_that_adds_nothing_says_what_base_says(
    policy: str, make: Make, model_folder: ModelFolder, tmp_path: Path
) -> None:
    """Its row reads its own block as base's row does, where base computes it in the same request."""
    model = model_folder("qwen3", num_hidden_layers=2)
    folders = make(tmp_path / "adapters", model, ("nil", "none"), strength=0.0)
    with by_channel(model, tmp_path / "cache", folders, max_divergence=UNLIMITED) as llm:
        ids = make_ids(600)
        for turn in range(3):
            shared = ask(llm, ids, "nil", 8, policy=policy)
            assert (shared.report.policy, shared.report.stepped_down) == (policy, None)
            assert shared.report.divergence is None or shared.report.divergence < 1e-3
            plain = ask(llm, ids, None, 8, salt=f"alone {turn}")  # else from blocks that are sealed by now
            check_equal(shared, plain)
            ids = [*all_ids(shared), *make_ids(204 if turn else 200, seed=turn)]  # then across a border


def test_over_cached_blocks_an_adapter_reads_their_sealed_form(model_folder: ModelFolder, tmp_path: Path) -> None:
    model = model_folder("qwen3", num_hidden_layers=2)
    folders = residual_folders(tmp_path / "adapters", model, ("nil",), strength=0.0)
    with by_channel(model, tmp_path / "cache", folders, max_divergence=UNLIMITED) as llm:
        ask(llm, make_ids(900), None, 1)
        warm = ask(llm, make_ids(900), "nil", 1, policy="residual")
        assert warm.report.base_computed_tokens == 1
        assert warm.report.divergence is not None and 1e-3 < warm.report.divergence < SEALED


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "make"), [("residual", residual_folders), ("residual-shared-a", family)])
def test_residual_answers_are_the_same_hot_evicted_and_restarted(
    policy: str, make: Make, model_folder: ModelFolder, tmp_path: Path
) -> None:
    """After its own turns and after base's, within blocks and across borders."""
    model = model_folder("qwen3", num_hidden_layers=2)
    folders = make(tmp_path / "adapters", model, ("ann",))

    def start(how: str) -> AbstractContextManager[LLM]:
        return by_channel(model, tmp_path / how, folders, max_divergence=UNLIMITED)

    def say(llm: LLM, turn: int, ids: list[int]) -> Completion:
        adapter = None if turn == 2 else "ann"
        return ask(llm, ids, adapter, 12, agent="alice", policy=policy if adapter else None)

    check_modes(start, say, make_ids(700), turns=4, added=300)


def cold(llm: LLM, like: Completion) -> Completion:
    ids, report = list(like.prompt_token_ids), like.report
    sampling, salt = greedy(len(like.token_ids), logprobs=2), os.urandom(8).hex()
    again = llm.generate(ids, sampling, adapter=report.adapter, policy=report.policy, salt=salt)
    assert again.report.base_computed_tokens == len(ids)
    return again


@pytest.mark.parametrize(("policy", "make"), [("residual", residual_folders), slow("residual-shared-a", family)])
def test_residual_answers_are_those_of_cold_requests(
    policy: str, make: Make, model_folder: ModelFolder, tmp_path: Path
) -> None:
    """In the first turn, and behind base's blocks in RAM and on disk."""
    model = model_folder("qwen3", num_hidden_layers=2)
    folders = make(tmp_path / "adapters", model, ("ann", "bob"))
    options = {"policy": policy, "agent": "alice"}
    with by_channel(model, tmp_path / "cache", folders, max_divergence=UNLIMITED) as llm:
        ids = make_ids(300)
        for turn in range(3):
            said = ask(llm, ids, "ann", 6, **options)
            assert max(logprob_errors(said, cold(llm, said))) < SEALED, turn
            check_differs(said, ask(llm, ids, "bob", 6, policy=policy))
            ids = [*all_ids(said), *make_ids(204, seed=turn)]
            if turn:
                llm.evict("alice")
        last = ask(llm, ids, "ann", 6, **options)
    with by_channel(model, tmp_path / "cache", folders, max_divergence=UNLIMITED) as llm:
        going_on = [*all_ids(last), *make_ids(30, seed=9)]
        said = ask(llm, going_on, "ann", 6, **options)
        assert said.report.computed_tokens < 60
        assert max(logprob_errors(said, cold(llm, said))) < SEALED


@pytest.mark.slow
def test_what_differs_is_measured_alike(model_folder: ModelFolder, tmp_path: Path) -> None:
    """As over 8 bits."""
    model = model_folder("qwen3", num_hidden_layers=2)
    folders = residual_folders(tmp_path / "adapters", model, ("ann",))
    found = {}
    for kv in ("8", "4"):
        with by_channel(model, tmp_path / kv, folders, max_divergence=UNLIMITED, kv=kv) as llm:
            found[kv] = llm.generate(make_ids(600), greedy(1), adapter="ann", policy="residual").report.divergence
    assert found["4"] == pytest.approx(found["8"], rel=0.1)
