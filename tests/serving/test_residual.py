"""Residual requests on the real engine: what they compute, whom they change nothing for, and who is refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from agentcache.api.policy import Policy
from agentcache.api.request import Request, TokenPrompt
from agentcache.errors import InvalidRequest
from agentcache.llm import LLM
from agentcache.settings.tables import AdapterFolder
from tests.adapters_factory import ATTENTION, make_adapter, random_matrices, write_mlx_lm
from tests.conftest import ModelFolder
from tests.marks import slow
from tests.schemas import of_schema
from tests.serving import inside
from tests.serving.adapter_cases import FOLDERS, INVOKE_A, all_ids, ask, at_once, check_differs, make_folders
from tests.serving.conversation import check_idle, check_same, greedy, make_ids
from tests.serving.residual_cases import (
    NAMES,
    block_files,
    computed,
    forget,
    open_residual,
    residual_folders,
    say,
)
from tests.serving.residual_damage import is_residual

PROMPT = make_ids(700)


@pytest.fixture(scope="module")
def small(model_folder: ModelFolder) -> Path:
    """Keys are normed, and two query heads read one of them."""
    return model_folder("qwen3", num_hidden_layers=2)


@pytest.fixture(scope="module")
def five(small: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return residual_folders(tmp_path_factory.mktemp("five"), small)


@pytest.fixture
def llm(small: Path, five: dict[str, Path], tmp_path: Path) -> Iterator[LLM]:
    with open_residual(small, tmp_path / "cache", five) as llm:
        yield llm


# -- what is computed ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_base_is_computed_once_and_each_adapter_once(llm: LLM) -> None:
    first = say(llm, PROMPT, "ann")
    assert computed(first) == (700, 700)
    assert (first.report.cached_tokens.shared, first.report.cached_tokens.residual) == (0, 0)
    second = say(llm, PROMPT, "bob")
    assert computed(second) == (700, 1), "base has all but the last token, which is always computed"
    check_differs(second, first)
    again = say(llm, PROMPT, "ann")
    assert computed(again) == (1, 1)
    assert (again.report.cached_tokens.shared, again.report.cached_tokens.residual) == (699, 699)
    check_same(again, first)
    base = ask(llm, PROMPT)
    assert computed(base) == (1, 1)
    check_differs(first, base)


@pytest.mark.slow
def test_what_base_has_read_is_of_use_and_the_other_way_round(llm: LLM) -> None:
    base = ask(llm, PROMPT)
    assert computed(say(llm, PROMPT, "ann")) == (700, 1)
    check_same(ask(llm, PROMPT), base)
    said = say(llm, PROMPT[:300], "bob")
    longer = ask(llm, all_ids(said) + [50])
    assert longer.report.computed_tokens == 2, "its companion has computed all that the adapter said but the last token"


# Nothing, a whole block, a part of one and all but a token; either reaching further, and both as far.
@pytest.mark.parametrize(
    ("of_base", "of_residuals"),
    [
        *((0, 0), (256, 300), (699, 256)),
        *(slow(256, 0), slow(0, 699), slow(256, 256), slow(300, 256), slow(300, 300), slow(300, 699), slow(699, 699)),
    ],
)
def test_partial_hits(llm: LLM, of_base: int, of_residuals: int) -> None:
    whole = say(llm, PROMPT, "ann", salt="whole")
    if of_residuals:
        ask(llm, PROMPT[:of_residuals], "ann", 0, policy="residual")
    forget(llm, "base")
    if of_base:
        ask(llm, PROMPT[:of_base], tokens=0)
    said = say(llm, PROMPT, "ann")
    start = min(of_base, of_residuals)
    assert computed(said) == (700 - start, 700 - of_base)
    assert (said.report.cached_tokens.shared, said.report.cached_tokens.residual) == (start, of_residuals)
    check_same(said, whole)


def test_turn_two_is_the_same_hot_evicted_and_restarted(small: Path, five: dict[str, Path], tmp_path: Path) -> None:
    with open_residual(small, tmp_path / "cache", five) as llm:
        first = say(llm, PROMPT, "ann", agent="alice")
        ids = [*all_ids(first), *make_ids(30, seed=1)]
        info = inside.agent_info(inside.engine_of(llm), "alice")
        hot = say(llm, ids, "ann", agent="alice")
        assert computed(hot) == (31, 31), "what is new, and the last token that was generated"
        assert hot.report.cached_tokens.own == len(ids) - 31
        llm.evict("alice")
        warm = say(llm, ids, "ann", agent="alice")
        assert computed(warm) == (1, 1) and warm.report.restored_bytes > 0
        assert info.tokens == len(all_ids(first))
    with open_residual(small, tmp_path / "cache", five) as llm:
        again = say(llm, ids, "ann", agent="alice")
        assert computed(again) == (1, 1) and again.report.cache_state == "warm"
    with open_residual(small, tmp_path / "fresh", five) as llm:
        fresh = say(llm, ids, "ann")
        assert computed(fresh) == (len(ids), len(ids))
    for other in (warm, again, fresh):
        check_same(other, hot)
        assert other.report.divergence == pytest.approx(hot.report.divergence, rel=5e-3)


# -- purity -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3", "mistral_sliding"])
def test_bases_files_are_those_of_a_server_without_adapters(
    model_folder: ModelFolder, tmp_path: Path, architecture: str
) -> None:
    """Two turns of five agents with an adapter each, who share a beginning; byte for byte, in either order."""
    kinds = {"layer_types": ["sliding_attention", "full_attention"]} if architecture == "mistral_sliding" else {}
    model = model_folder(architecture, num_hidden_layers=2, **kinds)
    folders = residual_folders(tmp_path / "adapters", model)

    def talk(llm: LLM, order: tuple[str, ...], **options: str) -> None:
        for name in order:
            prompt = make_ids(256) + make_ids(40, seed=NAMES.index(name) + 1)
            ask(llm, prompt, name if options else None, 1, **options)
            ask(llm, [*prompt, *make_ids(250, seed=9)], name if options else None, 1, agent=name, **options)

    files = []
    for number, order in enumerate((NAMES, NAMES[::-1])):
        with open_residual(model, tmp_path / f"mine{number}", folders) as llm:
            talk(llm, order, policy="residual")
        with open_residual(model, tmp_path / f"base{number}", {}) as llm:
            talk(llm, order)
        mine, base = block_files(tmp_path / f"mine{number}"), block_files(tmp_path / f"base{number}")
        assert mine["base"].items() >= base["base"].items() and base["base"]
        # Windows that residuals are read with stay in RAM, so that more of them is there to be saved.
        assert mine["base"].keys() == base["base"].keys() or architecture == "mistral_sliding"
        assert mine["residual"] and not base["residual"]
        files.append(mine)
    assert files[0] == files[1]


@pytest.mark.slow
def test_a_server_that_allows_no_residuals_writes_the_same_base(
    small: Path, five: dict[str, Path], tmp_path: Path
) -> None:
    """Tensor by tensor; whoever measures what rounding takes off says so in the files' headers beside them."""
    with open_residual(small, tmp_path / "allowed", five) as llm:
        say(llm, PROMPT, "ann", 1, agent="alice")
    with open_residual(small, tmp_path / "plain", five, max_divergence=0.0) as llm:
        ask(llm, PROMPT, None, 1, agent="alice")
    folders = (tmp_path / "allowed", tmp_path / "plain")
    allowed, plain = (
        {path.name: load_file(path) for path in folder.rglob("*.safetensors") if not is_residual(path)}
        for folder in folders
    )
    assert len(plain) == 3 * 2 and allowed.keys() == plain.keys(), "three blocks of two groups"
    for name, tensors in plain.items():
        assert allowed[name].keys() == tensors.keys()
        assert all(np.array_equal(allowed[name][key], tensor) for key, tensor in tensors.items())


