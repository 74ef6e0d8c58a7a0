"""Responses, their output items and stream events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from agentcache.api.report import FinishReason, TokenLogprob, Update
from agentcache.api.request import Reading
from agentcache.errors import ContextLengthExceeded, Overloaded
from agentcache.server.completion import encode, event
from agentcache.server.context import json_size
from agentcache.server.errors import WireError
from agentcache.server.reply import Completion, ReplyReader, chat_logprobs, report_object
from agentcache.server.response_input import ResponseTools, custom_input, sealed
from agentcache.store.response_files import new_id
from agentcache.text.messages import new_call_id
from agentcache.text.replies.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

Said = tuple[str, dict[str, Any]]

MAX_ECHO = 256 << 10  # characters of the final response
MAX_OPENING = 16 << 10  # of openings and keep-alives
# OpenAI's types require these; else null.
_EMPTY: dict[str, Any] = {"tools": [], "metadata": {}, "tool_choice": "auto"}


@dataclass(eq=False)
class ResponseReply:
    """An answer to `/v1/responses`; `echo` is of the final response, `opening` of earlier events."""

    id: str
    model: str
    reading: Reading
    tools: ResponseTools
    echo: Echo
    opening: Echo
    seals_reasoning: bool
    return_token_ids: bool
    agent: str | None = None
    previous: str | None = None
    notes: tuple[str, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))
    _closed: dict[str, Any] | None = field(default=None, init=False)

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        return self.close(completions) | dict(self.echo.fields)

    def close(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The response without its echo; always the same object."""
        if self._closed is not None:
            return self._closed
        [completion] = completions
        output = OutputItems(self, whole=True)
        for update in completion.updates:
            for _ in output.add(update):
                pass
        for _ in output.finish(completion):
            pass
        self._closed = self.ended(completion, output)
        return self._closed

    def writer(self) -> ResponseWriter:
        return ResponseWriter(self)

    def response(self, status: str, output: Sequence[Mapping[str, Any]] = (), **fields: Any) -> dict[str, Any]:
        stable = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": list(output),
            "previous_response_id": self.previous,
            "store": False,
            "usage": None,
        }
        return stable | fields

    def ended(self, completion: Completion, output: OutputItems) -> dict[str, Any]:
        accounting = self._accounting(completion, output)
        if completion.finish_reason is FinishReason.LENGTH:
            details = {"reason": "max_output_tokens"}
            return self.response("incomplete", output.items, incomplete_details=details, **accounting)
        return self.response("completed", output.items, completed_at=int(time.time()), **accounting)

    def _accounting(self, completion: Completion, output: OutputItems) -> dict[str, Any]:
        report = completion.final_report
        written = report.prompt_tokens - report.reused_tokens if report.agent is not None else 0
        usage = {
            "input_tokens": report.prompt_tokens,
            "input_tokens_details": {"cached_tokens": report.reused_tokens, "cache_write_tokens": written},
            "output_tokens": report.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": output.reasoning_tokens},
            "total_tokens": report.prompt_tokens + report.completion_tokens,
        }
        token_ids = completion.token_id_fields() if self.return_token_ids else {}
        notes = list(self.notes)
        if output.num_calls > 1 and not self.echo.fields["parallel_tool_calls"]:
            notes.append("parallel_tool_calls: the model made several calls all the same")
        return {"usage": usage, "agentcache": report_object(report, notes)} | token_ids


