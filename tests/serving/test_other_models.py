"""What is cached serves the same model and the same salt, and nobody else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import ModelFolder
from tests.marks import slow
from tests.serving.block_damage import block_files, metadata_of
from tests.serving.conversation import greedy, make_ids, open_llm, outcome
from tests.serving.saved import LENGTHS, Saved, check_answer
from tests.tokenizers_factory import byte_bpe


@pytest.mark.slow
def test_blocks_of_another_model_of_equal_shape(saved: Saved, tmp_path: Path) -> None:
    """Its files under this model's names, with the same tokens at the same places."""
    cache_dir = saved.copy(tmp_path / "cache")
    others = block_files(saved.other_cache_dir)
    for mine in block_files(cache_dir):
        place = [metadata_of(mine)[key] for key in ("num_blocks", "group")]
        other = next(path for path in others if [metadata_of(path)[key] for key in ("num_blocks", "group")] == place)
        mine.write_bytes(other.read_bytes())
    check_answer(saved, cache_dir, quarantined=True)


@pytest.mark.slow
def test_two_models_take_turns_in_one_folder(saved: Saved, model_folder: ModelFolder, tmp_path: Path) -> None:
    """Neither sees the other's agents or blocks, and both find their own again."""
    cache_dir = saved.copy(tmp_path / "cache")
    other = model_folder("mistral", seed=1, num_hidden_layers=2)
    with open_llm(other, cache_dir) as llm:
        assert llm.agents() == []
        prompt = list(saved.third.prompt_token_ids)
        cold = llm.generate(prompt, greedy(3), agent="alice")
        assert cold.report.computed_tokens == len(prompt)
    check_answer(saved, cache_dir, quarantined=False)
    with open_llm(other, cache_dir) as llm:
        [alice] = llm.agents()
        assert alice.cache_state == "warm"


def test_another_tokenizer_is_another_model(saved: Saved, tmp_path: Path) -> None:
    cache_dir, model = saved.copy(tmp_path / "cache"), Path(shutil.copytree(saved.model, tmp_path / "model"))
    path = model / "tokenizer.json"
    path.write_text(path.read_text().replace('"<think>"', '"<thinking>"'))
    with open_llm(model, cache_dir) as llm:
        turn = saved.talk.fork("alice").turn(llm, LENGTHS[2])
        assert turn.report.match == "NEW"
        assert turn.report.computed_tokens == turn.report.prompt_tokens
        assert llm.stats().quarantined == 0
    check_answer(saved, cache_dir, quarantined=False)


@pytest.mark.parametrize("change", ["another", slow("none")])
def test_with_another_template_it_is_the_same_model(change: str, saved: Saved, tmp_path: Path) -> None:
    cache_dir, model = saved.copy(tmp_path / "cache"), Path(shutil.copytree(saved.model, tmp_path / "model"))
    if change == "none":
        byte_bpe(model, vocab_size=500, chat_template=None)
    else:
        path = model / "tokenizer_config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | {"chat_template": config["chat_template"] + "\n"}))
    with open_llm(model, cache_dir) as llm:
        turn = saved.talk.fork("alice").turn(llm, LENGTHS[2])
        assert outcome(turn) == outcome(saved.third)
        assert (turn.report.match, turn.report.cache_state) == ("EXTEND", "warm")


def test_the_same_model_under_another_name_hits(saved: Saved, tmp_path: Path) -> None:
    cache_dir, model = saved.copy(tmp_path / "cache"), Path(shutil.copytree(saved.model, tmp_path / "renamed"))
    with open_llm(model, cache_dir) as llm:
        turn = saved.talk.fork("alice").turn(llm, LENGTHS[2])
        assert outcome(turn) == outcome(saved.third)
        assert turn.report.cache_state == "warm"


def test_salts_do_not_share(saved: Saved, tmp_path: Path) -> None:
    ids = make_ids(300, seed=9)
    with open_llm(saved.model, tmp_path) as llm:
        costs = [llm.generate(ids, greedy(1), salt=salt).report.computed_tokens for salt in ("", "", "a", "a", "b")]
    assert [cost == 300 for cost in costs] == [True, False, True, False, True]