@pytest.mark.slow
def test_any_order_and_company_gives_the_same_answers(
    small: Path, five: dict[str, Path], llm: LLM, tmp_path: Path
) -> None:
    prompts = {name: make_ids(300) + make_ids(20 + 40 * i, seed=i + 1) for i, name in enumerate(NAMES)}
    requests = [
        Request(name, TokenPrompt(prompts[name]), greedy(12), agent=name, adapter=name, policy=Policy.RESIDUAL)
        for name in NAMES
    ]
    together = dict(zip(NAMES, at_once(llm, requests), strict=True))
    with open_residual(small, tmp_path / "backwards", five) as other:
        backwards = {name: say(other, prompts[name], name, 12) for name in NAMES[::-1]}
    for name in NAMES:
        with open_residual(small, tmp_path / f"alone {name}", {name: five[name]}) as other:
            alone = say(other, prompts[name], name, 12)
        check_same(together[name], alone)
        check_same(backwards[name], alone)


@pytest.mark.slow
def test_a_batch_counts_its_requests_not_their_companions(llm: LLM) -> None:
    requests = [
        Request(name, TokenPrompt(make_ids(20)), greedy(40), adapter=name, policy=Policy.RESIDUAL) for name in NAMES
    ]
    at_once(llm, requests)
    stats = llm.stats()
    assert 0.8 * len(NAMES) <= stats.decode_rows / stats.decode_steps <= len(NAMES)