class OutputItems:
    """Output items and their stream events; the last item may be open."""

    def __init__(self, reply: ResponseReply, *, whole: bool = False) -> None:
        self.items: list[dict[str, Any]] = []
        self._reply = reply
        self._reader = ReplyReader(reply.reading, whole=whole)
        self._is_open = False
        self._texts: list[str] = []
        self._unplaced: list[TokenLogprob] = []  # tokens without output text so far

    @property
    def num_calls(self) -> int:
        return self._reader.num_calls

    @property
    def reasoning_tokens(self) -> int:
        return self._reader.reasoning_tokens

    def add(self, update: Update) -> Iterator[Said]:
        events = self._reader.add(update)
        self._unplaced += [token for token in update.logprobs if token.shown]
        for each in events:
            yield from self._translated(each)

    def finish(self, completion: Completion) -> Iterator[Said]:
        """Close the open item; an empty answer becomes an empty message."""
        if not self.items:
            yield from self._begin_text("message")
        yield from self._close("incomplete" if completion.finish_reason is FinishReason.LENGTH else "completed")

    def _translated(self, each: Event) -> Iterator[Said]:
        match each:
            case TextDelta(text):
                yield from self._grow_text("message", text, self._logprobs_of(text))
            case ReasoningDelta(text):
                self._unplaced.clear()
                yield from self._grow_text("reasoning", text)
            case ToolCallStart(_, name):
                yield from self._close()
                yield self._begin_call(name)
            case ToolCallArguments(_, arguments):
                self._texts.append(arguments)
                if self.items[-1]["type"] == "function_call":
                    yield "response.function_call_arguments.delta", self._place | {"delta": arguments}
            case ToolCallEnd():
                self._unplaced.clear()
                yield from self._close()

    def _begin_call(self, name: str) -> Said:
        # A custom tool's text is known only with the complete arguments.
        tool, call_id = self._reply.tools.find(name), new_call_id()
        if tool.is_custom:
            custom = {"type": "custom_tool_call", "id": self._new_id("ctc"), "call_id": call_id}
            return self._begin(custom | tool.fields | {"input": ""})
        function = {"type": "function_call", "id": self._new_id("fc"), "call_id": call_id}
        return self._begin(function | tool.fields | {"arguments": ""})

    def _new_id(self, prefix: str) -> str:
        return new_id(prefix, self._reply.agent)

    def _logprobs_of(self, text: str) -> list[dict[str, Any]]:
        """Logprobs of the tokens that end `text`; earlier ones were markers."""
        tokens, self._unplaced = self._unplaced, []
        while len(tokens) > 1 and b"".join(token.data for token in tokens[1:]).decode(errors="replace").endswith(text):
            del tokens[0]
        return list(chat_logprobs(tokens)["content"])

    def complete(self) -> None:
        if not self.items:
            return
        item, text = self.items[-1], "".join(self._texts)
        match item["type"]:
            case "function_call":
                item["arguments"] = text
            case "custom_tool_call":
                item["input"] = custom_input(text)
            case "message" | "reasoning" if item["content"]:
                item["content"][0]["text"] = text

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _begin(self, item: dict[str, Any]) -> Said:
        self._is_open, self._texts = True, []
        self.items.append(item | {"status": "in_progress"})
        return "response.output_item.added", {"output_index": len(self.items) - 1, "item": dict(self.items[-1])}

    def _grow_text(self, kind: str, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Said]:
        if not self._is_open or self.items[-1]["type"] != kind:
            yield from self._close()
            yield from self._begin_text(kind)
        part = self.items[-1]["content"][0]
        self._texts.append(text)
        fields: dict[str, Any] = {"delta": text}
        if kind == "message":
            part["logprobs"] += logprobs
            fields["logprobs"] = list(logprobs)
        yield f"response.{part['type']}.delta", self._part_place | fields

    def _begin_text(self, kind: str) -> Iterator[Said]:
        if kind == "message":
            item = {"type": "message", "id": self._new_id("msg"), "role": "assistant"}
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item = {"type": "reasoning", "id": self._new_id("rs"), "summary": []}  # type: ignore[dict-item]
            part = {"type": "reasoning_text", "text": ""}
        yield self._begin(item | {"content": []})
        self.items[-1]["content"] = [part]
        yield "response.content_part.added", self._part_place | {"part": dict(part)}

    @property
    def _part_place(self) -> dict[str, Any]:
        return self._place | {"content_index": 0}

    def _close(self, status: str = "completed") -> Iterator[Said]:
        if not self._is_open:
            return
        self._is_open = False
        self.complete()
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            arguments = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", self._place | arguments
        elif item["type"] == "custom_tool_call":
            yield "response.custom_tool_call_input.delta", self._place | {"delta": item["input"]}
            yield "response.custom_tool_call_input.done", self._place | {"input": item["input"]}
        else:
            [part] = item["content"]
            said = {name: part[name] for name in ("text", "logprobs") if name in part}
            yield f"response.{part['type']}.done", self._part_place | said
            yield "response.content_part.done", self._part_place | {"part": dict(part)}
            if item["type"] == "reasoning" and self._reply.seals_reasoning:
                item["encrypted_content"] = sealed(part["text"])
        yield "response.output_item.done", {"output_index": len(self.items) - 1, "item": dict(item)}


