"""What a turn costs does not depend on how long the conversation is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentcache.agents.table import AgentTable
from agentcache.api.request import ChatPrompt
from agentcache.blocks.keys import BLOCK_SIZE, Namespace
from agentcache.blocks.origin_paths import name_blocks, spans
from agentcache.blocks.transcript import Encoding, Transcript
from agentcache.gateway.prepare import match, read_prompt
from agentcache.kv.block_layout import Array
from agentcache.kv.spec import CacheSpec
from agentcache.llm import LLM
from agentcache.models.loader import LoadedModel
from agentcache.store.block_file import BlockHeader, data_bytes, make_header
from agentcache.store.store import BlockWrite, Store
from tests.conftest import ModelFolder
from tests.marks import slow
from tests.serving import inside
from tests.serving.conversation import DISK_BUDGET, Chat, make_text, open_llm
from tests.store.store_cases import load_agents, tensor_views

FP16_BYTES_PER_TOKEN = 4 * 2 * 2 * 128 * 2  # layers, key and value heads, head dimension, bytes
Q4_BYTES_PER_TOKEN = FP16_BYTES_PER_TOKEN * 9 // 32


@pytest.fixture
def model(model_folder: ModelFolder) -> Path:
    return model_folder("llama", head_dim=128, num_attention_heads=2)


def long_chat(num_tokens: int) -> Chat:
    """A first exchange of about `num_tokens` tokens."""
    text = make_text(200)
    question = {"role": "user", "content": text * (num_tokens // 380)}
    return Chat(messages=[question, {"role": "assistant", "content": "Yes."}])


def save_without_computing(model: Path, cache_dir: Path, chat: Chat) -> int:
    """Put the chat's agent on disk with random keys and values, which costs no prefill; returns how long it is."""
    with open_llm(model, cache_dir) as llm:
        loaded = inside.loaded_model(inside.engine_of(llm))
    plain = read_prompt(ChatPrompt(chat.messages[:1]), None, loaded.tokenizer)
    prompt = match(plain, Transcript.empty(), loaded.tokenizer).transcript
    answer = loaded.tokenizer.encode(chat.messages[1]["content"])
    transcript = prompt.extended(chat.messages[1]["content"], answer.ids, answer.ends, "generated")
    writes = list(make_blocks(loaded, transcript))
    chains = dict.fromkeys(write.header.chain for write in writes)
    store = Store(cache_dir, loaded.spec, loaded.fingerprint, disk_budget=DISK_BUDGET)
    load_agents(store)
    store.write_blocks(writes)
    blank = AgentTable(loaded.fingerprint).new("alice")
    blocks = name_blocks(chains, spans(len(transcript), None, len(loaded.spec.groups)))
    store.save_agent(replace(blank, transcript=transcript, num_saved=len(transcript), blocks=blocks))
    store.close()
    return len(transcript)


def make_blocks(loaded: LoadedModel, transcript: Transcript) -> Iterator[BlockWrite]:
    """All blocks of the transcript, the groups of one position together."""
    random, parent = np.random.default_rng(0), Namespace(loaded.fingerprint, loaded.spec.digest, "").root
    for position, start in enumerate(range(0, len(transcript), BLOCK_SIZE)):
        ids = transcript.ids[start : start + BLOCK_SIZE]
        headers = [make_header(parent, group.name, position, ids) for group in loaded.spec.groups]
        for header in headers:
            yield BlockWrite(header, draw(random, loaded.spec, header))
        parent = headers[0].chain


def draw(random: np.random.Generator, spec: CacheSpec, header: BlockHeader) -> Array:
    data = random.integers(0, 256, data_bytes(spec, header), np.uint8)
    for tensor in tensor_views(spec, header, data).values():
        if tensor.dtype != np.uint32:
            tensor[...] = random.uniform(-0.1, 0.1, tensor.shape)
    return data


@pytest.mark.parametrize("num_tokens", [1200, slow(6000), slow(16000)])
def test_a_turn_writes_and_reads_only_what_it_adds(num_tokens: int, model: Path, tmp_path: Path) -> None:
    chat = long_chat(num_tokens)
    held = save_without_computing(model, tmp_path, chat)
    assert num_tokens * 0.7 < held < num_tokens * 1.3
    with open_llm(model, tmp_path) as llm:
        encoded = count_encoded(llm)
        for number, text in enumerate(["Go on. " + make_text(100, seed=7), "And?"]):
            before, sizes = llm.stats(), len(encoded)
            turn = chat.turn(llm, text, max_tokens=8)
            stats, report = llm.stats(), turn.report
            num_new = report.prompt_tokens + 8 - held
            assert report.match == "EXTEND"
            assert report.computed_tokens <= num_new + 16
            assert report.cache_state == ("hot" if number else "warm")
            assert stats.computed_tokens - before.computed_tokens == report.computed_tokens + 7
            assert stats.written_bytes - before.written_bytes == report.written_bytes
            assert report.written_bytes <= 1.15 * Q4_BYTES_PER_TOKEN * num_new + BLOCK_SIZE * Q4_BYTES_PER_TOKEN
            assert stats.read_bytes - before.read_bytes <= (0 if number else 1.05 * Q4_BYTES_PER_TOKEN * held + 4000)
            assert sum(encoded[sizes:]) <= len(text) + 120
            held = report.prompt_tokens + 8


def count_encoded(llm: LLM) -> list[int]:
    """Gets the number of characters of every text that is tokenised from now on."""
    tokenizer, sizes = inside.tokenizer(inside.engine_of(llm)), []
    encode: Callable[..., Encoding] = tokenizer.encode

    def count(text: str, *options: Any, **named: Any) -> Encoding:
        sizes.append(len(text))
        return encode(text, *options, **named)

    tokenizer.encode = count
    return sizes


@pytest.mark.slow
def test_a_full_block_takes_4_5_bits_per_value(model: Path, tmp_path: Path) -> None:
    chat = long_chat(1000)
    with open_llm(model, tmp_path) as llm:
        chat.turn(llm, "Go on.")
        engine = inside.engine_of(llm)
        full = [node for node in inside.nodes(engine) if node.is_full]
        assert len(full) >= 3
        slots = inside.mean_slots(engine)
        in_ram = sum(inside.array_bytes(engine)) / slots
        assert in_ram <= 0.285 * FP16_BYTES_PER_TOKEN * BLOCK_SIZE
        assert llm.stats().ram_bytes == in_ram * slots
        sizes = sorted(path.stat().st_size for path in (tmp_path / "blocks").glob("*/*.safetensors"))
        num_groups = len(inside.loaded_model(engine).spec.groups)
        on_disk = sizes[-num_groups * len(full) :]
        assert on_disk[0] > 0.28 * FP16_BYTES_PER_TOKEN * BLOCK_SIZE / num_groups
        assert on_disk[-1] <= 0.29 * FP16_BYTES_PER_TOKEN * BLOCK_SIZE / num_groups
