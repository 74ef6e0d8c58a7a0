"""Reads sampling parameters."""

from __future__ import annotations

from agentcache.api.model import ModelInfo
from agentcache.api.sampling import BOUNDS, MAX_STOP_CHARS, MAX_STOP_STRINGS, SamplingParams
from agentcache.server.validate import Reader

MAX_TOKENS_LIMIT = 2**31 - 1
MAX_LOGPROBS = 20
MAX_CHOICES = 128


def read_sampling(
    body: Reader,
    model: ModelInfo,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: bool = False,
    stop: str = "stop",
) -> SamplingParams:
    """Read sampling parameters, with the defaults of `model.sampling`. A top_k of -1 disables it.

    Args:
        stop: the dialect's field of stop strings.
    """
    default = SamplingParams(**model.sampling.known)
    top_k = body.integer("top_k", minimum=-1)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_number(body, "temperature", default.temperature),
        top_p=_number(body, "top_p", default.top_p),
        top_k=max(default.top_k if top_k is None else top_k, 0),
        min_p=_number(body, "min_p", default.min_p),
        repetition_penalty=_read_repetition(body, default.repetition_penalty),
        frequency_penalty=_number(body, "frequency_penalty", 0.0),
        presence_penalty=_number(body, "presence_penalty", 0.0),
        logit_bias=_read_logit_bias(body, model.vocab_size),
        seed=body.integer("seed", minimum=-(2**63)),
        min_tokens=_read_min_tokens(body, max_tokens),
        stop=_read_stop(body, stop),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        ignore_eos=body.boolean("ignore_eos"),
    )


def _number(body: Reader, name: str, default: float) -> float:
    least, greatest = BOUNDS[name]
    return body.number(name, default, minimum=least, maximum=greatest)


def _read_repetition(body: Reader, default: float) -> float:
    """Read `repetition_penalty`, or llama.cpp's and Ollama's name for it."""
    name = "repetition_penalty" if body.get("repetition_penalty") is not None else "repeat_penalty"
    least, greatest = BOUNDS["repetition_penalty"]
    return body.number(name, default, minimum=least, maximum=greatest)


def read_max_tokens(body: Reader, *names: str, default: int | None) -> int | None:
    """Return the first field given; None, or -1 on the wire, for the rest of the context."""
    given = [body.integer(name, minimum=-1, maximum=MAX_TOKENS_LIMIT) for name in names]
    most = next((value for value in given if value is not None), default)
    return None if most == -1 else most


def read_n(body: Reader) -> int:
    return body.integer("n", minimum=1, maximum=MAX_CHOICES) or 1


def _read_min_tokens(body: Reader, max_tokens: int | None) -> int:
    wanted = body.integer("min_tokens", minimum=0, maximum=MAX_TOKENS_LIMIT) or 0
    if max_tokens is not None and wanted > max_tokens:
        body.fail("min_tokens", f"must be at most the {max_tokens} tokens that may be generated")
    return wanted


def _read_stop(body: Reader, name: str) -> tuple[str, ...]:
    stop = body.get(name)
    if stop in (None, ""):
        return ()
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list) or len(strings) > MAX_STOP_STRINGS:
        body.fail(name, f"must be a string or a list of at most {MAX_STOP_STRINGS} strings")
    for index, string in enumerate(strings):
        if not isinstance(string, str) or not string:
            body.fail(name if string is stop else f"{name}[{index}]", "must be a string that is not empty")
    if sum(map(len, strings)) > MAX_STOP_CHARS:
        body.fail(name, f"must have at most {MAX_STOP_CHARS} characters in all")
    return tuple(strings)


def _read_logit_bias(body: Reader, vocab_size: int) -> dict[int, float]:
    biases = body.object("logit_bias")
    return {
        _token_id(biases, key, vocab_size): biases.as_number(key, biases.get(key), minimum=-100, maximum=100)
        for key in biases.value
    }


def _token_id(biases: Reader, key: str, vocab_size: int) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 9 and int(key) < vocab_size):
        biases.fail(key, f"must be named by a token id between 0 and {vocab_size - 1}")
    return int(key)
