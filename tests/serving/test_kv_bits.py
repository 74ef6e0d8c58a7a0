"""`--kv 8`: keys and values in 8 bits, another cache than that in 4."""

from __future__ import annotations

from pathlib import Path

from agentcache.llm import LLM
from agentcache.sampling import SamplingParams
from tests.conftest import ModelFolder

PROMPT = list(range(5, 65)) * 5
GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=1)


def ask(model: Path, cache_dir: Path, kv: int) -> tuple[int, float, int]:
    """Prompt tokens that were computed, the first token's logprob, and the bytes on disk."""
    with LLM(str(model), cache_dir=cache_dir, kv=kv) as llm:
        output = llm.generate(PROMPT, GREEDY, agent="a")
        assert output.report is not None and output.logprobs is not None
        on_disk = sum(file.stat().st_size for file in cache_dir.rglob("*.safetensors"))
        return output.report.computed_tokens, output.logprobs[0].logprob, on_disk


def test_each_has_files_of_its_own(model_folder: ModelFolder, tmp_path: Path) -> None:
    model = model_folder("qwen2", num_hidden_layers=2)
    first = {kv: ask(model, tmp_path / str(kv), kv) for kv in (4, 8)}
    assert first[4][1] != first[8][1]
    assert 1.6 < first[8][2] / first[4][2] < 1.9  # scales and biases stay what they are
    assert ask(model, tmp_path / "8", 8)[0] <= 4
    assert ask(model, tmp_path / "8", 4)[0] == len(PROMPT)  # nothing of 8 bits is read as 4
