"""Adapters whose As are equal keep one residual for all of them, which base makes: who comes first changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from agentcache.api.policy import Policy
from agentcache.api.request import Request, TokenPrompt
from agentcache.errors import InvalidRequest
from agentcache.llm import LLM, Completion
from agentcache.settings.tables import AdapterFolder
from tests.adapters_factory import ATTENTION, MLP, make_adapter
from tests.conftest import ModelFolder
from tests.serving import inside
from tests.serving.adapter_cases import all_ids, ask, at_once, check_differs, preempt_often
from tests.serving.conversation import check_idle, check_same, greedy, make_ids
from tests.serving.residual_cases import block_files, computed, forget, open_residual

PROMPT = make_ids(700)
MEMBERS = ("ann", "bob", "cyd")
SHARED = "residual-shared-a"


def family(root: Path, model: Path, names: Sequence[str] = MEMBERS, **options: object) -> dict[str, Path]:
    """Adapters with the same As and Bs of their own, strong enough that nobody could take one for another."""
    matrices = {"rank": 3, "strength": 0.3, "targets": ATTENTION, "family": 77} | options
    return {name: make_adapter(root / name, model, seed=i, **matrices) for i, name in enumerate(names)}


def say(llm: LLM, ids: Sequence[int], adapter: str, tokens: int = 4, **options: object) -> Completion:
    said = ask(llm, ids, adapter, tokens, policy=SHARED, **options)
    assert (said.report.policy, said.report.stepped_down) == (SHARED, None)
    return said


@pytest.fixture(scope="module")
def small(model_folder: ModelFolder) -> Path:
    """Keys are normed, and two query heads read one of them."""
    return model_folder("qwen3", num_hidden_layers=2)


@pytest.fixture(scope="module")
def three(small: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return family(tmp_path_factory.mktemp("three"), small)


@pytest.fixture
def llm(small: Path, three: dict[str, Path], tmp_path: Path) -> Iterator[LLM]:
    with open_residual(small, tmp_path / "cache", three) as llm:
        yield llm


def residual_bytes(llm: LLM) -> int:
    return llm.stats().ram_used["residual"] or 0


# -- what is computed ---------------------------------------------------------------------------------------------


def test_behind_one_members_prompt_the_others_compute_a_token_and_keep_nothing(llm: LLM) -> None:
    first = say(llm, PROMPT, "ann", 1)
    assert computed(first) == (1, 700), "base reads the prompt, and the adapter its last token"
    held = residual_bytes(llm)
    assert held > 0
    others = [say(llm, PROMPT, name, 1) for name in MEMBERS[1:]]
    for other in others:
        assert computed(other) == (1, 1)
        assert (other.report.cached_tokens.shared, other.report.cached_tokens.residual) == (699, 699)
        check_differs(other, first)
    assert residual_bytes(llm) == held
    check_same(say(llm, PROMPT, "ann", 1), first)
    assert computed(ask(llm, PROMPT)) == (1, 1), "base goes on from what it has computed for them"
    for name in MEMBERS:
        llm.unload_adapter(name)
    assert residual_bytes(llm) == inside.residual_arrays(inside.engine_of(llm)) == 0, "they go with the last member"


@pytest.mark.slow
def test_all_orders_of_three_members_give_the_same_answers(small: Path, three: dict[str, Path], tmp_path: Path) -> None:
    answers: dict[str, Completion] = {}
    for number, order in enumerate(permutations(MEMBERS)):
        with open_residual(small, tmp_path / f"cache{number}", three) as llm:
            for name in order:
                said = say(llm, PROMPT[:300], name, 6)
                assert said.token_ids == answers.setdefault(name, said).token_ids
                assert said.logprobs == answers[name].logprobs


@pytest.mark.slow
def test_partly_cached_prompts(llm: LLM) -> None:
    """Base computes again what the family lacks, and writes nothing that base has."""
    whole = say(llm, PROMPT, "ann", salt="whole")
    for of_base, of_family in ((300, 0), (699, 256), (0, 300), (256, 600)):
        salt = f"{of_base} {of_family}"
        if of_family:
            ask(llm, PROMPT[:of_family], "bob", 0, policy=SHARED, salt=salt)
            forget(llm, "base")
        if of_base:
            ask(llm, PROMPT[:of_base], tokens=0, salt=salt)
        said = say(llm, PROMPT, "ann", salt=salt)
        start = min(of_base, of_family)
        assert computed(said) == (1, 700 - start)
        assert (said.report.cached_tokens.shared, said.report.cached_tokens.residual) == (start, of_family)
        check_same(said, whole)


def test_prompt_logprobs_are_the_members(llm: LLM) -> None:
    options = {"adapter": "ann", "policy": SHARED}
    scored = llm.generate(PROMPT[:40], greedy(1, prompt_logprobs=True), **options)
    assert computed(scored) == (40, 40)
    of_base = llm.generate(PROMPT[:40], greedy(1, prompt_logprobs=True))
    assert scored.prompt_logprobs is not None and of_base.prompt_logprobs is not None
    pairs = list(zip(scored.prompt_logprobs, of_base.prompt_logprobs, strict=True))[2:]
    assert sum(a.logprob != b.logprob for a, b in pairs) > 30
    check_same(say(llm, PROMPT[:40], "ann", 1), scored)


@pytest.mark.slow
def test_rows_of_all_kinds_in_one_batch(llm: LLM) -> None:
    """And members that are thrown out of the cache and come back."""
    policies = {"base": None, **{f"{name} {policy}": policy for name in MEMBERS for policy in (SHARED, "exact")}}
    policies["ann residual"] = "residual"
    prompts = {key: make_ids(260) + make_ids(10 + 30 * i, seed=i + 1) for i, key in enumerate(policies)}
    requests = [
        Request(
            key,
            TokenPrompt(prompts[key]),
            greedy(10),
            adapter=key.split()[0] if policy else None,
            policy=Policy(policy) if policy else None,
        )
        for key, policy in policies.items()
    ]
    together = dict(zip(policies, at_once(llm, requests), strict=True))
    preempt_often(llm, 4)
    again = dict(zip(policies, at_once(llm, requests), strict=True))
    check_idle(llm)
    for key, policy in policies.items():
        adapter = key.split()[0] if policy else None
        alone = ask(llm, prompts[key], adapter, 10, policy=policy, salt="alone")
        check_same(together[key], alone, 0.01)
        check_same(again[key], alone, 0.01)


# -- where it is exact ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "num_layers"),
    [
        ("qwen3", 3),
        *(pytest.param(name, 8, marks=pytest.mark.slow) for name in ("qwen2", "qwen3", "gemma3_text")),
    ],
)
def test_members_that_change_the_last_layer_say_what_they_say_exactly(
    model_folder: ModelFolder, tmp_path: Path, architecture: str, num_layers: int
) -> None:
    """There base's x is their own. Through 8 bits; where keys are normed, their norms are worked out when read."""
    model = model_folder(architecture, num_hidden_layers=num_layers)
    options = {"targets": ATTENTION + MLP, "layers": [num_layers - 1], "strength": 1.0}
    folders = family(tmp_path / "adapters", model, ("ann", "bob"), **options)
    with open_residual(model, tmp_path / "cache", folders, kv="8") as llm:
        for name in folders:
            # The fourth token of one is a tie, which the cache's rounding decides.
            exact = ask(llm, PROMPT[:300], name, 3, policy="exact")
            check_same(say(llm, PROMPT[:300], name, 3), exact, tolerance=0.05)
            check_same(say(llm, PROMPT[:300], name, 8), ask(llm, PROMPT[:300], name, 8, policy="residual"), 0.01)
            check_differs(exact, ask(llm, PROMPT[:300]))


