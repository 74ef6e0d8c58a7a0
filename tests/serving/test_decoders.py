"""Decoders with weights of their own on base's cache: equal to base where they are base, and never in its way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from agentcache.api.request import Request, TokenPrompt
from agentcache.api.sampling import SamplingParams
from agentcache.errors import RequestError
from tests.conftest import ModelFolder
from tests.serving.adapter_cases import (
    all_ids,
    ask,
    at_once,
    cached_bytes,
    check_differs,
    check_equal,
    cold,
    open_adapters,
    preempt_often,
    same_bytes,
)
from tests.serving.conversation import greedy, make_ids


@pytest.fixture(scope="module")
def base(model_folder: ModelFolder) -> Path:
    return model_folder("qwen3", num_hidden_layers=4)  # whole models: how they are cut into spans is not asked for


def fine_tune(base: Path, folder: Path, seed: int, strength: float = 0.3) -> Path:
    """The same architecture with other weights; the same ones with `strength` 0, under another config."""
    shutil.copytree(base, folder)
    rng = np.random.default_rng(seed)
    weights = load_file(base / "model.safetensors")
    moved = {n: w + strength * np.std(w) * rng.standard_normal(w.shape).astype(w.dtype) for n, w in weights.items()}
    save_file(moved, folder / "model.safetensors", metadata={"format": "mlx"})
    config = json.loads((base / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"fine_tuned": seed}))
    return folder


@pytest.fixture(scope="module")
def decoders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("decoders")
    return {
        "same": fine_tune(base, root / "same", 1, strength=0.0),
        "poet": fine_tune(base, root / "poet", 2),
        "lawyer": fine_tune(base, root / "lawyer", 3),
    }


@pytest.mark.slow
def test_a_decoder_equal_to_base_equals_base(base: Path, decoders: dict[str, Path], tmp_path: Path) -> None:
    with open_adapters(base, tmp_path, decoders) as llm:
        prompt = make_ids(300)
        plain = ask(llm, prompt, tokens=8)
        same = ask(llm, prompt, "same", tokens=8)
        assert (same.report.policy, same.report.activated_at) == ("prefill-share", 299)
        assert (same.report.computed_tokens, same.report.cached_tokens.shared) == (1, 299)
        check_equal(same, plain)
        alone = ask(llm, prompt, "same", tokens=8, salt="alone")
        assert alone.report.computed_tokens == 300
        check_equal(alone, plain)


@pytest.mark.slow
def test_a_decoder_leaves_base_as_it_is(base: Path, decoders: dict[str, Path], tmp_path: Path) -> None:
    with open_adapters(base, tmp_path, decoders, prefill_chunk=1024) as llm:  # one, whatever the time it takes
        prompt = make_ids(520)
        before = ask(llm, prompt, salt="before")
        poem = ask(llm, prompt, "poet", tokens=8)
        check_differs(poem, before)
        check_equal(poem, cold(llm, poem))
        after = ask(llm, prompt, salt="after")
        assert after.logprobs == before.logprobs, "bit for bit"
        # What it wrote is computed by base when the context goes on, and its own start again by itself.
        follow = ask(llm, all_ids(poem) + make_ids(3, seed=1))
        assert follow.report.cached_tokens.shared == 519
        check_equal(follow, cold(llm, follow))
        again = ask(llm, all_ids(poem) + make_ids(3, seed=1), "poet")
        assert again.report.cached_tokens.shared == len(again.prompt_token_ids) - 1
        check_equal(again, cold(llm, again))


@pytest.mark.slow
def test_rows_of_several_models_take_turns(base: Path, decoders: dict[str, Path], tmp_path: Path) -> None:
    jobs = [(None, 1), ("poet", 2), ("lawyer", 3), (None, 4), ("poet", 5)]
    with open_adapters(base, tmp_path, decoders) as llm:
        alone = [ask(llm, make_ids(40 + seed, seed=seed), name, tokens=12, salt="a") for name, seed in jobs]
        requests = [
            Request(f"r{seed}", TokenPrompt(make_ids(40 + seed, seed=seed)), greedy(12), salt="b", adapter=name)
            for name, seed in jobs
        ]
        for mine, theirs in zip(at_once(llm, requests), alone, strict=True):
            check_equal(mine, theirs)


@pytest.mark.slow
def test_a_preempted_decoder_goes_on(base: Path, decoders: dict[str, Path], tmp_path: Path) -> None:
    """Its prompt is base's again, its own tokens its own, in chunks of one model each."""
    with open_adapters(base, tmp_path, decoders) as llm:
        expected = ask(llm, make_ids(300), "poet", tokens=30, salt="expected")
        preempt_often(llm, every=10)
        check_equal(ask(llm, make_ids(300), "poet", tokens=30, salt="again"), expected)
        assert llm.stats().preemptions == 2


