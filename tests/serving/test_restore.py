"""A restored agent goes on exactly as one that was never stopped: the same tokens, the same logprobs bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from itertools import product, starmap
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from agentcache.agents import restore
from agentcache.kv.arena import GroupArena
from agentcache.llm import Completion
from tests.conftest import ModelFolder
from tests.device_marks import steady_sums
from tests.marks import slow
from tests.serving import inside
from tests.serving.block_damage import block_files, flip
from tests.serving.conversation import (
    Chat,
    TokenTalk,
    cold_ids,
    greedy,
    make_ids,
    make_text,
    open_llm,
    outcome,
)
from tests.tiny import fewer_layers

MODELS = [
    slow("llama", "byte_bpe_bos"),
    slow("mistral_sliding", "metaspace"),
    slow("qwen2", "byte_bpe"),
    slow("qwen3", "byte_bpe"),
    slow("qwen3_moe", "byte_bpe"),
    slow("gemma3_text", "metaspace"),
    slow("gpt_oss", "byte_bpe_bos"),
    slow("phi3_partial", "byte_bpe_bos"),
    slow("granite", "byte_bpe_bos"),
    ("deepseek_v2", "byte_bpe_bos"),
]
CHATS = [
    ("qwen3", "byte_bpe"),
    slow("qwen3", "byte_bpe_bos"),
    slow("qwen3", "metaspace"),
    slow("gemma3_text", "metaspace"),
    slow("gpt_oss", "byte_bpe"),
]


def play(model: Path, cache_dir: Path, talk: Any, turns: Sequence[Any], *, restart: bool) -> list[Completion]:
    """All turns of a conversation, in one process life or in one each."""
    if restart:
        return [completion for turn in turns for completion in play(model, cache_dir, talk, [turn], restart=False)]
    with open_llm(model, cache_dir) as llm:
        return [talk.turn(llm, turn) for turn in turns]


def assert_restored(restored: Completion, kept: Completion) -> None:
    """The same outcome from the same reuse, whether it came from files or from RAM."""
    assert outcome(restored) == outcome(kept)
    assert restored.prompt_token_ids == kept.prompt_token_ids
    assert restored.report.computed_tokens == kept.report.computed_tokens
    assert restored.report.cached_tokens == kept.report.cached_tokens
    assert restored.report.cache_state == "warm"
    assert restored.report.restored_bytes > 0


@pytest.mark.parametrize(("architecture", "tokenizer"), MODELS)
def test_turns_in_exact_lengths_after_a_restart(
    architecture: str, tokenizer: str, model_folder: ModelFolder, tmp_path: Path
) -> None:
    model, lengths = model_folder(architecture, tokenizer), [257, 300, 513]
    kept = play(model, tmp_path / "kept", TokenTalk(), lengths, restart=False)
    restored = play(model, tmp_path / "restored", TokenTalk(), lengths, restart=True)
    assert outcome(restored[0]) == outcome(kept[0])
    for left, right in zip(restored[1:], kept[1:], strict=True):
        assert_restored(left, right)
        assert left.report.saved
    with open_llm(model, tmp_path / "kept") as cold:
        assert cold_ids(cold, kept[-1].prompt_token_ids, 3) == kept[-1].token_ids


@pytest.mark.parametrize("tokens_per_second", [slow(1), 10**6])
def test_a_new_prompt_on_a_machine_of_another_pace(
    tokens_per_second: float, model_folder: ModelFolder, tmp_path: Path
) -> None:
    """One server has just started, one has found out how fast its machine is: both cut a prompt alike."""
    model, prompts = model_folder("llama"), [make_ids(700, seed=seed) for seed in range(2)]
    with open_llm(model, tmp_path / "new") as llm:
        expected = [outcome(llm.generate(prompt, greedy(3))) for prompt in prompts]
    with open_llm(model, tmp_path / "old") as llm:
        for prompt, of_a_new_one in zip(prompts, expected, strict=True):
            for _ in range(20):
                inside.note_chunk(inside.engine_of(llm), 256 / tokens_per_second, 256)
            assert outcome(llm.generate(prompt, greedy(3))) == of_a_new_one


@pytest.mark.parametrize(("architecture", "tokenizer"), CHATS)
def test_chats_after_a_restart(architecture: str, tokenizer: str, model_folder: ModelFolder, tmp_path: Path) -> None:
    model = model_folder(architecture, tokenizer, **fewer_layers(architecture))
    texts = [make_text(150), make_text(20, seed=1), "And now?"]
    kept = play(model, tmp_path / "kept", Chat(), texts, restart=False)
    restored = play(model, tmp_path / "restored", Chat(), texts, restart=True)
    assert outcome(restored[0]) == outcome(kept[0])
    for left, right in zip(restored[1:], kept[1:], strict=True):
        assert_restored(left, right)


@pytest.mark.parametrize(
    ("architecture", "length"),
    [
        *(("qwen2", 255), slow("gpt_oss", 256), slow("qwen2", 256), slow("gpt_oss", 255)),
        *starmap(slow, product(["qwen2", "gpt_oss"], [257, 512])),
    ],
)
def test_a_turn_that_ends_around_a_block_border(
    architecture: str, length: int, model_folder: ModelFolder, tmp_path: Path
) -> None:
    model, lengths = model_folder(architecture), [length, length + 5, length + 40]
    kept = play(model, tmp_path / "kept", TokenTalk(), lengths, restart=False)
    restored = play(model, tmp_path / "restored", TokenTalk(), lengths, restart=True)
    assert list(map(outcome, restored)) == list(map(outcome, kept))
    assert [c.report.computed_tokens for c in restored] == [c.report.computed_tokens for c in kept]


@pytest.mark.parametrize("window", [slow(100), slow(256), slow(300)])
def test_windows_of_other_widths(window: int, model_folder: ModelFolder, tmp_path: Path) -> None:
    model, lengths = model_folder("gpt_oss", sliding_window=window), [90, 258, 400, 540]
    kept = play(model, tmp_path / "kept", TokenTalk(), lengths, restart=False)
    restored = play(model, tmp_path / "restored", TokenTalk(), lengths, restart=True)
    assert list(map(outcome, restored)) == list(map(outcome, kept))


@pytest.mark.parametrize("architecture", [slow("qwen3"), "gemma3_text", slow("gpt_oss"), slow("deepseek_v2")])
def test_after_evict_and_restore(architecture: str, model_folder: ModelFolder, tmp_path: Path) -> None:
    model = model_folder(architecture, **fewer_layers(architecture))
    kept = play(model, tmp_path / "kept", TokenTalk(), [300, 520], restart=False)
    with open_llm(model, tmp_path / "evicted") as llm:
        talk = TokenTalk()
        talk.turn(llm, 300)
        assert llm.agent("alice").cache_state == "hot"
        evicted = llm.evict("alice")
        assert (evicted.cache_state, evicted.ram_bytes) == ("warm", 0)
        restored = llm.restore("alice")
        assert (restored.cache_state, restored.tokens) == ("hot", 300)
        assert restored.restored_bytes > 0
        completion = talk.turn(llm, 520)
        assert completion.report.cache_state == "hot"
        assert completion.report.restored_bytes == 0
    assert outcome(completion) == outcome(kept[1])


@steady_sums
@pytest.mark.slow
def test_more_files_than_there_are_buffers(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file waits for a buffer that another one has left; one of them is wrong, and so no use to anybody."""
    monkeypatch.setattr(GroupArena, "memory", lambda arena: None)  # as where a device has memory of its own
    monkeypatch.setattr(restore, "_BUFFERS_BYTES", 1)  # two, then
    monkeypatch.setattr(restore, "_BATCH_BLOCKS", 1)
    kept = play(model, tmp_path / "kept", TokenTalk(), [1300, 1400], restart=False)
    restored = play(model, tmp_path / "restored", TokenTalk(), [1300, 1400], restart=True)
    assert_restored(restored[1], kept[1])
    cache_dir, talk = tmp_path / "damaged", TokenTalk()
    play(model, cache_dir, talk, [1300], restart=False)
    flip(block_files(cache_dir)[2], -1)
    [damaged] = play(model, cache_dir, talk, [1400], restart=False)
    assert damaged.token_ids == kept[1].token_ids
    if mx.default_device() == mx.cpu:  # elsewhere sums of other chunks are in another order
        assert outcome(damaged) == outcome(kept[1])
    assert damaged.report.computed_tokens > kept[1].report.computed_tokens


