"""`POST /v1/messages` and `/v1/messages/count_tokens`: translates Anthropic's fields to requests."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from agentcache.api.request import ChatPrompt, Request
from agentcache.server.answer_form import read_form, read_text_form
from agentcache.server.anthropic_reply import AnthropicReply
from agentcache.server.completion import Job, answer
from agentcache.server.context import Call, engine_of, name_agent, read_prompt
from agentcache.server.fields import Dialect, check_fields
from agentcache.server.messages import read_arguments, without_billing_header
from agentcache.server.model_names import check_model
from agentcache.server.options import check_chat, read_options
from agentcache.server.parts import is_newest, plain_text, read_part, read_parts, tool_text
from agentcache.server.replies import read_reading
from agentcache.server.sampling import read_max_tokens, read_sampling
from agentcache.server.session import read_agent
from agentcache.server.thinking import Thinking, read_thinking
from agentcache.server.tools import ToolList, read_anthropic_tools
from agentcache.server.validate import Reader

_BETWEEN_BLOCKS = "\n"


async def messages(request: HttpRequest) -> Response:
    return await answer(request, await read_prompt(request, "messages", read_job))


async def count_tokens(request: HttpRequest) -> Response:
    counted = await read_prompt(request, "messages", _read_counted)
    name_agent(request, counted.agent)
    return JSONResponse({"input_tokens": await engine_of(request).count_tokens(counted)})


def _read_counted(call: Call) -> Request:
    prompt = read_chat_prompt(call, read_anthropic_tools(call), read_thinking(call, only_if_asked=True))
    return Request("count", prompt, agent=read_agent(call, _user_id(call.body)))


def read_job(call: Call) -> Job:
    body, model = call.body, call.model
    thinking = read_thinking(call, only_if_asked=True)
    tools = read_anthropic_tools(call)
    prompt = read_chat_prompt(call, tools, thinking)
    if prompt.messages[-1]["role"] == "assistant":
        body.fail("messages", "must not end with the assistant: an answer that goes on from there is not supported")
    if body.get("max_tokens") is None:
        body.fail("max_tokens", "is required")
    max_tokens = read_max_tokens(body, "max_tokens", default=None)
    sampling = read_sampling(body, model, max_tokens=max_tokens, logprobs=None, stop="stop_sequences")
    options = read_options(call, read_agent(call, _user_id(body)))
    choice = tools.choice(body)
    form = read_form(call, read_text_form(body), prompt.tools, choice, "input_schema", tools.left_out)
    reading = read_reading(model, prompt.tools, body, form, thinking)
    job_id = f"msg_{uuid.uuid4().hex}"
    return Job(
        requests=[options.request(job_id, prompt, sampling, form=form, reading=reading)],
        reply=AnthropicReply(
            job_id,
            options.adapter or model.id,
            reading,
            options.return_token_ids,
            call.notes.told,
        ),
        stream=body.boolean("stream"),
        timeout=options.timeout,
    )


def _user_id(body: Reader) -> Any:
    metadata = body.get("metadata")
    return metadata.get("user_id") if isinstance(metadata, dict) else None


def read_chat_prompt(call: Call, tools: ToolList, thinking: Thinking) -> ChatPrompt:
    body = call.body
    check_model(call)
    check_fields(call, Dialect.MESSAGES)
    check_chat(call.model)
    given = body.objects("messages")
    if not given:
        body.fail("messages", "must be a list of at least one message")
    read = [part for message in given for part in _read_message(message, call)]
    if not read:
        body.fail("messages", "must hold more than an empty system text")
    messages = [*_read_system(body, "system", call), *read]
    shown = tools.shown(tools.choice(body))
    return ChatPrompt(messages, shown, thinking.template_kwargs, num_bytes=call.num_bytes)


def _read_system(reader: Reader, name: str, call: Call) -> list[dict[str, Any]]:
    text = without_billing_header(_read_text(reader, name, call))
    return [{"role": "system", "content": text}] if text else []


def _read_text(reader: Reader, name: str, call: Call) -> str:
    if not isinstance(reader.get(name), list):
        return reader.string(name) or ""
    return _BETWEEN_BLOCKS.join(read_parts(reader, name, "system", call))


def _read_message(message: Reader, call: Call) -> list[dict[str, Any]]:
    """Translate one message. Each tool result becomes a message of role `tool`."""
    role = message.required_string("role")
    if role not in ("user", "assistant", "system"):
        message.fail("role", 'must be "user", "assistant" or "system"')
    if "content" not in message.value and role != "assistant" and is_newest(message, call):
        message.fail("content", "is required")
    if role == "system":
        return _read_system(message, "content", call)
    if isinstance(message.get("content"), str):
        return [{"role": role, "content": message.string("content")}]
    return [_read_assistant(message, call)] if role == "assistant" else _read_user(message, call)


def _read_assistant(message: Reader, call: Call) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in _blocks(message):
        if isinstance(block, str):
            texts.append(block)
        elif (kind := block.string("type")) == "tool_use":
            calls.append(_read_call(block))
        elif kind == "thinking":
            thoughts.append(block.string("thinking") or "")
        elif kind != "redacted_thinking":
            texts.append(read_part(block, "assistant", call))
    read: dict[str, Any] = {"role": "assistant", "content": _joined(texts)}
    if any(thoughts):
        read["reasoning_content"] = _joined(thoughts)
    return read | ({"tool_calls": calls} if calls else {})


def _blocks(message: Reader) -> Iterator[str | Reader]:
    for index, block in enumerate(message.items("content")):
        text = plain_text(block)
        yield message.item("content", index) if text is None else text


def _joined(texts: list[str]) -> str:
    """Join blocks. Empty ones, which Anthropic refuses, add nothing."""
    return _BETWEEN_BLOCKS.join(filter(None, texts))


def _read_call(block: Reader) -> dict[str, Any]:
    function = {"name": block.required_string("name"), "arguments": read_arguments(block, "input")}
    return {"id": block.required_string("id"), "type": "function", "function": function}


def _read_user(message: Reader, call: Call) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    texts: list[str] = []
    for block in _blocks(message):
        if isinstance(block, str):
            texts.append(block)
        elif block.string("type") != "tool_result":
            texts.append(read_part(block, "user", call))
        else:
            messages += _user_text(texts)
            messages.append(_read_result(block, call))
            texts = []
    messages += _user_text(texts)
    return messages or [{"role": "user", "content": ""}]


def _user_text(texts: list[str]) -> list[dict[str, Any]]:
    text = _joined(texts)
    return [{"role": "user", "content": text}] if text else []


def _read_result(block: Reader, call: Call) -> dict[str, Any]:
    return {
        "role": "tool",
        "tool_call_id": block.required_string("tool_use_id"),
        "content": tool_text(block, "content", _BETWEEN_BLOCKS, call),
    }
