"""Which format a model's replies have is found in its tokens and its chat template."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentcache.api.model import HARMONY, ReplyFormat
from agentcache.text.replies.find_format import find_format
from agentcache.text.tokenizer import Tokenizer
from tests.reply_formats import FAMILIES
from tests.text.templates import TEMPLATES
from tests.tokenizers_factory import CHATML, byte_bpe

DIALECT_OF = {
    "qwen3": "json_tools",
    "hermes, markers in pieces": "json_tools",
    "qwen3 coder": "qwen3_coder",
    "bare function": "functions",
    "glm": "glm47",
    "minimax": "minimax_m2",
    "deepseek": "deepseek",
    "closing marker only": None,
    "kimi": "kimi_k2",
    "mistral": "mistral",
    "llama": "llama3",
    "granite": "granite",
    "gemma": "gemma4",
    "function gemma": "function_gemma",
    "lfm": "pythonic",
    "longcat": "longcat",
    "harmony": HARMONY,
}
THINK = ("<think>", "</think>")


@pytest.mark.parametrize("name", list(FAMILIES))
def test_a_folder_tells_the_format(name: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(FAMILIES[name].write(tmp_path))
    assert tokenizer.reply_format.dialect == DIALECT_OF[name]
    known = {token.name: token.is_shown for token in tokenizer.reply_format.tokens}
    assert all(not known.get(marker, False) for marker in FAMILIES[name].special)
    assert tokenizer.reply_format.thinks_first == (name == "closing marker only")


@pytest.mark.parametrize(
    ("template", "dialect"), [("hermes", "json_tools"), ("deepseek", "deepseek"), ("chatml", None)]
)
def test_a_template_tells_the_dialect(template: str, dialect: str | None) -> None:
    assert find_format(TEMPLATES[template], {}, None).dialect == dialect


def test_without_template_and_markers_there_is_no_format(tmp_path: Path) -> None:
    assert find_format(CHATML, {}, None) == ReplyFormat(thoughts=(THINK,))
    assert not find_format("", {"<|im_end|>": (2, True)}, None).is_known
    assert Tokenizer.load(byte_bpe(tmp_path, chat_template=None)).reply_format.thoughts == (THINK,)


def test_gpt_oss_ends_with_a_call_whatever_its_folder_says(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(FAMILIES["harmony"].write(tmp_path))
    ends = {tokenizer.token_bytes(token).decode() for token in tokenizer.eos_ids}
    assert {"<|return|>", "<|call|>"} <= ends and "<|end|>" not in ends
