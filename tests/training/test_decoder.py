"""Cache-conditioned fine-tuning at its smallest: it learns, leaves the base alone, and is served as it was trained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model
from typer.testing import CliRunner

from agentcache.api.sampling import SamplingParams
from agentcache.errors import ConfigError
from agentcache.llm import LLM
from agentcache.models.adapters import RowAdapter
from agentcache.models.builtin.embedded import embedded_model_path
from agentcache.models.loader import load
from agentcache.training.__main__ import app
from agentcache.training.decoder import DecoderRecipe, DecoderTrainer, Progress
from agentcache.training.decoder_data import Example, make_examples, stack_examples
from agentcache.training.decoder_model import FrozenBase, load_base
from tests.conftest import ModelFolder
from tests.marks import slow
from tests.models.driver import Driver
from tests.models.lora_driver import VISIBLE, difference, put

RECIPE = DecoderRecipe(rank=3, scale=2.0, num_layers=6, steps=12, rows=3, learning_rate=1e-2)
# Layers of every kind of attention: norms on keys, biases, fused projections, windows, sinks and experts, latents.
ARCHITECTURES = [
    "qwen3",
    "deepseek_v2",
    slow("gemma3"),
    slow("gpt_oss"),
    slow("qwen2"),
    slow("phi3"),
    slow("mistral_sliding"),
]


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedded_model_path(tmp_path_factory.mktemp("home"))


def polite(base: FrozenBase) -> list[Example]:
    """Answers in a style that the embedded model does not have."""
    conversations = []
    for thing, place in (("key", "box"), ("lamp", "hall"), ("map", "drawer"), ("coin", "well"), ("boat", "harbour")):
        asked = {"role": "user", "content": f"The {thing} is in the {place}. Where is the {thing}?"}
        said = {"role": "assistant", "content": f"Sir: the {thing} is in the {place}."}
        conversations.append({"messages": [asked, said], "tools": None})
    return list(make_examples(conversations, base.tokenizer))


def new_trainer(model: Path, recipe: DecoderRecipe = RECIPE) -> DecoderTrainer:
    base = load_base(str(model))
    return DecoderTrainer(base, recipe, polite(base))


@pytest.fixture(scope="module")
def trained(embedded: Path) -> tuple[DecoderTrainer, list[Progress]]:
    trainer, told = new_trainer(embedded), []
    trainer.run(told.append, every=3)
    return trainer, told


def base_bytes(base: FrozenBase) -> dict[str, bytes]:
    """Every parameter of the base, by the name it had before modules were wrapped."""
    arrays = tree_flatten(base.model.parameters())
    return {name.replace(".original.", "."): np.array(array).tobytes() for name, array in arrays}


def state(trainer: DecoderTrainer) -> dict[str, bytes]:
    return {name: np.array(array).tobytes() for name, array in trainer._state().items()}


@pytest.mark.slow
def test_the_loss_falls(trained: tuple[DecoderTrainer, list[Progress]]) -> None:
    losses = [progress.loss for progress in trained[1]]
    assert [progress.step for progress in trained[1]] == [3, 6, 9, 12]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.slow
def test_the_base_stays_as_it_is(trained: tuple[DecoderTrainer, list[Progress]], embedded: Path) -> None:
    assert base_bytes(trained[0].base) == base_bytes(load_base(str(embedded)))


@pytest.mark.slow
def test_only_the_last_layers_are_adapted(trained: tuple[DecoderTrainer, list[Progress]]) -> None:
    assert {int(name.partition(".")[0]) for name in trained[0].parameters} == set(range(2, 8))


@pytest.mark.slow
def test_training_goes_on_from_a_checkpoint(
    trained: tuple[DecoderTrainer, list[Progress]], embedded: Path, tmp_path: Path
) -> None:
    stopped = new_trainer(embedded)
    for step in range(5):
        stopped.train_on(stopped.batches.batch(step))
    stopped.save(tmp_path)
    resumed = new_trainer(embedded)
    resumed.load(tmp_path)
    assert resumed.step == 5
    assert state(resumed) == state(stopped)
    resumed.run()
    assert resumed.step == RECIPE.steps
    assert all(mx.allclose(resumed.parameters[name], array, atol=1e-3) for name, array in trained[0].parameters.items())


@pytest.mark.parametrize("other", [replace(RECIPE, seed=2), replace(RECIPE, steps=13)])
def test_a_checkpoint_of_another_training_is_refused(
    other: DecoderRecipe, trained: tuple[DecoderTrainer, list[Progress]], embedded: Path, tmp_path: Path
) -> None:
    trained[0].save(tmp_path)
    with pytest.raises(ConfigError, match="another training: (seed|steps)"):
        new_trainer(embedded, other).load(tmp_path)


@pytest.mark.slow
def test_what_was_trained_shows_when_it_is_served(
    trained: tuple[DecoderTrainer, list[Progress]], embedded: Path, tmp_path: Path
) -> None:
    trainer = trained[0]
    trainer.export(tmp_path)
    served = load(str(embedded), kv="4t")
    weights = put(served, tmp_path)
    assert weights.adapter.first_layer == 2
    example = polite(trainer.base)[0]
    ids, start = np.array(example.prompt), len(example.prompt) - 1
    plain = Driver(served).logits(ids, [len(ids)])
    adapted = Driver(served).logits(ids, [len(ids)], adapter=RowAdapter(weights, start))
    assert difference(adapted[-1], plain[-1]) > VISIBLE
    assert mx.array_equal(adapted[:start], plain[:start])
    assert mx.argmax(adapted[-1]).item() == example.answer[0] != mx.argmax(plain[-1]).item()


@pytest.mark.slow
def test_it_answers_as_it_was_taught_from_the_cache_that_base_has_filled(
    trained: tuple[DecoderTrainer, list[Progress]], embedded: Path, tmp_path: Path
) -> None:
    trained[0].export(tmp_path / "polite")
    asked = [{"role": "user", "content": "The ring is in the cellar. Where is the ring?"}]
    sampling = SamplingParams(max_tokens=6, temperature=0.0)
    adapters = {"polite": f"{tmp_path / 'polite'}:prefill-share"}
    with LLM(str(embedded), cache_dir=tmp_path / "cache", adapters=adapters) as llm:
        plain, polite = llm.chat(asked, sampling), llm.chat(asked, sampling, adapter="polite")
    assert polite.text.startswith("Sir:") and not plain.text.startswith("Sir")
    assert polite.report.computed_tokens == 1
    assert polite.report.activated_at == polite.report.prompt_tokens - 1


def ragged_examples(vocabulary: int) -> list[Example]:
    """Prompts of one token, of more than a window of 32, and between."""
    rng = np.random.default_rng(3)
    lengths = [(1, 4), (45, 9), (20, 40)]
    return [Example(*(tuple(rng.integers(0, vocabulary, n).tolist()) for n in pair)) for pair in lengths]


def random_trainer(model: Path) -> DecoderTrainer:
    """A decoder that shows without training."""
    base = load_base(str(model))
    trainer = DecoderTrainer(base, RECIPE, ragged_examples(base.tokenizer.vocab_size))
    keys = mx.random.split(mx.random.key(5), len(trainer.parameters))
    for (name, matrix), key in zip(trainer.parameters.items(), keys, strict=True):
        trainer.parameters[name] = mx.random.normal(matrix.shape, key=key) * 0.2
    return trainer


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_served_from_the_last_prompt_token_on_it_is_what_training_saw(
    architecture: str, model_folder: ModelFolder, tmp_path: Path
) -> None:
    folder = model_folder(architecture)
    trainer = random_trainer(folder)
    trainer.export(tmp_path)
    examples = ragged_examples(trainer.base.tokenizer.vocab_size)
    batch = stack_examples(examples)
    expected = trainer.logits(trainer.parameters, trainer.prefill(batch), batch)
    served = load(str(folder), kv="4t")
    weights = put(served, tmp_path)
    for row, example in enumerate(examples):
        ids, start = np.array(example.prompt + example.answer[:-1]), len(example.prompt) - 1
        adapted = Driver(served).logits(ids, [len(ids)], adapter=RowAdapter(weights, start))[start:]
        # A last bit that differs may round a 4-bit value to its neighbour.
        assert difference(expected[row, : len(example.answer)], adapted) < 5e-3
        plain = Driver(served).logits(ids, [len(ids)])[start:]
        assert difference(adapted, plain) > VISIBLE


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_matrix_learns(architecture: str, model_folder: ModelFolder) -> None:
    trainer = random_trainer(model_folder(architecture))
    batch = stack_examples(ragged_examples(trainer.base.tokenizer.vocab_size))
    gradients = mx.grad(trainer.loss)(trainer.parameters, trainer.prefill(batch), batch)
    assert all(mx.abs(gradient).max().item() > 0 for gradient in gradients.values())
    assert all(mx.isfinite(gradient).all().item() for gradient in gradients.values())


@pytest.mark.parametrize("architecture", ["gemma3", "phi3"])
def test_mlx_lm_takes_the_folder_too(architecture: str, model_folder: ModelFolder, tmp_path: Path) -> None:
    trainer = random_trainer(model_folder(architecture))
    trainer.export(tmp_path)
    model, _ = load_model(model_folder(architecture))
    loaded = dict(tree_flatten(load_adapters(model, str(tmp_path)).parameters()))
    found = [array for name, array in loaded.items() if name.endswith(("lora_a", "lora_b"))]
    assert len(found) == len(trainer.parameters)
    assert all(mx.abs(array).max().item() > 0 for array in found)


def test_no_gradient_goes_through_the_prompt(model_folder: ModelFolder) -> None:
    """The embedding of a token that is only in the prompt changes the loss and yet gets no gradient."""
    trainer = random_trainer(model_folder("qwen3"))  # whose output head is another matrix
    prompt_only, last = 7, 9
    batch = stack_examples([Example((11, prompt_only, last), (5, 3))])
    embeddings = trainer.base.model.model.embed_tokens

    def loss(weight: mx.array) -> mx.array:
        embeddings.weight = weight
        return trainer.loss(trainer.parameters, trainer.base.prefill(mx.array(batch.prompts)), batch)

    weight = embeddings.weight
    gradient = mx.abs(mx.grad(loss)(weight)).max(axis=1)
    assert gradient[last].item() > 0
    assert gradient[prompt_only].item() == 0
    moved = mx.where(mx.arange(len(weight))[:, None] == prompt_only, weight + 1, weight)
    assert abs(loss(moved).item() - loss(weight).item()) > 1e-3


def run_command(*options: Any) -> str:
    result = CliRunner().invoke(app, ["decoder", *map(str, options)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


@pytest.mark.slow
def test_the_command(model_folder: ModelFolder, tmp_path: Path) -> None:
    model, data, out = model_folder("qwen2", num_hidden_layers=2), tmp_path / "data.jsonl", tmp_path / "out"
    data.write_text("\n".join(json.dumps({"prompt": f"What is {n}?", "completion": "A number."}) for n in range(5)))
    options = ("--model", model, "--data", data, "--out", out, "--rank", 2, "--steps", 3, "--longest", 200)
    said = run_command(*options)
    assert "5 answers to learn, 0 left out" in said and "step 3/3" in said
    assert put(load(str(model), kv="4t"), out).adapter.format == "mlx-lm"
    assert "going on from step 3" in run_command(*options)
