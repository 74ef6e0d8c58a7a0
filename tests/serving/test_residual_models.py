"""Residual answers of every kind of attention that can give them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adapters_factory import EVERYTHING
from tests.conftest import ModelFolder
from tests.serving.adapter_cases import all_ids
from tests.serving.conversation import check_same, make_ids
from tests.serving.residual_cases import computed, open_residual, residual_folders, say
from tests.tiny import ARCHITECTURES, VARIANTS

pytestmark = pytest.mark.slow  # of all that go on above the model, qwen3's are in test_residual.py

PROMPT = make_ids(620)


# Those with biases everywhere and a nested config count as kinds of their own: adapters name and change their parts.
KINDS = {*ARCHITECTURES} - {*VARIANTS} - {"deepseek_v2", "gemma3_text", "qwen3"} | {"llama_bias", "gemma3"}


@pytest.mark.parametrize("architecture", sorted(KINDS))
def test_a_second_turn_is_the_same_hot_evicted_restarted_and_fresh(
    model_folder: ModelFolder, tmp_path: Path, architecture: str
) -> None:
    model = model_folder(architecture)
    folders = residual_folders(tmp_path / "adapters", model, ("ann", "bob"), targets=EVERYTHING)
    with open_residual(model, tmp_path / "cache", folders) as llm:
        first = say(llm, PROMPT, "ann", agent="alice")
        say(llm, PROMPT, "bob", agent="bert")
        ids = [*all_ids(first), *make_ids(30, seed=1)]
        hot = say(llm, ids, "ann", 8, agent="alice")
        llm.evict("alice")
        warm = say(llm, ids, "ann", 8, agent="alice")
    with open_residual(model, tmp_path / "cache", folders) as llm:
        again = say(llm, ids, "ann", 8, agent="alice")
        fresh = say(llm, ids, "ann", 8, salt="fresh")
    assert [computed(said) for said in (hot, warm, again, fresh)] == [(31, 31), (1, 1), (1, 1), (len(ids), len(ids))]
    for other in (warm, again, fresh):
        check_same(other, hot)