@pytest.mark.slow
def test_the_shared_blocks_bytes_do_not_change(base: Path, decoders: dict[str, Path], tmp_path: Path) -> None:
    prompt = make_ids(540)
    with open_adapters(base, tmp_path, decoders) as llm:
        ask(llm, prompt, tokens=1)
        before = cached_bytes(llm, prompt, 539)
        poem = ask(llm, prompt, "poet", tokens=30)
        assert poem.report.computed_tokens == 1
        assert same_bytes(cached_bytes(llm, prompt, 539), before)


@pytest.mark.slow
def test_an_agent_with_a_decoder_and_a_restart(base: Path, decoders: dict[str, Path], tmp_path: Path) -> None:
    """Of its own tokens nothing is of use to the next turn: base computes them."""
    with open_adapters(base, tmp_path, decoders) as llm:
        first = ask(llm, make_ids(300), "poet", agent="alice")
        assert first.report.saved
    with open_adapters(base, tmp_path, {"renamed": decoders["poet"]}) as llm:
        second = ask(llm, all_ids(first) + make_ids(20, seed=1), "renamed", agent="alice")
        assert (second.report.cached_tokens.own, second.report.cache_state) == (299, "warm")
        check_equal(second, cold(llm, second))


@pytest.mark.slow
def test_prompt_logprobs_are_bases(base: Path, decoders: dict[str, Path], tmp_path: Path) -> None:
    with open_adapters(base, tmp_path, decoders) as llm:
        for length in (2, 40):
            sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0, prompt_logprobs=True)
            plain = llm.generate(make_ids(length), sampling)
            poem = llm.generate(make_ids(length), sampling, adapter="poet")
            assert plain.prompt_logprobs is not None and poem.prompt_logprobs is not None
            mine, theirs = [[p.logprob for p in each.prompt_logprobs] for each in (poem, plain)]
            assert mine[0] is None and mine[1:] == pytest.approx(theirs[1:], abs=1e-3)


@pytest.mark.slow
def test_a_broken_model_does_not_end_the_engine(base: Path, decoders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "decoder"
    shutil.copytree(decoders["poet"], folder)
    config = json.loads((folder / "config.json").read_text())
    with open_adapters(base, tmp_path / "cache", {}) as llm:
        expected = ask(llm, make_ids(30))
        for broken in ({"num_attention_heads": 3}, {"rope_theta": 5.0}, {"model_type": "llama"}, {"hidden_size": "x"}):
            (folder / "config.json").write_text(json.dumps(config | broken))
            with pytest.raises(RequestError, match="cannot be loaded|has other caches"):
                llm.load_adapter("decoder", folder)
        check_equal(ask(llm, make_ids(30)), expected)
        assert llm.adapters() == () and llm.stats().adapter_ram_bytes == 0


@pytest.mark.parametrize("what", ["shape", "vocabulary", "policy", "nothing"])
def test_what_is_no_fine_tune_is_refused(
    what: str, base: Path, decoders: dict[str, Path], model_folder: ModelFolder, tmp_path: Path
) -> None:
    folder = tmp_path / "decoder"
    if what == "shape":
        shutil.copytree(model_folder("qwen3_tied"), folder)
    else:
        shutil.copytree(decoders["poet"], folder)
    if what == "vocabulary":
        (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + " ")
    if what == "nothing":
        (folder / "model.safetensors").write_bytes(b"nothing")
    policy = "exact" if what == "policy" else "auto"
    error = {
        "shape": "not a fine-tune",
        "vocabulary": "another vocabulary",
        "policy": "cannot be",
        "nothing": "be read",
    }
    with open_adapters(base, tmp_path / "cache", {}) as llm:
        with pytest.raises(RequestError, match=error[what]):
            llm.load_adapter("decoder", folder, policy)
        assert llm.adapters() == ()
