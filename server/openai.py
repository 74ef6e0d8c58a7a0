"""`POST /v1/chat/completions` and `POST /v1/completions`: translates OpenAI's fields to requests."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from agentcache.api.answer_form import AnswerForm
from agentcache.api.model import ModelInfo
from agentcache.api.request import ChatPrompt, TextPrompt, TokenPrompt
from agentcache.api.sampling import SamplingParams
from agentcache.server.answer_form import ToolChoice, read_form, read_text_form
from agentcache.server.completion import Job, answer
from agentcache.server.context import Call, read_prompt
from agentcache.server.fields import MAX_TOKENS, Dialect, check_fields
from agentcache.server.messages import read_messages
from agentcache.server.model_names import check_model
from agentcache.server.options import Options, check_chat, read_options
from agentcache.server.replies import read_reading
from agentcache.server.sampling import MAX_LOGPROBS, read_max_tokens, read_n, read_sampling
from agentcache.server.session import named_agent, read_agent
from agentcache.server.shapes import ChatShape, OpenAIReply, Shape, TextShape
from agentcache.server.thinking import read_thinking
from agentcache.server.tools import ToolList, read_chat_tools
from agentcache.server.validate import Reader

TEXT_MAX_TOKENS = 16
MAX_PROMPTS = 256
MAX_REPEATED = 8 << 20  # characters of repeated prompts, roughly
_LOGPROB_CHARS = 8  # per prompt token and candidate, roughly


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
    choice = tools.choice(body)
    form = read_form(call, read_text_form(body), prompt.tools, choice, "function.parameters", tools.left_out)
    shape = ChatShape(logprobs is not None, read_reading(model, prompt.tools, body, form, thinking))
    return _job(call, [prompt], sampling, shape, form)


def read_chat_prompt(
    call: Call, tools: ToolList, template_kwargs: dict[str, Any], *, add_generation_prompt: bool
) -> ChatPrompt:
    messages = read_messages(call)
    check_chat(call.model)
    shown = tools.shown(tools.choice(call.body))
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
    """Read the prompts: a string, token ids, or a list of these."""
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
    # No loop in Python: there may be tens of thousands of tokens.
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
    _check_combination(body, len(prompts), options, stream)
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


def _check_combination(body: Reader, num_prompts: int, options: Options, stream: bool) -> None:
    if num_prompts > 1 and stream:
        body.fail("stream", "takes one prompt at a time")
    if num_prompts > 1 and options.agent is not None:
        body.fail("prompt", "must be one prompt when it names an agent")
    if stream and body.boolean("echo"):
        body.fail("echo", "is not supported in a stream")