@pytest.mark.parametrize(
    ("architecture", "restart"),
    [
        *(("qwen3", False), slow("deepseek_v2", True), slow("qwen3", True), slow("deepseek_v2", False)),
        *(slow("gemma3_text", False), slow("gemma3_text", True)),
    ],
)
def test_after_a_fork(architecture: str, restart: bool, model_folder: ModelFolder, tmp_path: Path) -> None:
    """Both go on, differently, and neither sees the other's new tokens."""
    model = model_folder(architecture, **fewer_layers(architecture))
    kept = play(model, tmp_path / "kept", TokenTalk(), [300, 420], restart=False)
    talk = TokenTalk()
    with open_llm(model, tmp_path / "forked") as llm:
        talk.turn(llm, 300)
        before = llm.stats()
        assert llm.fork("alice", "bob").tokens == 300
        assert llm.stats().blocks_cached == before.blocks_cached
        other = talk.fork("bob")
        if not restart:
            other_turn, turn = other.turn(llm, 500), talk.turn(llm, 420)
    if restart:
        other_turn = play(model, tmp_path / "forked", other, [500], restart=False)[0]
        turn = play(model, tmp_path / "forked", talk, [420], restart=False)[0]
    assert outcome(turn) == outcome(kept[1])
    with open_llm(model, tmp_path / "kept") as cold:
        assert cold_ids(cold, other_turn.prompt_token_ids, 3) == other_turn.token_ids
    assert turn.report.cached_tokens.own >= 256
    assert other_turn.report.cached_tokens.own >= 256


@pytest.mark.parametrize("architecture", [slow("qwen3"), slow("gemma3_text")])
def test_after_kill_9(architecture: str, model_folder: ModelFolder, tmp_path: Path) -> None:
    """What a process said is finished is there after it was killed."""
    model, lengths = model_folder(architecture, **fewer_layers(architecture)), [258, 300, 520]
    kept = play(model, tmp_path / "kept", TokenTalk(), lengths, restart=False)
    arguments = [sys.executable, "-m", "tests.serving.finish_turns", model, tmp_path / "killed", *lengths[:2]]
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}
    with subprocess.Popen(map(str, arguments), stdout=subprocess.PIPE, text=True, cwd=root, env=environment) as child:
        assert child.stdout is not None
        ids = json.loads(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
    assert ids == [*kept[1].prompt_token_ids, *kept[1].token_ids]
    assert_restored(play(model, tmp_path / "killed", TokenTalk(ids=ids), lengths[2:], restart=False)[0], kept[2])
