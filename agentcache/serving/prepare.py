"""From a request's prompt to token ids, against what its agent holds. Runs on a worker thread, beside the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentcache.blocks.prefix_match import PromptMatch, Spelling, Transcript, match_text, match_tokens
from agentcache.errors import InvalidRequest
from agentcache.models.tokenizer import Tokenizer
from agentcache.serving.request import ChatPrompt, Prompt, TokenPrompt


def prepare(prompt: Prompt, transcript: Transcript | None, system: str | None, tokenizer: Tokenizer) -> PromptMatch:
    """The prompt as tokens, keeping those the agent has.

    Args:
        transcript: the agent's, empty for a new one; None for a request without agent, whose text nobody will need.
        system: put in front as a system message where the messages have none.

    Raises:
        InvalidRequest: the messages do not fit the chat template, or the text or token ids are none.
    """
    if isinstance(prompt, TokenPrompt):
        _check_ids(prompt.token_ids, tokenizer.vocab_size)
        spell = _no_text if transcript is None else tokenizer.spell
        return match_tokens(transcript or Transcript.empty(), prompt.token_ids, spell)
    if isinstance(prompt, ChatPrompt):
        messages = _with_system(prompt.messages, system)
        text = tokenizer.render_chat(
            messages, prompt.tools, add_generation_prompt=prompt.add_generation_prompt, **prompt.template_kwargs
        )
    else:
        text = tokenizer.raw_prompt(prompt.text)
    return match_text(transcript or Transcript.empty(), text, tokenizer.encode, tokenizer.control_ids)


def _no_text(token_ids: Sequence[int]) -> Spelling:
    return Spelling("", [0] * len(token_ids))


def _check_ids(token_ids: list[int], vocab_size: int) -> None:
    wrong = next((i for i, token in enumerate(token_ids) if not 0 <= token < vocab_size), None)
    if wrong is not None:
        message = f"token id {token_ids[wrong]} is outside the vocabulary of {vocab_size}"
        raise InvalidRequest(message, param=f"prompt[{wrong}]")


def _with_system(messages: list[dict[str, Any]], system: str | None) -> list[dict[str, Any]]:
    if system is None or (messages and messages[0].get("role") == "system"):
        return messages
    return [{"role": "system", "content": system}, *messages]