@pytest.mark.slow
def test_several_answers_to_one_prompt(llm: LLM) -> None:
    request = Request("n", TokenPrompt(PROMPT), greedy(3), n=3, adapter="ann", policy=Policy.RESIDUAL)
    before = llm.stats().computed_tokens
    said = at_once(llm, [request])[0]
    one = say(llm, PROMPT, "ann", 3)
    assert Counter(said.token_ids) == Counter(3 * one.token_ids)
    assert llm.stats().computed_tokens - before < 1.2 * 2 * len(PROMPT), "the prompt once, by base and by the adapter"


@pytest.mark.slow
def test_an_answer_of_a_given_form(small: Path, five: dict[str, Path], tmp_path: Path) -> None:
    """Also where the first attempt at an answer is thrown away."""
    form = of_schema({"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 3})
    sampling = greedy(60, ignore_eos=False)
    with open_residual(small, tmp_path / "cache", five, max_divergence=1e-3) as llm:
        stepped = llm.generate(PROMPT[:40], sampling, form=form, adapter="ann", policy="residual")
        exact = llm.generate(PROMPT[:40], sampling, form=form, adapter="ann", policy="exact", salt="another")
        assert stepped.report.stepped_down == "divergence"
        assert (stepped.text, stepped.finish_reason) == (exact.text, exact.finish_reason)
    with open_residual(small, tmp_path / "cache", five) as llm:
        said = llm.generate(PROMPT[:40], sampling, form=form, adapter="ann", policy="residual")
        assert said.report.policy == "residual" and said.finish_reason == "stop"
        assert set(json.loads(said.text)) <= {1, 2}


def test_prompt_logprobs_are_the_adapters(llm: LLM) -> None:
    scored = llm.generate(PROMPT[:40], greedy(1, prompt_logprobs=True), adapter="ann", policy="residual")
    of_base = llm.generate(PROMPT[:40], greedy(1, prompt_logprobs=True))
    assert scored.prompt_logprobs is not None and of_base.prompt_logprobs is not None
    assert len(scored.prompt_logprobs) == 40
    pairs = list(zip(scored.prompt_logprobs, of_base.prompt_logprobs, strict=True))[2:]
    assert sum(a.logprob != b.logprob for a, b in pairs) > 30


# -- adapters come and go -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_unloaded_adapter_leaves_no_cache_behind_and_finds_its_files_again(llm: LLM, five: dict[str, Path]) -> None:
    first = say(llm, PROMPT, "ann", agent="alice")
    inside.async_engine(llm)
    inside.on_loop(llm, _unload(llm, "ann"))
    inside.wait_until(llm, lambda: len(inside.engine_of(llm).caches.further) == len(five) - 1)
    assert inside.residual_arrays(inside.engine_of(llm)) == len(five) - 1, "nor arrays"
    assert not [use for use in llm.stats().ram_accounts if first_digest(llm) in use.kind]
    inside.on_loop(llm, inside.async_engine(llm).load_adapter(AdapterFolder("anew", str(five["ann"]))))
    again = say(llm, PROMPT, "anew", agent="alice")
    assert computed(again) == (1, 1) and again.report.restored_bytes > 0
    check_same(again, first)


async def _unload(llm: LLM, name: str) -> None:
    await inside.async_engine(llm).unload_adapter(name)


def first_digest(llm: LLM) -> str:
    return inside.record(inside.engine_of(llm), "alice").residuals[0].cache


@pytest.mark.slow
def test_an_agent_goes_from_one_adapter_to_another_and_to_base(llm: LLM) -> None:
    first = say(llm, PROMPT, "ann", agent="alice")
    other = say(llm, [*all_ids(first), 50], "bob", agent="alice")
    assert computed(other) == (len(other.prompt_token_ids), 2), "base has it; bob has read nothing yet"
    assert other.report.lost_tokens == 0
    back = say(llm, [*all_ids(other), 51], "ann", agent="alice")
    assert computed(back) == (7, 2), "what bob was told and said is new to ann, and no loss"
    assert back.report.lost_tokens == 0
    base = ask(llm, [*all_ids(back), 52], agent="alice")
    assert base.report.computed_tokens == 2
    check_idle(llm)


# -- numbers ------------------------------------------------------------------------------------------------------


def test_what_float16_cannot_hold_is_counted(small: Path, tmp_path: Path) -> None:
    """Also of an adapter that is gone."""
    pairs = random_matrices(small, ATTENTION, rank=2, strength=0.01)
    for pair in pairs.values():
        pair.a[:, 0] *= 1e8
    folders = {"loud": write_mlx_lm(tmp_path / "loud", pairs)}
    with open_residual(small, tmp_path / "cache", folders) as llm:
        assert llm.stats().saturated_residuals == 0
        say(llm, PROMPT[:40], "loud")
        counted = llm.stats().saturated_residuals
        assert 0 < counted <= 43 * 2 * 2, "one component of two, of keys and values, in two layers"
        inside.on_loop(llm, _unload(llm, "loud"))
        inside.wait_until(llm, lambda: not inside.engine_of(llm).caches.further)
        assert llm.stats().saturated_residuals == counted


# -- refusals -----------------------------------------------------------------------------------------------------


def test_by_default_nobody_is_answered_so(small: Path, five: dict[str, Path], tmp_path: Path) -> None:
    with open_residual(small, tmp_path / "cache", five, max_divergence=0.0) as llm:
        with pytest.raises(InvalidRequest, match="--max-divergence"):
            ask(llm, PROMPT, "ann", policy="residual")
        with pytest.raises(InvalidRequest, match="--max-divergence"):
            ask(llm, PROMPT, policy="residual")
        with pytest.raises(InvalidRequest, match="--max-divergence"):
            folder = AdapterFolder("new", str(five["ann"]), Policy.RESIDUAL)
            inside.on_loop(llm, inside.async_engine(llm).load_adapter(folder))
        assert ask(llm, PROMPT, "ann").report.policy == "exact"
        assert not inside.engine_of(llm).caches.further


def test_auto_stays_exact(llm: LLM) -> None:
    said = ask(llm, PROMPT, "ann")
    assert (said.report.policy, said.report.requested_policy) == ("exact", "exact")
    assert said.report.base_computed_tokens == 0


@pytest.mark.slow
def test_adapters_that_cannot_be_residual_are_refused_by_name(qwen3: Path, tmp_path: Path) -> None:
    folders = make_folders(tmp_path, qwen3, ("a", "mlp"))
    with open_residual(qwen3, tmp_path / "cache", folders) as llm:
        for name, why in (("a", "activated"), ("mlp", "adds nothing to keys or values")):
            with pytest.raises(InvalidRequest, match=why):
                ask(llm, PROMPT, name, policy="residual")
        assert ask(llm, PROMPT + INVOKE_A, "a").report.policy == "activated"
    assert FOLDERS["a"]["rank"] == 3


def test_models_that_cannot_are_refused_by_name(model_folder: ModelFolder, tmp_path: Path) -> None:
    model = model_folder("deepseek_v2")
    folders = {"x": make_adapter(tmp_path / "x", model, rank=2)}
    with open_residual(model, tmp_path / "cache", folders) as llm:
        with pytest.raises(InvalidRequest, match="MLA"):
            ask(llm, PROMPT[:20], "x", policy="residual")
        assert ask(llm, PROMPT[:20], "x").report.policy == "exact"
