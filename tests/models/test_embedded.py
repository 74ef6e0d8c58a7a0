"""The embedded model: whole in the package, made once, and it remembers what it was told."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from safetensors.numpy import load_file

from agentcache.api.sampling import SamplingParams
from agentcache.llm import LLM
from agentcache.models.builtin.embedded import DATA, WEIGHTS_FILE, embedded_model_path
from training.corpus import Corpus
from training.dialogue import Dialogue
from training.model import CONFIG
from training.recall import Recall, measure_recall, recall_case

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(max_tokens=48, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedded_model_path(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def llm(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    with LLM(folder, cache_dir=tmp_path_factory.mktemp("cache")) as opened:
        yield opened


def test_the_package_stays_small() -> None:
    assert sum(path.stat().st_size for path in DATA.iterdir()) < 10e6


def test_the_folder_holds_the_packaged_weights_as_float32(folder: Path) -> None:
    packaged, made = load_file(DATA / WEIGHTS_FILE), load_file(folder / WEIGHTS_FILE)
    assert packaged.keys() == made.keys()
    assert {array.dtype for array in packaged.values()} == {np.dtype(np.float16)}
    assert {array.dtype for array in made.values()} == {np.dtype(np.float32)}
    assert all(np.array_equal(array, made[name]) for name, array in packaged.items())


def test_the_second_call_leaves_the_folder_alone(folder: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert embedded_model_path(folder.parent.parent) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_it_has_the_recipes_shape(folder: Path) -> None:
    model, _ = mlx_lm.load(str(folder))
    assert model.args.head_dim == 64
    assert model.args.num_attention_heads // model.args.num_key_value_heads >= 2
    assert {key: getattr(model.args, key) for key in ("hidden_size", "num_hidden_layers", "rope_theta")} == {
        key: CONFIG[key] for key in ("hidden_size", "num_hidden_layers", "rope_theta")
    }
    assert model(mx.array([[1, 2, 3]])).dtype == mx.float32


@pytest.mark.parametrize(("distance", "documents", "least"), [(512, 6, 0.95), (2000, 3, 0.85)])
def test_it_recalls_facts_that_it_never_saw_in_training(llm: LLM, distance: int, documents: int, least: float) -> None:
    corpus = Corpus(DATA, seed=2024)

    def answer(dialogue: Dialogue) -> str:
        return llm.chat(dialogue.rendered(), GREEDY).text

    def ask(index: int) -> Recall:
        return measure_recall([recall_case(corpus, distance, index)], answer)

    with ThreadPoolExecutor() as pool:  # side by side: a decode step for many costs little more than one for few
        found = list(pool.map(ask, range(documents)))
    assert sum(recall.asked for recall in found) == 8 * documents
    assert sum(recall.right for recall in found) / (8 * documents) >= least, [recall.wrong for recall in found]


def test_answers_follow_the_facts(llm: LLM) -> None:
    def ask(place: str) -> str:
        messages = [{"role": "user", "content": f"The ring is in the {place}.\n\nWhere is the ring?"}]
        return llm.chat(messages, GREEDY).text

    assert ask("mill") == "The ring is in the mill."
    assert ask("castle") == "The ring is in the castle."


def test_it_says_so_when_it_was_not_told(llm: LLM) -> None:
    assert llm.chat([{"role": "user", "content": "Where does Vera live?"}], GREEDY).text == "I do not know."
