"""The public evaluation harness, unchanged, against the real server, on tasks made on the spot.

lm_eval --model local-completions --model_args base_url=http://127.0.0.1:8000/v1/completions,model=default,...
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from agentcache.kv.packing import Quantisation
from agentcache.server_process import ServerProcess
from agentcache.text.tokenizer import Tokenizer
from tests.live.servers import PATIENCE, complete
from tests.models.reference import Reference

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None or importlib.util.find_spec("tenacity") is None,
    reason="needs lm_eval[api], which with its datasets takes half a gigabyte",
)

DOCUMENTS: list[dict[str, Any]] = [
    {"query": "The cat sat on", "choices": [" the mat", " a chair that is red", " it"], "gold": 0},
    {"query": "What do you say? I say", "choices": [" yes", " no, never", " print(x)"], "gold": 1},
    {"query": "1 2", "choices": [" 3", " 4 5 6", " café"], "gold": 0},
]
CHOICE = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{query}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
GENERATE = """
task: tiny_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{query}}}}"
doc_to_target: "{{{{choices[gold]}}}}"
generation_kwargs: {{until: ["zzz"], max_gen_toks: 12, temperature: 0, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""

Sample = dict[str, Any]


@dataclass(frozen=True)
class Harness:
    """A folder with the tasks, and where results go."""

    folder: Path
    model: Path
    server: ServerProcess

    def run(self, batch_size: int = 1, **model_args: Any) -> dict[str, list[Sample]]:
        """Samples by task."""
        url = f"{self.server.client.url}/v1/completions"
        settings = {"model": "default", "base_url": url, "tokenizer": self.model} | model_args
        command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--log_samples"]
        command += ["--model_args", ",".join(f"{name}={value}" for name, value in settings.items())]
        command += ["--tasks", "tiny_choice,tiny_generate", "--include_path", str(self.folder)]
        command += ["--batch_size", str(batch_size)]
        command += ["--output_path", str(self.folder / "out")]
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(self.folder / "home")}
        done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, timeout=5 * PATIENCE)
        assert done.returncode == 0, done.stderr[-3000:]
        return {task: self._samples(task) for task in ("tiny_choice", "tiny_generate")}

    def _samples(self, task: str) -> list[Sample]:
        [path] = (self.folder / "out").rglob(f"samples_{task}_*.jsonl")
        samples = [json.loads(line) for line in path.read_text().splitlines()]
        path.unlink()
        return sorted(samples, key=lambda sample: int(sample["doc_id"]))


@pytest.fixture(scope="module")
def harness(live_server: ServerProcess, live_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Harness:
    folder = tmp_path_factory.mktemp("lm_eval")
    data = folder / "documents.json"
    data.write_text("\n".join(json.dumps(document) for document in DOCUMENTS))
    for name, text in {"choice": CHOICE, "generate": GENERATE}.items():
        (folder / f"{name}.yaml").write_text(text.format(data=data))
    return Harness(folder, live_model, live_server)


@pytest.fixture(scope="module")
def likelihood(live_model: Path) -> Callable[[str, str], float]:
    """The log likelihood of a continuation by mlx-lm's own model, with keys and values rounded to four bits."""
    tokenizer = Tokenizer.load(live_model)

    def of(query: str, choice: str) -> float:
        start, ids = len(tokenizer.encode(query).ids), tokenizer.encode(query + choice).ids
        logits = Reference(live_model, Quantisation()).logits(np.array(ids))[0]
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return float(sum(logprobs[i - 1, ids[i]].item() for i in range(start, len(ids))))

    return of


VARIANTS: dict[str, dict[str, Any]] = {
    "tokens, one by one": {},
    "tokens, in batches": {"batch_size": 4},
    "tokens, many at once": {"num_concurrent": 6},
    "text": {"tokenized_requests": False},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_harness_gets_the_models_likelihoods_and_words(
    harness: Harness, likelihood: Callable[[str, str], float], variant: str
) -> None:
    samples = harness.run(**VARIANTS[variant])
    for document, sample in zip(DOCUMENTS, samples["tiny_choice"], strict=True):
        said = [float(value) for [[value, _]] in sample["resps"]]
        expected = [likelihood(document["query"], choice) for choice in document["choices"]]
        assert said == pytest.approx(expected, abs=2e-2)
    tokenizer = Tokenizer.load(harness.model)
    for document, sample in zip(DOCUMENTS, samples["tiny_generate"], strict=True):
        ids = tokenizer.encode(str(document["query"])).ids
        direct = complete(harness.server, ids, 12, ignore_eos=False)["choices"][0]["text"]
        assert sample["resps"] == [[direct]]
