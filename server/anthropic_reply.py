"""Answers in Anthropic's shapes: messages, and the events of a stream."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agentcache.models.text.tool_calls import ToolCall
from agentcache.report import FinishReason, Report, Update
from agentcache.server.errors import WireError
from agentcache.server.reply import Completion, report_object
from agentcache.server.stream import event
from agentcache.server.tool_calls import Part, Tools

_STOP_REASONS = {FinishReason.STOP: "end_turn", FinishReason.LENGTH: "max_tokens", None: None}


@dataclass(frozen=True)
class AnthropicReply:
    """An answer to `/v1/messages`.

    Args:
        id: the message's.
        model: the served model's id.
        notes: for the report.
    """

    id: str
    model: str
    tools: Tools
    return_token_ids: bool
    notes: tuple[str, ...] = ()

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        [completion] = completions
        parts = self.tools.split(completion.text) or [""]
        called = any(isinstance(part, ToolCall) for part in parts)
        message = self.message([_block(part) for part in parts])
        return message | stop_fields(completion, called) | self.accounting(completion)

    def writer(self) -> EventWriter:
        return EventWriter(self)

    def message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content}

    def accounting(self, completion: Completion) -> dict[str, Any]:
        """`usage`, and beside it what every dialect of ours reports."""
        report = completion.final_report
        token_ids = completion.token_id_fields() if self.return_token_ids else {}
        return {"usage": usage(report), "agentcache": report_object(report, self.notes)} | token_ids


class EventWriter:
    """A stream of text and tool_use blocks. Its opening knows the prompt's length at most; its end the whole usage."""

    def __init__(self, reply: AnthropicReply) -> None:
        self._reply = reply
        self._reader = reply.tools.reader()
        self._blocks = 0  # begun
        self._text_open = False
        self._called = False

    def begin(self, first: Update | None) -> Iterator[bytes]:
        prompt = first.prompt_token_ids if first else None
        known = {"input_tokens": len(prompt or ()), "output_tokens": 0}
        message = self._reply.message([]) | {"stop_reason": None, "stop_sequence": None, "usage": known}
        yield _event("message_start", message=message)
        yield self.keep_alive()

    def write(self, update: Update) -> Iterator[bytes]:
        for part in self._reader.add(update.text):
            yield from self._part(part)

    def _part(self, part: Part) -> Iterator[bytes]:
        if isinstance(part, ToolCall):
            yield from self._call(part)
            return
        if not self._text_open:
            yield self._start({"type": "text", "text": ""})
            self._text_open = True
        yield self._delta({"type": "text_delta", "text": part})

    def _call(self, call: ToolCall) -> Iterator[bytes]:
        yield from self._close_text()
        yield self._start(_block(call) | {"input": {}})
        yield self._delta({"type": "input_json_delta", "partial_json": json.dumps(call.arguments)})
        yield self._stop()
        self._called = True

    def _close_text(self) -> Iterator[bytes]:
        if self._text_open:
            yield self._stop()
            self._text_open = False

    def _start(self, block: dict[str, Any]) -> bytes:
        self._blocks += 1
        return _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _stop(self) -> bytes:
        return _event("content_block_stop", index=self._blocks - 1)

    def keep_alive(self) -> bytes:
        return _event("ping")

    def end(self, completions: Sequence[Completion]) -> Iterator[bytes]:
        [completion] = completions
        for part in self._reader.finish() or ([] if self._blocks else [""]):
            yield from self._part(part)
        yield from self._close_text()
        delta = stop_fields(completion, self._called)
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


def _block(part: Part) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex}", "name": part.name, "input": dict(part.arguments)}


def usage(report: Report) -> dict[str, int]:
    """Prompt tokens by what became of them: the three kinds add up to all of them, as Anthropic's do.

    Read: their keys and values were there. Created: computed and kept for the agent. The rest belongs to no agent.
    """
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
