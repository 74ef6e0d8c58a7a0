"""Answers in OpenAI's two completion dialects."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentcache.api.report import FinishReason, Report, TokenLogprob, Update
from agentcache.api.request import Reading
from agentcache.server.errors import WireError
from agentcache.server.logprobs import TextOffsets, chat_logprobs, text_logprobs
from agentcache.server.replies import ReplyReader, read_whole
from agentcache.server.reply import Completion, combine, combine_choices, report_object
from agentcache.server.stream import TextEvents, event
from agentcache.text.messages import new_call_id
from agentcache.text.replies.events import (
    Call,
    Event,
    Reasoning,
    ReasoningDelta,
    Text,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class ChatShape:
    """Shapes of `/v1/chat/completions`."""

    logprobs: bool
    reading: Reading = Reading()

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, index: int, completion: Completion) -> tuple[dict[str, Any], int]:
        blocks, reasoning_tokens = read_whole(self.reading, completion)
        thought = "".join(block.text for block in blocks if isinstance(block, Reasoning))
        text = "".join(block.text for block in blocks if isinstance(block, Text))
        calls = [_call(block.name, block.arguments) for block in blocks if isinstance(block, Call)]
        message = {"role": "assistant", "content": text if text or not calls else None}
        message |= {"reasoning_content": thought} if thought else {}
        choice = {
            "index": index,
            "message": message | ({"tool_calls": calls} if calls else {}),
            "logprobs": chat_logprobs(completion.logprobs) if self.logprobs else None,
            "finish_reason": _finish_reason(completion, bool(calls)),
        }
        return choice, reasoning_tokens

    def first(self) -> dict[str, Any]:
        return chat_piece({"role": "assistant", "content": ""})

    def piece(self, text: str, logprobs: Sequence[TokenLogprob], offsets: Sequence[int] = ()) -> dict[str, Any]:
        shown = chat_logprobs(logprobs) if self.logprobs and logprobs else None
        return chat_piece({"content": text} if text else {}) | {"logprobs": shown}


def chat_piece(delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}


def _arguments_piece(index: int, text: str) -> dict[str, Any]:
    return chat_piece({"tool_calls": [{"index": index, "function": {"arguments": text}}]})


@dataclass(frozen=True)
class TextShape:
    """Shapes of `/v1/completions`.

    Args:
        echo: whether the text starts with the prompt.
        prompts: texts; None for token ids, whose text comes from their tokens.
    """

    logprobs: bool
    echo: bool
    prompts: tuple[str | None, ...]

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"
    reading = Reading()

    def choice(self, index: int, completion: Completion) -> tuple[dict[str, Any], int]:
        echoed = self._echo(index, completion) if self.echo else ""
        prompt = completion.prompt_logprobs if self.echo else ()
        offsets = TextOffsets.of_prompt(prompt, len(echoed)) + TextOffsets(len(echoed)).of(completion.logprobs)
        shown = text_logprobs([*prompt, *completion.logprobs], offsets) if self.logprobs else None
        text = echoed + completion.text
        return {"index": index, "text": text, "logprobs": shown, "finish_reason": completion.finish_reason}, 0

    def _echo(self, index: int, completion: Completion) -> str:
        text = self.prompts[index]
        if text is None:
            return b"".join(token.data for token in completion.prompt_logprobs).decode(errors="replace")
        return text

    def first(self) -> dict[str, Any]:
        return self.piece("", ())

    def piece(self, text: str, logprobs: Sequence[TokenLogprob], offsets: Sequence[int] = ()) -> dict[str, Any]:
        shown = text_logprobs(logprobs, offsets) if self.logprobs and logprobs else None
        return {"index": 0, "text": text, "logprobs": shown, "finish_reason": None}


Shape = ChatShape | TextShape


def _call(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": new_call_id(), "type": "function", "function": function}


def _finish_reason(completion: Completion, called: bool) -> str | None:
    return "tool_calls" if called and completion.finish_reason is FinishReason.STOP else completion.finish_reason


@dataclass(frozen=True)
class OpenAIReply:
    """An answer in either dialect.

    Args:
        usage: whether a stream ends with a chunk of `usage` and `agentcache`.
        n: answers per prompt.
    """

    id: str
    model: str
    shape: Shape
    usage: bool
    return_token_ids: bool
    notes: tuple[str, ...] = ()
    n: int = 1
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        choices, reasoning_tokens = list[dict[str, Any]](), 0
        for index, completion in enumerate(completions):
            choice, thoughts = self.shape.choice(index, completion)
            choices.append(choice | self.token_ids(completion))
            reasoning_tokens += thoughts
        return self.envelope(self.shape.object, choices) | self.accounting(completions, reasoning_tokens)

    def accounting(self, completions: Sequence[Completion], reasoning_tokens: int) -> dict[str, Any]:
        reports = [completion.final_report for completion in completions]
        per_prompt = [combine_choices(reports[at : at + self.n]) for at in range(0, len(reports), self.n)]
        return accounting(per_prompt, self.notes, reasoning_tokens)

    def writer(self) -> StreamWriter:
        return StreamWriter(self)

    def token_ids(self, completion: Completion) -> dict[str, Any]:
        return completion.token_id_fields() if self.return_token_ids else {}

    def envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def chunk(self, choice: dict[str, Any], index: int) -> bytes:
        choice = choice | {"index": index}
        chunk = self.envelope(self.shape.chunk_object, [choice])
        return event(chunk | {"usage": None} if self.usage else chunk)


class StreamWriter:
    """Writes the stream of one or more choices."""

    def __init__(self, reply: OpenAIReply) -> None:
        self._reply = reply
        self._choices = [ChunkWriter(reply, index) for index in range(reply.n)]

    def begin(self, first: Update | None) -> Iterator[bytes]:
        for choice in self._choices:
            yield choice.begin()

    def write(self, update: Update) -> list[bytes]:
        return self._choices[update.choice].write(update)

    def keep_alive(self) -> bytes:
        return self._choices[0].keep_alive()

    def end(self, completions: Sequence[Completion]) -> Iterator[bytes]:
        for choice, completion in zip(self._choices, completions, strict=True):
            yield choice.end(completion)
        if self._reply.usage:
            thoughts = sum(choice.reasoning_tokens for choice in self._choices)
            last = self._reply.envelope(self._reply.shape.chunk_object, [])
            yield event(last | self._reply.accounting(completions, thoughts))
        yield DONE

    def fail(self, error: WireError) -> Iterator[bytes]:
        yield event(error.body)
        yield DONE


class ChunkWriter:
    def __init__(self, reply: OpenAIReply, index: int) -> None:
        self._reply = reply
        self._index = index
        self._shape = reply.shape
        self._texts = TextEvents(lambda text: self._chunk(reply.shape.piece(text, ())))
        self._thoughts = TextEvents(lambda text: self._chunk(chat_piece({"reasoning_content": text})))
        self._arguments = self._texts  # of the current call
        self._reader = ReplyReader(reply.shape.reading)
        self._offsets = TextOffsets()
        self._waiting: list[TokenLogprob] = []  # tokens without output text so far

    @property
    def reasoning_tokens(self) -> int:
        return self._reader.reasoning_tokens

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return self._reply.chunk(choice, self._index)

    def begin(self) -> bytes:
        return self._chunk(self._shape.first())

    def write(self, update: Update) -> list[bytes]:
        self._waiting += update.logprobs
        events = [wire for event in self._reader.add(update) for wire in self._translated(event)]
        return [*events, self._text("")] if self._waiting and update.finish_reason is not None else events

    def _translated(self, event: Event) -> Iterator[bytes]:
        match event:
            case TextDelta(text):
                yield self._text(text)
            case ReasoningDelta(text):
                yield self._thoughts.event(text)
            case ToolCallStart(index, name):
                self._arguments = TextEvents(lambda text: self._chunk(_arguments_piece(index, text)))
                yield self._chunk(chat_piece({"tool_calls": [{"index": index} | _call(name, "")]}))
            case ToolCallArguments(_, arguments):
                yield self._arguments.event(arguments)

    def _text(self, text: str) -> bytes:
        """Emit a piece of text with the logprobs of all tokens received."""
        if not self._waiting:
            return self._texts.event(text)
        waiting, self._waiting = self._waiting, []
        return self._chunk(self._shape.piece(text, waiting, self._offsets.of(waiting)))

    def keep_alive(self) -> bytes:
        return self._chunk(self._shape.piece("", ()))

    def end(self, completion: Completion) -> bytes:
        last = self._shape.piece("", ()) | {"finish_reason": _finish_reason(completion, self._reader.num_calls > 0)}
        return self._chunk(last | self._reply.token_ids(completion))


def accounting(reports: Sequence[Report], notes: Sequence[str] = (), reasoning_tokens: int = 0) -> dict[str, Any]:
    report = combine(reports)
    return {"usage": _usage(report, reasoning_tokens), "agentcache": report_object(report, notes)}


def _usage(report: Report, reasoning_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": report.prompt_tokens,
        "completion_tokens": report.completion_tokens,
        "total_tokens": report.prompt_tokens + report.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": report.reused_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }
