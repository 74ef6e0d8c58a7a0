"""A random model: the same on every machine, made once, loadable, and dependent on the whole prompt."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest

from agentcache.models.builtin import embedded, random_model
from agentcache.models.builtin.embedded import embedded_config
from agentcache.models.builtin.random_model import random_model_path


def digest(folder: Path) -> str:
    state = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        state.update(path.name.encode())
        state.update(path.read_bytes())
    return state.hexdigest()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model_path(tmp_path_factory.mktemp("home"))


def test_two_homes_get_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    other = random_model_path(tmp_path)
    assert other.name == folder.name
    assert digest(other) == digest(folder)


def test_weights_are_pinned() -> None:
    """A change of the weights without a change of `_RECIPE` would leave old folders in use under the new code."""
    weights = random_model._weights(embedded_config())
    state = hashlib.sha256()
    for name in sorted(weights):
        state.update(weights[name].tobytes())
    assert (random_model._RECIPE, state.hexdigest()[:16]) == (2, "44b3cb13da6c219f")


def test_second_call_leaves_the_folder_alone(folder: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert random_model_path(folder.parent.parent) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_only_the_owner_can_read_it(tmp_path: Path) -> None:
    folder = random_model_path(tmp_path / "home")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert folder.parent.parent.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_racing_makers_agree(tmp_path: Path) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(random_model_path(tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert [path.name for path in found[0].parent.iterdir()] == [found[0].name]


def test_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(embedded, "_write", full)
    with pytest.raises(OSError, match="No space left"):
        random_model_path(tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def test_mlx_lm_loads_it_and_every_token_counts(folder: Path) -> None:
    model, tokenizer = mlx_lm.load(str(folder))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Who keeps the notes?"}], add_generation_prompt=True
    )
    other = [prompt[0], prompt[1] + 1, *prompt[2:]]
    logits, changed = (model(mx.array([ids]))[0, -1] for ids in (prompt, other))
    assert logits.dtype == mx.float32
    assert mx.abs(logits - changed).max().item() > 0.3 * mx.std(logits).item()


def test_greedy_text_is_readable(folder: Path) -> None:
    model, tokenizer = mlx_lm.load(str(folder))
    text = mlx_lm.generate(model, tokenizer, "Every agent writes down", max_tokens=32)
    assert len(text) > 32
    assert "\N{REPLACEMENT CHARACTER}" not in text
    assert all(character.isprintable() or character == "\n" for character in text)


def test_chat_template_shows_roles_and_tools(folder: Path) -> None:
    _, tokenizer = mlx_lm.load(str(folder))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    plain = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert plain == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    with_tools = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    assert with_tools.count("Be brief.") == 1
    assert "look_up" in with_tools