def _code(error: WireError) -> str:
    # OpenAI's codes: clients retry, or shorten the conversation.
    if error.code == ContextLengthExceeded.code:
        return error.code
    if error.status == Overloaded.status:
        return "rate_limit_exceeded"
    return "server_error" if error.status >= 500 else "invalid_prompt"


class ResponseWriter:
    def __init__(self, reply: ResponseReply) -> None:
        self._reply = reply
        self._output = OutputItems(reply)
        self._sent = 0
        self._closing: list[Said] = []
        self._closed: dict[str, Any] | None = None
        self._opening = _with_echo(reply.response("in_progress"), reply.opening)

    def begin(self, first: Update | None) -> Iterator[bytes]:
        yield self._spliced("response.created", self._opening)
        yield self.keep_alive()

    def write(self, update: Update) -> Iterator[bytes]:
        for kind, fields in self._output.add(update):
            yield self._event(kind, fields)

    def keep_alive(self) -> bytes:
        """Repeat an event: the dialect has no keep-alive."""
        return self._spliced("response.in_progress", self._opening)

    def close(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The response without its echo; `end` sends later changes to it."""
        if self._closed is None:
            [completion] = completions
            self._closing = list(self._output.finish(completion))
            self._closed = self._reply.ended(completion, self._output)
        return self._closed

    def end(self, completions: Sequence[Completion]) -> Iterator[bytes]:
        response = self.close(completions)
        for kind, fields in self._closing:
            yield self._event(kind, fields)
        yield self._spliced(f"response.{response['status']}", _with_echo(response, self._reply.echo))

    def fail(self, error: WireError) -> Iterator[bytes]:
        told = {"code": _code(error), "message": error.message}
        self._output.complete()
        response = self._reply.response("failed", self._output.items, error=told)
        yield self._spliced("response.failed", _with_echo(response, self._reply.opening))

    def _event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        return event(self._numbered(kind) | dict(fields), kind)

    def _spliced(self, kind: str, response: str) -> bytes:
        return f'event: {kind}\ndata: {encode(self._numbered(kind))[:-1]},"response":{response}}}\n\n'.encode()

    def _numbered(self, kind: str) -> dict[str, Any]:
        self._sent += 1
        return {"type": kind, "sequence_number": self._sent - 1}


def _with_echo(response: Mapping[str, Any], echo: Echo) -> str:
    return f"{encode(dict(response))[:-1]},{echo.text}}}"


@dataclass(frozen=True)
class Echo:
    """Request fields repeated in a response; `left_out` are emptied."""

    fields: Mapping[str, Any]
    left_out: tuple[str, ...] = ()

    @classmethod
    def of(cls, asked: Mapping[str, Any], most: int) -> Echo:
        """Leave out the largest fields beyond about `most` characters."""
        sizes = {name: json_size(value, most) for name, value in asked.items()}
        kept, left_out = set[str](), []
        for name in sorted(sizes, key=lambda name: sizes[name]):
            if sum(sizes[each] for each in kept) + sizes[name] <= most:
                kept.add(name)
            else:
                left_out.append(name)
        fields = {name: value if name in kept else _EMPTY.get(name) for name, value in asked.items()}
        return cls(fields, tuple(left_out))

    @cached_property
    def text(self) -> str:
        return encode(dict(self.fields))[1:-1]

    @property
    def note(self) -> str | None:
        return f"{', '.join(self.left_out)}: too large to be repeated in the response" if self.left_out else None
