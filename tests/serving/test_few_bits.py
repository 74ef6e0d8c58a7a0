"""`--kv 3` and `2.5`: smaller files than in 4 bits, and one answer wherever the cache has been."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from agentcache.llm import LLM, Completion
from tests.conftest import ModelFolder
from tests.marks import slow
from tests.serving.conversation import greedy, make_ids, open_llm, outcome

PROMPT = make_ids(900)
NEXT = make_ids(40, seed=1)


def file_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in (folder / "blocks").rglob("*.safetensors"))


@pytest.mark.parametrize(("kv", "kv_bits", "beside_4"), [("3", 3, 0.91), slow("2.5", 2.5, 0.865)])
def test_answers_are_the_same_hot_evicted_and_restarted(
    kv: str, kv_bits: float, beside_4: float, model_folder: ModelFolder, tmp_path: Path
) -> None:
    """Two of four blocks are sealed."""
    model = model_folder("llama", num_hidden_layers=2)

    def ask(llm: LLM, prompt: Sequence[int], how: str) -> Completion:
        return llm.generate(list(prompt), greedy(8, logprobs=2), agent=how, salt=how)

    with open_llm(model, tmp_path / "4", kv="4") as llm:
        four = ask(llm, PROMPT, "hot")
        size_of_four = file_bytes(tmp_path / "4")
    with open_llm(model, tmp_path / kv, kv=kv) as llm:
        assert llm.model.kv_bits == kv_bits
        first = ask(llm, PROMPT, "hot")
        assert outcome(first) != outcome(four)
        assert file_bytes(tmp_path / kv) / size_of_four == pytest.approx(beside_4, abs=0.02)
        again = [*PROMPT, *first.token_ids, *NEXT]
        hot = ask(llm, again, "hot")
        for how in ("evicted", "restarted"):
            assert outcome(ask(llm, PROMPT, how)) == outcome(first)
        llm.evict("evicted")
        evicted = ask(llm, again, "evicted")
    with open_llm(model, tmp_path / kv, kv=kv) as llm:
        restarted = ask(llm, again, "restarted")
    assert outcome(hot) == outcome(evicted) == outcome(restarted)
    assert hot.report.computed_tokens == restarted.report.computed_tokens < 60
    assert hot.report.restored_bytes == 0 < restarted.report.restored_bytes
