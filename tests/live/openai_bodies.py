"""Bodies for OpenAI's client, and how its answers are read."""

from __future__ import annotations

from typing import Any

from agentcache.text.tokenizer import Tokenizer

MESSAGES: list[Any] = [{"role": "user", "content": "Tell me about the cat on the mat."}]
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}


def extras(**fields: Any) -> dict[str, Any]:
    """`extra_body` for a run to the end that shows its token ids."""
    return {"ignore_eos": True, "agentcache": {"return_token_ids": True}} | fields


def decode(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """Text of generated tokens; control tokens show none."""
    shown = [tokenizer.token_bytes(i) for i in token_ids if i not in tokenizer.control_ids | tokenizer.eos_ids]
    return b"".join(shown).decode(errors="replace")
