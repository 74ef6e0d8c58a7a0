"""Answers in Anthropic's shapes: messages, and stream events."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agentcache.api.report import FinishReason, Report, Update
from agentcache.api.request import Reading
from agentcache.server.errors import WireError
from agentcache.server.replies import ReplyReader, read_whole
from agentcache.server.reply import Completion, report_object
from agentcache.server.stream import event
from agentcache.text.json_values import parse_json
from agentcache.text.messages import new_call_id
from agentcache.text.replies.events import (
    Block,
    Call,
    Event,
    Reasoning,
    ReasoningDelta,
    Text,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)

_STOP_REASONS = {FinishReason.STOP: "end_turn", FinishReason.LENGTH: "max_tokens", None: None}


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
        if not any(isinstance(block, Text | Call) for block in blocks):
            blocks.append(Text(""))
        called = any(isinstance(block, Call) for block in blocks)
        message = self.message([_block(block) for block in blocks])
        return message | stop_fields(completion, called) | self.accounting(completion)

    def writer(self) -> EventWriter:
        return EventWriter(self)

    def message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content}

    def accounting(self, completion: Completion) -> dict[str, Any]:
        report = completion.final_report
        token_ids = completion.token_id_fields() if self.return_token_ids else {}
        return {"usage": usage(report), "agentcache": report_object(report, self.notes)} | token_ids


class EventWriter:
    """Writes a stream of content blocks."""

    def __init__(self, reply: AnthropicReply) -> None:
        self._reply = reply
        self._reader = ReplyReader(reply.reading)
        self._blocks = 0
        self._open: type[Event] | None = None  # type of its deltas
        self._thoughts: list[str] = []
        self._says = False  # whether any block is not thinking

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
            yield self._start(block)
            self._open = kind

    def _close(self) -> Iterator[bytes]:
        if self._open is None:
            return
        if self._open is ReasoningDelta:
            yield self._delta({"type": "signature_delta", "signature": signature("".join(self._thoughts))})
        yield _event("content_block_stop", index=self._blocks - 1)
        self._open, self._thoughts = None, []

    def _start(self, block: dict[str, Any]) -> bytes:
        self._blocks += 1
        return _event("content_block_start", index=self._blocks - 1, content_block=block)

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
        case Call(name, arguments):
            return _tool_use(name, parse_json(arguments))


def _tool_use(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": new_call_id(), "name": name, "input": arguments}


def signature(thought: str) -> str:
    """Sign a thought: clients drop unsigned thinking. The server does not check signatures."""
    return base64.b64encode(hashlib.blake2b(thought.encode(), digest_size=24).digest()).decode()


def usage(report: Report) -> dict[str, int]:
    """Split prompt tokens into cached ones, those cached now for an agent, and the rest, as Anthropic does."""
    computed = report.prompt_tokens - report.reused_tokens
    created = computed if report.agent is not None else 0
    return {
        "input_tokens": computed - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": report.reused_tokens,
        "output_tokens": report.completion_tokens,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind} | fields, kind)
