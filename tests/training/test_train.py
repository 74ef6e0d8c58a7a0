"""The recipe at its smallest: it learns, goes on from a checkpoint, and writes a model that serves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from typer.testing import CliRunner

from agentcache.api.sampling import SamplingParams
from agentcache.llm import LLM
from agentcache.models.builtin.embedded import DATA
from agentcache.text.tokenizer import Tokenizer
from agentcache.training.decoder import Progress
from agentcache.training.decoder_data import make_examples, read_conversations
from training.__main__ import app
from training.corpus import Corpus
from training.export import export
from training.model import CONFIG, RoundedCache, forward
from training.train import RECIPE, Recipe, Stage, Trainer, conversations

pytestmark = pytest.mark.timeout(900)  # a model is trained, though a small one

SMALL = CONFIG | {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
SHORT = {"facts": 0.8, "small_talk": 0.2}
STEPS = Recipe(
    seed=3,
    stages=(Stage(6, (64,), SHORT, rounded=False), Stage(6, (64, 128), SHORT, rounded=True)),
    tokens_a_step=512,
    learning_rate=1e-2,
)


def trainer(recipe: Recipe = STEPS) -> Trainer:
    return Trainer(recipe, SMALL, Corpus(DATA, recipe.seed))


def weights(of: Trainer) -> dict[str, np.ndarray]:
    return {name: np.array(array) for name, array in tree_flatten(of.parameters)}


def state_of(of: Trainer) -> dict[str, bytes]:
    """Parameters and the optimizer's moments, bit by bit."""
    return {name: np.array(array).tobytes() for name, array in tree_flatten([of.parameters, of.optimizer.state])}


def distance(one: Trainer, other: Trainer) -> float:
    """Mean distance of the parameters."""
    theirs = weights(other)
    return float(np.mean([np.abs(array - theirs[name]).mean() for name, array in weights(one).items()]))


@pytest.fixture(scope="module")
def trained() -> tuple[Trainer, list[Progress]]:
    made, told = trainer(), []
    made.run(report=told.append, every=3)
    return made, told


@pytest.mark.slow
def test_the_loss_falls(trained: tuple[Trainer, list[Progress]]) -> None:
    losses = [progress.loss for progress in trained[1]]
    assert [progress.step for progress in trained[1]] == [3, 6, 9, 12]
    assert losses[0] > losses[1] > losses[-1]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.slow
def test_training_goes_on_from_a_checkpoint(trained: tuple[Trainer, list[Progress]], tmp_path: Path) -> None:
    stopped = trainer()
    batches = stopped._batches(workers=0)
    for _ in range(7):  # in the second stage
        stage, batch = next(batches)
        stopped.train_on(batch, stage.rounded)
    stopped.save(tmp_path)
    resumed = trainer()
    resumed.load(tmp_path)
    assert resumed.step == 7
    assert state_of(resumed) == state_of(stopped)
    resumed.run()
    assert resumed.step == STEPS.steps
    # Sums may be taken in another order, and Adam makes a step of full size of the smallest gradient: so not bit-equal.
    assert distance(resumed, trained[0]) < 0.1 * distance(trainer(), trained[0])


def test_another_seed_gives_another_model() -> None:
    one, other = weights(trainer()), weights(trainer(replace(STEPS, seed=4)))
    assert any(not np.array_equal(one[name], other[name]) for name in one)


def test_keys_and_values_are_read_as_the_cache_holds_them() -> None:
    keys = mx.random.normal((1, 2, 5, 64), key=mx.random.key(0))
    read, _ = RoundedCache().update_and_fetch(keys, keys)
    held = mx.dequantize(*mx.quantize(keys, group_size=64, bits=4), group_size=64, bits=4)
    assert mx.allclose(read, held, atol=1e-6)
    assert not mx.allclose(read, keys, atol=1e-3)
    gradient = mx.grad(lambda x: RoundedCache().update_and_fetch(x, x)[0].sum())(keys)
    assert mx.array_equal(gradient, mx.ones_like(keys))  # straight through


@pytest.mark.slow
def test_the_exported_model_serves_what_was_trained(trained: tuple[Trainer, list[Progress]], tmp_path: Path) -> None:
    made = trained[0]
    size = export(made, tmp_path / "model")
    assert size < 2.2 * sum(array.size for array in weights(made).values())
    prompt = [5, 6, 7, 8, 9, 10, 11]
    with LLM(str(tmp_path / "model"), cache_dir=tmp_path / "cache") as llm:
        said = llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    logits = forward(made.model, made.parameters, mx.array([prompt]), mx.float32, rounded=True)
    assert said.token_ids[0] == mx.argmax(logits[0, -1]).item()


def test_the_recipe_is_long_enough_to_be_worth_its_name() -> None:
    assert RECIPE.steps > 10_000
    assert RECIPE.scaled(0.001).steps >= 3
    assert max(RECIPE.stages[-1].lengths) > 2000
    assert RECIPE.stages[-1].rounded


def test_documents_are_written_as_the_training_of_decoders_reads_them(tmp_path: Path) -> None:
    written = [tmp_path / name for name in ("one.jsonl", "same.jsonl", "other.jsonl")]
    for path, seed in zip(written, (3, 3, 4), strict=True):
        result = CliRunner().invoke(app, ["documents", "--out", str(path), "--count", "2", "--seed", str(seed)])
        assert result.exit_code == 0
    assert written[0].read_text() == written[1].read_text() != written[2].read_text()
    read = list(read_conversations(written[0]))
    assert read == list(conversations(Corpus(DATA, 3), 2))
    assert list(make_examples(read, Tokenizer.load(DATA)))
