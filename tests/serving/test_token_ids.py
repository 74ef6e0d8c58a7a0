"""Token ids that a tokenizer has and the model's embedding has not are refused: MLX would read out of bounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentcache import LLM, SamplingParams
from agentcache.errors import InvalidRequest
from tests.conftest import ModelFolder


@pytest.fixture
def llm(model_folder: ModelFolder, tmp_path: Path) -> LLM:
    folder = model_folder("llama", vocab_size=300, num_hidden_layers=1)
    return LLM(str(folder), cache_dir=tmp_path)


def test_no_row_is_read_that_is_not_there(llm: LLM) -> None:
    with llm:
        size = llm.model.vocab_size
        assert size > 300
        greedy = SamplingParams(max_tokens=3, temperature=0)
        for prompt in ([5, 300], [5, size - 1], [299] * 2000 + [301]):
            for agent in (None, "alice"):
                with pytest.raises(InvalidRequest, match="no embedding for token"):
                    llm.generate(prompt, greedy, agent=agent)
        text = llm.generate([5, 299], greedy, agent="alice")
        assert len(text.token_ids) == 3
        assert max(text.token_ids) < 300
