"""`POST /v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import base64
import hashlib
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from agentcache.api.report import FinishReason, Update
from agentcache.api.request import ChatPrompt, Reading, Request
from agentcache.server.answer_form import read_form, read_text_form, read_tool_choice
from agentcache.server.completion import Job, answer, event
from agentcache.server.context import Call, engine_of, name_agent, read_prompt
from agentcache.server.errors import WireError
from agentcache.server.fields import Dialect, check_fields
from agentcache.server.messages import (
    is_newest,
    plain_text,
    read_arguments,
    read_part,
    read_parts,
    tool_text,
    without_billing_header,
)
from agentcache.server.model_names import check_model
from agentcache.server.options import check_chat, read_max_tokens, read_options, read_reading, read_sampling
from agentcache.server.reply import Completion, ReplyReader, read_whole, report_object
from agentcache.server.session import read_agent
from agentcache.server.thinking import Thinking, read_thinking
from agentcache.server.tools import ToolList, read_anthropic_tools
from agentcache.server.validate import Reader
from agentcache.text.json_values import parse_json
from agentcache.text.messages import new_call_id
from agentcache.text.replies.events import (
    Block,
    Event,
    Reasoning,
    ReasoningDelta,
    Text,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from agentcache.text.replies.events import Call as SaidCall

_BETWEEN_BLOCKS = "\n"

_STOP_REASONS = {FinishReason.STOP: "end_turn", FinishReason.LENGTH: "max_tokens", None: None}


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
    choice = read_tool_choice(body, tools.find)
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
    shown = tools.shown(read_tool_choice(body, tools.find))
    return ChatPrompt(messages, shown, thinking.template_kwargs, num_bytes=call.num_bytes)


def _read_system(reader: Reader, name: str, call: Call) -> list[dict[str, Any]]:
    text = without_billing_header(_read_text(reader, name, call))
    return [{"role": "system", "content": text}] if text else []


def _read_text(reader: Reader, name: str, call: Call) -> str:
    if not isinstance(reader.get(name), list):
        return reader.string(name) or ""
    return _BETWEEN_BLOCKS.join(read_parts(reader, name, "system", call))


def _read_message(message: Reader, call: Call) -> list[dict[str, Any]]:
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
            function = {"name": block.required_string("name"), "arguments": read_arguments(block, "input")}
            calls.append({"id": block.required_string("id"), "type": "function", "function": function})
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
    return _BETWEEN_BLOCKS.join(filter(None, texts))


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
            content = tool_text(block, "content", _BETWEEN_BLOCKS, call)
            messages.append({"role": "tool", "tool_call_id": block.required_string("tool_use_id"), "content": content})
            texts = []
    messages += _user_text(texts)
    return messages or [{"role": "user", "content": ""}]


def _user_text(texts: list[str]) -> list[dict[str, Any]]:
    text = _joined(texts)
    return [{"role": "user", "content": text}] if text else []


@dataclass(frozen=True)
class AnthropicReply:
    id: str
    model: str
    reading: Reading
    return_token_ids: bool
    notes: tuple[str, ...] = ()

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        [completion] = completions
        blocks, _ = read_whole(self.reading, completion)
        if not any(isinstance(block, Text | SaidCall) for block in blocks):
            blocks.append(Text(""))
        called = any(isinstance(block, SaidCall) for block in blocks)
        message = self.message([_block(block) for block in blocks])
        return message | stop_fields(completion, called) | self.accounting(completion)

    def writer(self) -> EventWriter:
        return EventWriter(self)

    def message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content}

    def accounting(self, completion: Completion) -> dict[str, Any]:
        report = completion.final_report
        token_ids = completion.token_id_fields() if self.return_token_ids else {}
        computed = report.prompt_tokens - report.reused_tokens
        created = computed if report.agent is not None else 0
        usage = {
            "input_tokens": computed - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": report.reused_tokens,
            "output_tokens": report.completion_tokens,
        }
        return {"usage": usage, "agentcache": report_object(report, self.notes)} | token_ids


class EventWriter:
    def __init__(self, reply: AnthropicReply) -> None:
        self._reply = reply
        self._reader = ReplyReader(reply.reading)
        self._blocks = 0
        self._open: type[Event] | None = None  # type of its deltas
        self._thoughts: list[str] = []
        self._says = False  # anything but thinking

    def begin(self, first: Update | None) -> Iterator[bytes]:
        prompt = first.prompt_token_ids if first else None
        known = {"input_tokens": len(prompt or ()), "output_tokens": 0}
        message = self._reply.message([]) | {"stop_reason": None, "stop_sequence": None, "usage": known}
        yield _event("message_start", message=message)
        yield self.keep_alive()

    def write(self, update: Update) -> Iterator[bytes]:
        for event_ in self._reader.add(update):
            yield from self._translated(event_)

    def _translated(self, event_: Event) -> Iterator[bytes]:
        match event_:
            case TextDelta(text):
                yield from self._into(TextDelta, {"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": text})
            case ReasoningDelta(text):
                yield from self._into(ReasoningDelta, {"type": "thinking", "thinking": "", "signature": ""})
                yield self._delta({"type": "thinking_delta", "thinking": text})
                self._thoughts.append(text)
            case ToolCallStart(_, name):
                yield from self._close()
                yield from self._into(ToolCallArguments, _tool_use(name, {}))
            case ToolCallArguments(_, arguments):
                yield self._delta({"type": "input_json_delta", "partial_json": arguments})

    def _into(self, kind: type[Event], block: dict[str, Any]) -> Iterator[bytes]:
        self._says = self._says or kind is not ReasoningDelta
        if self._open is not kind:
            yield from self._close()
            self._open = kind
            self._blocks += 1
            yield _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _close(self) -> Iterator[bytes]:
        if self._open is None:
            return
        if self._open is ReasoningDelta:
            yield self._delta({"type": "signature_delta", "signature": signature("".join(self._thoughts))})
        yield _event("content_block_stop", index=self._blocks - 1)
        self._open, self._thoughts = None, []

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def keep_alive(self) -> bytes:
        return _event("ping")

    def end(self, completions: Sequence[Completion]) -> Iterator[bytes]:
        [completion] = completions
        if not self._says:
            yield from self._into(TextDelta, {"type": "text", "text": ""})
        yield from self._close()
        delta = stop_fields(completion, self._reader.num_calls > 0)
        yield _event("message_delta", delta=delta, **self._reply.accounting(completion))
        yield _event("message_stop")

    def fail(self, error: WireError) -> Iterator[bytes]:
        yield event(error.anthropic_body, "error")


def stop_fields(completion: Completion, called: bool) -> dict[str, str | None]:
    if completion.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_string}
    if called and completion.finish_reason is FinishReason.STOP:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    return {"stop_reason": _STOP_REASONS[completion.finish_reason], "stop_sequence": None}


def _block(block: Block) -> dict[str, Any]:
    match block:
        case Reasoning(text):
            return {"type": "thinking", "thinking": text, "signature": signature(text)}
        case Text(text):
            return {"type": "text", "text": text}
        case SaidCall(name, arguments):
            return _tool_use(name, parse_json(arguments))


def _tool_use(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": new_call_id(), "name": name, "input": arguments}


def signature(thought: str) -> str:
    """Return a dummy: clients drop unsigned thinking."""
    return base64.b64encode(hashlib.blake2b(thought.encode(), digest_size=24).digest()).decode()


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind} | fields, kind)
