"""`POST /v1/chat/completions` and `POST /v1/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from agentcache.api.answer_form import AnswerForm
from agentcache.api.model import ModelInfo
from agentcache.api.report import FinishReason, Report, TokenLogprob, Update
from agentcache.api.request import ChatPrompt, Reading, TextPrompt, TokenPrompt
from agentcache.api.sampling import SamplingParams
from agentcache.server.answer_form import ToolChoice, read_form, read_text_form, read_tool_choice
from agentcache.server.completion import Job, TextEvents, answer, event
from agentcache.server.context import Call, read_prompt
from agentcache.server.errors import WireError
from agentcache.server.fields import MAX_TOKENS, Dialect, check_fields
from agentcache.server.messages import read_messages
from agentcache.server.model_names import check_model
from agentcache.server.options import (
    MAX_LOGPROBS,
    check_chat,
    read_max_tokens,
    read_n,
    read_options,
    read_reading,
    read_sampling,
)
from agentcache.server.reply import (
    Completion,
    ReplyReader,
    TextOffsets,
    chat_logprobs,
    combine,
    combine_choices,
    read_whole,
    report_object,
    text_logprobs,
)
from agentcache.server.session import named_agent, read_agent
from agentcache.server.thinking import read_thinking
from agentcache.server.tools import ToolList, read_chat_tools
from agentcache.server.validate import Reader
from agentcache.text.messages import new_call_id
from agentcache.text.replies.events import Call as SaidCall
from agentcache.text.replies.events import (
    Event,
    Reasoning,
    ReasoningDelta,
    Text,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)

TEXT_MAX_TOKENS = 16
MAX_PROMPTS = 256
MAX_REPEATED = 8 << 20  # characters of repeated prompts, about
_LOGPROB_CHARS = 8  # per prompt token and candidate

DONE = b"data: [DONE]\n\n"


async def chat_completions(request: HttpRequest) -> Response:
    return await answer(request, await read_prompt(request, "messages", read_chat))


async def completions(request: HttpRequest) -> Response:
    return await answer(request, await read_prompt(request, "prompt", read_text))


def read_chat(call: Call) -> Job:
    body, model = call.body, call.model
    check_model(call)
    check_fields(call, Dialect.CHAT)
    thinking = read_thinking(call)
    tools = read_chat_tools(call)
    prompt = read_chat_prompt(
        call, tools, thinking.template_kwargs, add_generation_prompt=body.boolean("add_generation_prompt", True)
    )
    logprobs = _read_chat_logprobs(body)
    max_tokens = read_max_tokens(body, *MAX_TOKENS, default=None)
    sampling = read_sampling(body, model, max_tokens=max_tokens, logprobs=logprobs)
    choice = read_tool_choice(body, tools.find)
    form = read_form(call, read_text_form(body), prompt.tools, choice, "function.parameters", tools.left_out)
    shape = ChatShape(logprobs is not None, read_reading(model, prompt.tools, body, form, thinking))
    return _job(call, [prompt], sampling, shape, form)


def read_chat_prompt(
    call: Call, tools: ToolList, template_kwargs: dict[str, Any], *, add_generation_prompt: bool
) -> ChatPrompt:
    messages = read_messages(call)
    check_chat(call.model)
    shown = tools.shown(read_tool_choice(call.body, tools.find))
    return ChatPrompt(messages, shown, template_kwargs, add_generation_prompt, num_bytes=call.num_bytes)


def _read_chat_logprobs(body: Reader) -> int | None:
    wanted = body.boolean("logprobs")
    top = body.integer("top_logprobs", minimum=0, maximum=MAX_LOGPROBS)
    if top is not None and not wanted:
        body.fail("top_logprobs", "needs logprobs to be true")
    return (top or 0) if wanted else None


def read_text(call: Call) -> Job:
    body, model = call.body, call.model
    check_model(call)
    check_fields(call, Dialect.COMPLETIONS)
    prompts = read_prompts(body, model)
    logprobs = body.integer("logprobs", minimum=0, maximum=MAX_LOGPROBS)
    echo = body.boolean("echo")
    _refuse_large_echo(body, prompts, logprobs)
    texts = tuple(prompt.text if isinstance(prompt, TextPrompt) else None for prompt in prompts)
    sampling = read_sampling(
        body,
        model,
        max_tokens=read_max_tokens(body, *MAX_TOKENS, default=TEXT_MAX_TOKENS),
        logprobs=logprobs,
        prompt_logprobs=echo and (logprobs is not None or None in texts),
    )
    shape = TextShape(logprobs is not None, echo, tuple(text for text in texts for _ in range(read_n(body))))
    return _job(call, prompts, sampling, shape, read_form(call, read_text_form(body), None, ToolChoice(), ""))


def _refuse_large_echo(body: Reader, prompts: Sequence[TextPrompt | TokenPrompt], logprobs: int | None) -> None:
    if not body.boolean("echo"):
        return
    lengths = [len(prompt.text if isinstance(prompt, TextPrompt) else prompt.token_ids) for prompt in prompts]
    of_token = 1 if logprobs is None else _LOGPROB_CHARS * (1 + logprobs)
    if read_n(body) * sum(lengths) * of_token > MAX_REPEATED:
        body.fail(
            "echo", f"would repeat prompts of {sum(lengths)} characters or tokens {read_n(body)} times; send less"
        )


def read_prompts(body: Reader, model: ModelInfo) -> list[TextPrompt | TokenPrompt]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and not _is_token(prompt[0]):
        if len(prompt) > MAX_PROMPTS:
            body.fail("prompt", f"must hold at most {MAX_PROMPTS} prompts")
        return [_read_prompt(body, f"prompt[{index}]", item, model) for index, item in enumerate(prompt)]
    return [_read_prompt(body, "prompt", prompt, model)]


def _read_prompt(body: Reader, name: str, prompt: Any, model: ModelInfo) -> TextPrompt | TokenPrompt:
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    if not isinstance(prompt, list) or not prompt:
        body.fail(name, "must be a string or a list of token ids that is not empty")
    # Quick: prompts have tens of thousands of tokens.
    if set(map(type, prompt)) != {int} or min(prompt) < 0 or max(prompt) >= model.vocab_size:
        wrong = (i for i, token in enumerate(prompt) if not _is_token(token) or not 0 <= token < model.vocab_size)
        body.fail(f"{name}[{next(wrong)}]", f"must be a token id between 0 and {model.vocab_size - 1}")
    return TokenPrompt(prompt)


def _is_token(value: Any) -> bool:
    return type(value) is int


def _job(call: Call, prompts: list[Any], sampling: SamplingParams, shape: Shape, form: AnswerForm | None) -> Job:
    body = call.body
    options = read_options(call, read_agent(call) if len(prompts) == 1 else named_agent(call))
    stream = body.boolean("stream")
    if len(prompts) > 1 and stream:
        body.fail("stream", "takes one prompt at a time")
    if len(prompts) > 1 and options.agent is not None:
        body.fail("prompt", "must be one prompt when it names an agent")
    if stream and body.boolean("echo"):
        body.fail("echo", "is not supported in a stream")
    job_id = shape.id_prefix + uuid.uuid4().hex
    n = read_n(body)
    if n * len(prompts) > MAX_PROMPTS:
        body.fail("n", f"makes more than {MAX_PROMPTS} answers of {len(prompts)} prompts")
    if n > 1 and options.return_token_ids and n * call.num_bytes > MAX_REPEATED:
        body.fail("n", f"would repeat the tokens of a prompt of {call.num_bytes} bytes {n} times; send less")
    usage = options.report or body.object("stream_options").boolean("include_usage")
    make = partial(options.request, sampling=sampling, n=n, form=form, reading=shape.reading)
    return Job(
        requests=[make(f"{job_id}-{index}" if index else job_id, prompt) for index, prompt in enumerate(prompts)],
        reply=OpenAIReply(
            job_id, options.adapter or call.model.id, shape, usage, options.return_token_ids, call.notes.told, n
        ),
        stream=stream,
        timeout=options.timeout,
    )


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
        calls = [_call(block.name, block.arguments) for block in blocks if isinstance(block, SaidCall)]
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


@dataclass(frozen=True)
class TextShape:
    """Shapes of `/v1/completions`; `prompts` has None for token ids."""

    logprobs: bool
    echo: bool
    prompts: tuple[str | None, ...]

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"
    reading = Reading()

    def choice(self, index: int, completion: Completion) -> tuple[dict[str, Any], int]:
        prompt, echoed = (completion.prompt_logprobs, self.prompts[index]) if self.echo else ((), "")
        if echoed is None:
            echoed = b"".join(token.data for token in prompt).decode(errors="replace")
        offsets = TextOffsets.of_prompt(prompt, len(echoed)) + TextOffsets(len(echoed)).of(completion.logprobs)
        shown = text_logprobs([*prompt, *completion.logprobs], offsets) if self.logprobs else None
        text = echoed + completion.text
        return {"index": index, "text": text, "logprobs": shown, "finish_reason": completion.finish_reason}, 0

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
    """An answer of `n` choices per prompt; `usage`: a stream ends with a report."""

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


class StreamWriter:
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
            thoughts = sum(choice.reader.reasoning_tokens for choice in self._choices)
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
        self.reader = ReplyReader(reply.shape.reading)
        self._offsets = TextOffsets()
        self._waiting: list[TokenLogprob] = []  # tokens without output text so far

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        chunk = self._reply.envelope(self._shape.chunk_object, [choice | {"index": self._index}])
        return event(chunk | {"usage": None} if self._reply.usage else chunk)

    def begin(self) -> bytes:
        return self._chunk(self._shape.first())

    def write(self, update: Update) -> list[bytes]:
        self._waiting += update.logprobs
        events = [wire for event in self.reader.add(update) for wire in self._translated(event)]
        return [*events, self._text("")] if self._waiting and update.finish_reason is not None else events

    def _translated(self, event: Event) -> Iterator[bytes]:
        match event:
            case TextDelta(text):
                yield self._text(text)
            case ReasoningDelta(text):
                yield self._thoughts.event(text)
            case ToolCallStart(index, name):
                self._arguments = TextEvents(
                    lambda text: self._chunk(
                        chat_piece({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
                    )
                )
                yield self._chunk(chat_piece({"tool_calls": [{"index": index} | _call(name, "")]}))
            case ToolCallArguments(_, arguments):
                yield self._arguments.event(arguments)

    def _text(self, text: str) -> bytes:
        if not self._waiting:
            return self._texts.event(text)
        waiting, self._waiting = self._waiting, []
        return self._chunk(self._shape.piece(text, waiting, self._offsets.of(waiting)))

    def keep_alive(self) -> bytes:
        return self._chunk(self._shape.piece("", ()))

    def end(self, completion: Completion) -> bytes:
        last = self._shape.piece("", ()) | {"finish_reason": _finish_reason(completion, self.reader.num_calls > 0)}
        return self._chunk(last | self._reply.token_ids(completion))


def accounting(reports: Sequence[Report], notes: Sequence[str] = (), reasoning_tokens: int = 0) -> dict[str, Any]:
    report = combine(reports)
    usage = {
        "prompt_tokens": report.prompt_tokens,
        "completion_tokens": report.completion_tokens,
        "total_tokens": report.prompt_tokens + report.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": report.reused_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }
    return {"usage": usage, "agentcache": report_object(report, notes)}
