"""Effects of body fields by dialect, as in `docs/server.md`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

from agentcache.server import thinking
from agentcache.server.answer_form import FORM_FIELDS
from agentcache.server.context import Call

_MOST_NAMES = 8
_LONGEST_NAME = 40


class Dialect(StrEnum):
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
# Names of `max_tokens`; the first one given counts.
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

# For hosted services, or for speed.
WITHOUT_BEARING = frozenset(
    ("user", "metadata", "client_metadata", "store", "service_tier", "safety_identifier", "cache_control")
    + ("prompt_cache_retention", "prompt_cache_options")
    + ("prediction", "keep_alive", "cache_prompt", "id_slot", "request_id", "betas", "anthropic_beta")
    + ("anthropic_version", "inference_geo", "speed", "stream_options", "max_tool_calls", "context_management")
)

# With values that change nothing.
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
_TEXT_FORMAT = frozenset(
    ("type", "name", "description", "strict", "schema", "json_schema", "value", "regex", "pattern")
)
_BUDGETS = ("max_tokens", "budget_tokens", "budget")
TOOL = "tools[]"  # any tool definition

# Of objects whose readers ignore unknown keys.
KEYS: Mapping[str, frozenset[str]] = {
    "stream_options": frozenset(("include_usage", "include_obfuscation")),
    "reasoning": frozenset(("type", "enabled", "effort", *_BUDGETS, "exclude", "summary", "generate_summary")),
    "thinking": frozenset(("type", "enabled", "effort", *_BUDGETS, "display")),
    "output_config": frozenset(("effort", "format")),
    "text": frozenset(("format",)),
    "structured_outputs": frozenset(("json", "regex", "choice", "grammar", "json_object", "structural_tag")),
    **dict.fromkeys(("response_format", "output_format", "output_config.format", "text.format"), _TEXT_FORMAT),
    **dict.fromkeys(
        ("response_format.json_schema", "output_format.json_schema", "output_config.format.json_schema")
        + ("text.format.json_schema",),
        frozenset(("name", "description", "strict", "schema")),
    ),
    "tool_choice": frozenset(
        ("type", "name", "function", "custom", "disable_parallel_tool_use", "allowed_tools", "mode", "tools")
    ),
    "tool_choice.function": frozenset(("name",)),
    "tool_choice.custom": frozenset(("name",)),
    "tool_choice.allowed_tools": frozenset(("mode", "tools")),
    TOOL: frozenset(
        ("type", "name", "description", "parameters", "input_schema", "inputSchema", "strict", "function", "format")
        + ("tools", "max_characters", "display_width_px", "display_height_px", "display_number")
        + ("cache_control", "eager_input_streaming")
    ),
    f"{TOOL}.function": frozenset(("name", "description", "parameters", "input_schema", "inputSchema", "strict")),
    f"{TOOL}.format": frozenset(("type", "syntax", "definition")),
}
_REFUSED_THERE: Mapping[Dialect, Mapping[str, tuple[Any, ...]]] = {Dialect.RESPONSES: {"prompt": ()}}


def check_fields(call: Call, dialect: Dialect) -> None:
    """Refuse unsupported fields that matter; note unknown ones, except keys of tools."""
    unknown: list[str] = []
    refused = {**REFUSED, **_REFUSED_THERE.get(dialect, {})}
    for name, value in call.body.value.items():
        if value is None:
            continue
        if name in OBEYED[dialect] or name in WITHOUT_BEARING:
            unknown += _unknown_keys(value, name)
        elif name in refused:
            if not any(_same(value, allowed) for allowed in refused[name]):
                call.body.fail(name, "is not supported", code="unsupported_parameter")
        else:
            unknown.append(f"{name:.{_LONGEST_NAME}}")
    _note(call, unknown, "without effect")


def note_tool_keys(call: Call, tool: Mapping[str, Any], *, is_shown: bool = False) -> None:
    """Note unknown keys of a tool; with `is_shown` the chat template gets them."""
    effect = "shown to the model if its chat template shows all of a tool" if is_shown else "without effect"
    _note(call, list(_unknown_keys(tool, TOOL)), effect)


def _unknown_keys(value: Any, place: str) -> Iterator[str]:
    known = KEYS.get(place)
    if known is None or type(value) is not dict or (place.endswith(".json_schema") and "schema" not in value):
        return  # a schema without a wrapper
    for name, inner in value.items():
        if inner is None:
            continue
        if name in known:
            yield from _unknown_keys(inner, f"{place}.{name}")
        else:
            yield f"{place}.{name:.{_LONGEST_NAME}}"


def _note(call: Call, unknown: list[str], effect: str) -> None:
    if unknown:
        more = f" and {len(unknown) - _MOST_NAMES} more" if len(unknown) > _MOST_NAMES else ""
        call.notes.add(f"{', '.join(unknown[:_MOST_NAMES])}{more}: not known to this dialect, {effect}", once=True)


def _same(value: Any, allowed: Any) -> bool:  # true is not 1
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)
