from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, ClassVar

from agentcache.errors import InvalidRequest

# The sampler computes in float32; within these, nothing overflows.
BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "logit_bias": (-1e30, 1e30),
}
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 2**14  # in total
_LEAST_COUNTS = {"max_tokens": 0, "min_tokens": 0, "top_k": -1, "logprobs": 0}


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters.

    Args:
        max_tokens: 0 only caches the prompt; None for the rest of the context.
        temperature: 0 is greedy.
        top_p, top_k, min_p: disabled by 1.0, 0 (or -1) and 0.0.
        repetition_penalty: divides positive and multiplies negative logits of the last 64 tokens.
        frequency_penalty, presence_penalty: as OpenAI's.
        logit_bias: added to the logits, by token id; unknown ids are ignored.
        min_tokens: before the end of sequence and `stop` apply (as vLLM's).
        stop: not part of the text.
        logprobs: alternatives per token; 0 for the chosen one only, None for none.
        prompt_logprobs: computes the whole prompt.

        Raises InvalidRequest.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: bool = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, least in _LEAST_COUNTS.items():
            _check_count(name, getattr(self, name), least)
        for name, bounds in BOUNDS.items():
            if name != "logit_bias":
                _check_number(name, getattr(self, name), *bounds)
        _check_bias(self.logit_bias)
        if self.seed is not None and not isinstance(self.seed, Integral):
            raise InvalidRequest("seed must be a whole number.", param="seed")
        _check_stop(self.stop)
        object.__setattr__(self, "stop", tuple(self.stop))


@dataclass(frozen=True)
class SamplingDefaults:
    """Defaults; None leaves a value to a later source (`over`). Raises InvalidRequest."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    NAMES: ClassVar[tuple[str, ...]] = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

    def __post_init__(self) -> None:
        SamplingParams(**self.known)

    @property
    def known(self) -> dict[str, Any]:
        return {name: value for name in self.NAMES if (value := getattr(self, name)) is not None}

    def over(self, other: SamplingDefaults) -> SamplingDefaults:
        return SamplingDefaults(**{**other.known, **self.known})


def _check_count(name: str, value: Any, least: int) -> None:
    may_be_none = name in ("max_tokens", "logprobs")
    if value is None and may_be_none:
        return
    if not isinstance(value, Integral) or value < least:
        raise InvalidRequest(f"{name} must be a whole number of at least {least}.", param=name)


def _check_number(name: str, value: Any, least: float, greatest: float) -> None:
    if not isinstance(value, Real) or not least <= float(value) <= greatest:  # NaN fails, too
        raise InvalidRequest(f"{name} must be a number between {least} and {greatest}.", param=name)


def _check_bias(biases: Any) -> None:
    if not isinstance(biases, Mapping) or not all(isinstance(token, Integral) for token in biases):
        raise InvalidRequest("logit_bias must be numbers by token id.", param="logit_bias")
    for token, bias in biases.items():
        _check_number(f"logit_bias.{token}", bias, *BOUNDS["logit_bias"])


def _check_stop(stop: Any) -> None:
    if not isinstance(stop, tuple | list) or not all(isinstance(string, str) and string for string in stop):
        raise InvalidRequest("stop must be strings that are not empty.", param="stop")
    if len(stop) > MAX_STOP_STRINGS or sum(map(len, stop)) > MAX_STOP_CHARS:
        message = f"stop must be at most {MAX_STOP_STRINGS} strings with {MAX_STOP_CHARS} characters in all."
        raise InvalidRequest(message, param="stop")
