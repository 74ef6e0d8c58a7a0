"""What becomes of each field of a request's body, by dialect: the one table that `docs/server.md` shows.

A field is obeyed, has no bearing on an answer of this server, or is refused unless its value asks for nothing. All
others are noted as without effect, so that nothing is ignored in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from agentcache.server import thinking
from agentcache.server.answer_form import FORM_FIELDS
from agentcache.server.context import Call

_MOST_NAMES = 8  # of unknown fields in a note
_LONGEST_NAME = 40


class Dialect(StrEnum):
    """What a route speaks."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    MESSAGES = "messages"
    RESPONSES = "responses"


_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "repeat_penalty", "frequency_penalty"),
    *("presence_penalty", "logit_bias", "seed", "min_tokens", "ignore_eos"),
)
_OPTIONS = (
    *("model", "stream", "agent", "session_id", "prompt_cache_key", "adapter", "agentcache", "priority"),
    *("request_timeout", "cache_salt", "return_token_ids"),
)
_FORMS = (*FORM_FIELDS, "response_format", "output_format", "output_config")
_ALL = (*_SAMPLING, *_OPTIONS, *_FORMS)
_TALK = (
    *(*thinking.FIELDS, "include_reasoning", "reasoning_format", "separate_reasoning", "chat_template_kwargs"),
    *("tools", "tool_choice", "parallel_tool_calls"),
)
# Other servers' names for `max_tokens`.
MAX_TOKENS = ("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens", "n_predict", "num_predict")
_OPENAI = (*MAX_TOKENS, "n", "stop", "logprobs", "stream_options")

OBEYED: Mapping[Dialect, frozenset[str]] = {
    Dialect.CHAT: frozenset((*_ALL, *_TALK, *_OPENAI, "messages", "top_logprobs", "add_generation_prompt")),
    Dialect.COMPLETIONS: frozenset((*_ALL, *_OPENAI, "prompt", "echo")),
    Dialect.MESSAGES: frozenset((*_ALL, *_TALK, "messages", "system", "max_tokens", "stop_sequences", "metadata")),
    Dialect.RESPONSES: frozenset(
        (*_ALL, *_TALK, "input", "instructions", "max_output_tokens", "top_logprobs", "include", "text", "truncation")
        + ("previous_response_id", "store", "metadata", "stop", "user")
    ),
}

# What is for a service with accounts, prices, places and caches of its own, or for speed only.
WITHOUT_BEARING = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_retention", "cache_control")
    + ("prediction", "keep_alive", "cache_prompt", "id_slot", "request_id", "betas", "anthropic_beta")
    + ("anthropic_version", "inference_geo", "speed", "stream_options", "max_tool_calls", "context_management")
)

# Fields that would change the answer if they were ignored, with the values that ask for nothing.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "use_beam_search": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "logits_processors": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "grammar": ("",),
    "ebnf": ("",),
    "container": (),
    "mcp_servers": ([],),
    "background": (False,),
    "conversation": (),
}
_REFUSED_THERE: Mapping[Dialect, Mapping[str, tuple[Any, ...]]] = {Dialect.RESPONSES: {"prompt": ()}}


def check_fields(call: Call, dialect: Dialect) -> None:
    """Refuse fields that matter and are not supported, and note those that are not known.

    Raises:
        InvalidRequest: with the field's name.
    """
    unknown = []
    refused = {**REFUSED, **_REFUSED_THERE.get(dialect, {})}
    for name, value in call.body.value.items():
        if value is None or name in OBEYED[dialect]:
            continue
        if name in refused:
            if not any(_same(value, allowed) for allowed in refused[name]):
                call.body.fail(name, "is not supported", code="unsupported_parameter")
        elif name not in WITHOUT_BEARING:
            unknown.append(name)
    if unknown:
        names = ", ".join(f"{name:.{_LONGEST_NAME}}" for name in unknown[:_MOST_NAMES])
        more = f" and {len(unknown) - _MOST_NAMES} more" if len(unknown) > _MOST_NAMES else ""
        call.notes.add(f"{names}{more}: not known to this dialect, without effect")


def _same(value: Any, allowed: Any) -> bool:
    """Equality of JSON values: true is not 1."""
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)
