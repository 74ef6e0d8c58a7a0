"""`--kv`: keys and values in other bits are another cache, and what `auto` has chosen holds for every start."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentcache.api.sampling import SamplingParams
from agentcache.engine.open import inspect_model
from agentcache.kv.packing import LayerBits, Precision
from agentcache.llm import LLM
from agentcache.models.builtin.embedded import embedded_model_path
from agentcache.settings.config import Config
from agentcache.store.model_files import PRECISION_FILE as NAME
from agentcache.store.model_files import read_precision, write_precision
from agentcache.store.verify import verify_folder
from tests.conftest import ModelFolder
from tests.marks import slow

PROMPT = list(range(5, 65)) * 5
GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=1)


def ask(model: Path, cache_dir: Path, kv: int | str) -> tuple[int, float, int]:
    """Prompt tokens that were computed, the first token's logprob, and the bytes on disk."""
    with LLM(str(model), cache_dir=cache_dir, kv=kv) as llm:
        output = llm.generate(PROMPT, GREEDY, agent="a")
        assert output.report is not None and output.logprobs is not None
        on_disk = sum(file.stat().st_size for file in cache_dir.rglob("*.safetensors"))
        return output.report.computed_tokens, output.logprobs[0].logprob, on_disk


def test_each_has_files_of_its_own(model_folder: ModelFolder, tmp_path: Path) -> None:
    model = model_folder("qwen2", num_hidden_layers=2)
    first = {kv: ask(model, tmp_path / str(kv), kv) for kv in ("4t", "8")}
    assert first["4t"][1] != first["8"][1]
    assert 1.6 < first["8"][2] / first["4t"][2] < 1.9  # scales and biases have the same size
    assert ask(model, tmp_path / "8", "8")[0] <= 4
    assert ask(model, tmp_path / "8", "4t")[0] == len(PROMPT)  # nothing of 8 bits is read as 4


@pytest.mark.parametrize(("kv", "size"), [slow("k8v4", 1.4), ("16", 3.1)])
def test_other_formats_come_back_from_disk(kv: str, size: float, model_folder: ModelFolder, tmp_path: Path) -> None:
    model = model_folder("qwen2", num_hidden_layers=2)
    four, first = ask(model, tmp_path / "4", "4t"), ask(model, tmp_path / "cache", kv)
    assert first[1] != four[1] and size < first[2] / four[2] < size + 0.3
    again = ask(model, tmp_path / "cache", kv)
    assert again[0] <= 4 and again[1] != four[1]


@pytest.mark.slow
def test_what_was_chosen_holds(model_folder: ModelFolder, tmp_path: Path) -> None:
    """Every start finds the blocks of those before it, whatever it would measure itself; a damaged file is replaced."""
    model, cache_dir = model_folder("qwen2", num_hidden_layers=2), tmp_path / "cache"
    with LLM(str(model), cache_dir=cache_dir, kv="auto") as llm:
        fingerprint, told, measured = llm.model.fingerprint, llm.model.kv_precision, llm.model.kv_divergence
    chosen = read_precision(cache_dir, fingerprint)
    assert chosen is not None and (str(chosen), chosen.divergence) == (told, measured)

    other = Precision((LayerBits(16, 16), LayerBits(8, 4)), 0.001)
    write_precision(cache_dir, fingerprint, other)
    assert ask(model, cache_dir, "auto")[0] == len(PROMPT)
    assert ask(model, cache_dir, "auto")[0] <= 4
    with LLM(str(model), cache_dir=cache_dir, kv="auto") as llm:
        assert (llm.model.kv_precision, llm.model.kv_bits) == (str(other), 11)
        assert [group.packing for group in llm.model.cache_groups] == [
            "float16",
            "affine-8bit-g64, values affine-4bit-g64",
        ]

    (cache_dir / NAME).write_bytes(b"nonsense")
    with LLM(str(model), cache_dir=cache_dir, kv="auto") as llm:
        assert llm.model.kv_precision == told
    assert read_precision(cache_dir, fingerprint) == chosen


@pytest.mark.slow
def test_bits_that_are_asked_for_are_not_measured(model_folder: ModelFolder, tmp_path: Path) -> None:
    with LLM(str(model_folder("qwen2", num_hidden_layers=2)), cache_dir=tmp_path / "cache", kv="k8v4") as llm:
        assert (llm.model.kv_precision, llm.model.kv_bits, llm.model.kv_divergence) == ("k8v4", 6, None)
    assert not (tmp_path / "cache" / NAME).exists()


@pytest.mark.slow
def test_another_precision_leaves_agents_alone_that_say_nothing(model_folder: ModelFolder, tmp_path: Path) -> None:
    """Who tries `--kv 8` for an hour finds everybody else warm afterwards."""
    model = str(model_folder("qwen2", num_hidden_layers=2))
    agents = {"asked": PROMPT, "idle": PROMPT[::-1]}

    def computed(kv: str, *names: str) -> list[int]:
        with LLM(model, cache_dir=tmp_path, kv=kv) as llm:
            return [llm.generate(agents[name], GREEDY, agent=name).report.computed_tokens for name in names]

    computed("4t", "asked", "idle")
    assert computed("8", "asked") == [len(PROMPT)]
    assert computed("4t", "idle")[0] <= 4
    report = verify_folder(tmp_path)
    assert (report.problems, report.unnamed_blocks) == ((), 0)


@pytest.mark.slow
def test_auto_is_the_default_and_measures_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded model does with 4 bits, keys by channel."""
    monkeypatch.delenv("AGENTCACHE_KV")
    model = embedded_model_path(tmp_path)
    with LLM(str(model), cache_dir=tmp_path / "cache") as llm:
        assert llm.model.kv_precision == "4" and llm.model.kv_divergence is not None
        assert llm.generate(PROMPT, GREEDY, agent="a").report.computed_tokens == len(PROMPT)
    monkeypatch.setattr("agentcache.models.precision_runs.PrecisionRuns._forward", None)  # whoever measures again fails
    with LLM(str(model), cache_dir=tmp_path / "cache") as llm:
        assert llm.model.kv_precision == "4"
        assert llm.generate(PROMPT, GREEDY, agent="a").report.computed_tokens <= 4


def test_doctor_keeps_what_it_measures(
    model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that starts behind it measures nothing."""
    model, config = str(model_folder("qwen2", num_hidden_layers=2)), Config(cache_dir=tmp_path / "cache", kv="auto")
    told = inspect_model(config, model).info
    monkeypatch.setattr("agentcache.models.precision_runs.PrecisionRuns._forward", None)  # whoever measures again fails
    with LLM(model, cache_dir=tmp_path / "cache", kv="auto") as llm:
        assert (llm.model.kv_precision, llm.model.kv_divergence) == (told.kv_precision, told.kv_divergence)
