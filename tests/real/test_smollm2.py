"""A published checkpoint through the whole of the engine: SmolLM2-135M-Instruct knows facts, and so must its cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agentcache.llm import LLM
from agentcache.sampling import SamplingParams
from tests.real.smollm2 import smollm2_folder

pytestmark = pytest.mark.slow

FACTS = {
    "What is the capital of France?": "The capital of France is Paris.",
    "What is the opposite of hot?": "The opposite of hot is cold.",
    "What is 2+2?": "The answer to this classic math problem is 4.",
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(str(smollm2_folder()), cache_dir=tmp_path_factory.mktemp("cache"), kv="16", max_context=2048) as opened:
        yield opened


@pytest.mark.parametrize("question", FACTS)
def test_facts_are_known(llm: LLM, question: str) -> None:
    said = llm.chat([{"role": "user", "content": question}], SamplingParams(max_tokens=12, temperature=0))
    assert said.text.startswith(FACTS[question])