@pytest.mark.slow
def test_windows(model_folder: ModelFolder, tmp_path: Path) -> None:
    kinds = {"layer_types": ["sliding_attention", "full_attention"]}
    model = model_folder("mistral_sliding", num_hidden_layers=2, **kinds)
    folders = family(tmp_path / "adapters", model, layers=[1])
    with open_residual(model, tmp_path / "cache", folders, kv="8") as llm:
        for name in folders:
            check_same(say(llm, PROMPT, name, 8), ask(llm, PROMPT, name, 8, policy="exact"), 0.05)
        base = ask(llm, PROMPT[:600], tokens=0, salt="later")
        assert base.report.computed_tokens == 600
        later = say(llm, PROMPT, "ann", 8, salt="later")
        assert computed(later) == (1, 700)
        check_same(later, say(llm, PROMPT, "ann", 8))


# -- what lasts -----------------------------------------------------------------------------------------------------


def test_a_family_outlives_its_members_and_the_server(small: Path, three: dict[str, Path], tmp_path: Path) -> None:
    with open_residual(small, tmp_path / "cache", three) as llm:
        first = say(llm, PROMPT, "ann", agent="alice")
        ids = [*all_ids(first), *make_ids(30, seed=1)]
        hot = say(llm, ids, "bob", agent="alice")
        assert computed(hot) == (1, 31), "another member goes on with the conversation: what is new goes through base"
        llm.evict("alice")
        warm = say(llm, ids, "bob", agent="alice")
        assert computed(warm) == (1, 1) and warm.report.restored_bytes > 0
    with open_residual(small, tmp_path / "cache", {"x": three["cyd"], "y": three["bob"]}) as llm:
        again = say(llm, ids, "y", agent="alice")
        assert computed(again) == (1, 1) and again.report.cache_state == "warm"
        third = say(llm, ids, "x")
        assert computed(third) == (1, 1)
    with open_residual(small, tmp_path / "fresh", three) as llm:
        fresh = say(llm, ids, "bob")
        assert computed(fresh) == (1, len(ids))
        check_same(say(llm, ids, "cyd"), third)
    for other in (warm, again, fresh):
        check_same(other, hot)


@pytest.mark.slow
def test_files_are_the_same_whoever_wrote_them(small: Path, three: dict[str, Path], tmp_path: Path) -> None:
    files = []
    for number, names in enumerate((MEMBERS, MEMBERS[::-1])):
        with open_residual(small, tmp_path / str(number), three) as llm:
            for name in names:
                say(llm, make_ids(600), name, 1, agent=name)
        files.append(block_files(tmp_path / str(number)))
    assert files[0] == files[1] and files[0]["residual"]
    with open_residual(small, tmp_path / "base", {}) as llm:
        ask(llm, make_ids(600), tokens=1, agent="nobody")
    assert files[0]["base"].items() >= block_files(tmp_path / "base")["base"].items()


# -- who is no member -----------------------------------------------------------------------------------------------


def change_one_a(folder: Path, source: Path) -> Path:
    """An adapter in which one value of one A is the next float32."""
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
    tensors = load_file(source / "adapters.safetensors")
    name = sorted(name for name in tensors if name.endswith("lora_a"))[-1]
    tensors[name][3, 1] = np.nextafter(tensors[name][3, 1], np.float32(1))
    save_file(tensors, folder / "adapters.safetensors")
    return folder


@pytest.mark.slow
def test_one_ulp_in_one_a_is_no_family(small: Path, three: dict[str, Path], tmp_path: Path) -> None:
    folders = {"ann": three["ann"], "odd": change_one_a(tmp_path / "odd", three["bob"])}
    with open_residual(small, tmp_path / "cache", folders) as llm:
        for name in folders:
            said = ask(llm, PROMPT, name, policy=SHARED)
            report = said.report
            assert (report.policy, report.requested_policy, report.stepped_down) == ("residual", SHARED, "family")
            assert report.computed_tokens == 700, "its own residuals, through itself"
            check_same(said, ask(llm, PROMPT, name, policy="residual"))
        inside.on_loop(llm, inside.async_engine(llm).load_adapter(AdapterFolder("bob", str(three["bob"]))))
        assert computed(say(llm, PROMPT, "ann")) == (1, 700)
        assert ask(llm, PROMPT, "odd", policy=SHARED).report.stepped_down == "family"


def test_the_same_adapter_twice_is_no_family(small: Path, three: dict[str, Path], tmp_path: Path) -> None:
    with open_residual(small, tmp_path / "cache", {"ann": three["ann"], "too": three["ann"]}) as llm:
        assert ask(llm, PROMPT[:40], "ann", policy=SHARED).report.stepped_down == "family"


def test_refused_by_name_where_residuals_are(model_folder: ModelFolder, small: Path, tmp_path: Path) -> None:
    model = model_folder("deepseek_v2")
    folders = {"x": make_adapter(tmp_path / "x", model, rank=2)}
    with open_residual(model, tmp_path / "cache", folders) as llm, pytest.raises(InvalidRequest, match="MLA"):
        ask(llm, PROMPT[:20], "x", policy=SHARED)
    with open_residual(small, tmp_path / "off", family(tmp_path / "three", small), max_divergence=0.0) as llm:
        with pytest.raises(InvalidRequest, match="--max-divergence"):
            ask(llm, PROMPT[:20], "ann", policy=SHARED)
        with pytest.raises(InvalidRequest, match="needs an adapter"):
            ask(llm, PROMPT[:20], policy=SHARED)


# -- the guard ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_divergence_is_the_members_own_whoever_came_first(llm: LLM, three: dict[str, Path]) -> None:
    alone = {name: say(llm, PROMPT[:300], name, 1, salt=name).report.divergence for name in MEMBERS}
    after = {name: say(llm, PROMPT[:300], name, 1, salt="all").report.divergence for name in MEMBERS[::-1]}
    assert alone == after and None not in alone.values()
    assert len(set(alone.values())) == 3 and min(alone.values()) > 0.01


def test_members_that_add_nothing_diverge_from_nothing(small: Path, tmp_path: Path) -> None:
    folders = family(tmp_path / "two", small, ("ann",)) | family(tmp_path / "two", small, ("nil",), strength=0.0)
    with open_residual(small, tmp_path / "cache", folders) as llm:
        said = say(llm, PROMPT[:300], "nil")
        check_same(said, ask(llm, PROMPT[:300]))
        assert said.report.divergence is not None and said.report.divergence < 1e-3


def test_too_far_is_answered_exactly(small: Path, three: dict[str, Path], tmp_path: Path) -> None:
    with open_residual(small, tmp_path / "cache", three, max_divergence=1e-3) as llm:
        for _ in range(2):
            said = ask(llm, PROMPT[:300], "ann", policy=SHARED)
            report = said.report
            assert (report.policy, report.requested_policy, report.stepped_down) == ("exact", SHARED, "divergence")
            check_same(said, ask(llm, PROMPT[:300], "ann", policy="exact"))
