"""The internal request: all HTTP dialects are translated to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from agentcache.api.answer_form import AnswerForm
from agentcache.api.model import HARMONY, ReplyFormat
from agentcache.api.policy import Policy
from agentcache.api.sampling import SamplingParams


@dataclass(frozen=True)
class ChatPrompt:
    """Messages for the chat template. `param`: as errors name it; `num_bytes`: of the request body, 0 if unknown."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    param: str = field(default="messages", compare=False)
    num_bytes: int = field(default=0, compare=False)


@dataclass(frozen=True)
class TextPrompt:
    """Raw text after the tokenizer's BOS; special tokens in it are control tokens."""

    text: str


@dataclass(frozen=True)
class TokenPrompt:
    """Token ids, used unchanged."""

    token_ids: list[int]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


class Priority(StrEnum):
    """Background requests wait, but do not starve."""

    INTERACTIVE = "interactive"
    BACKGROUND = "background"


@dataclass(frozen=True)
class Reading:
    """How a reply is read; by default, all is text.

    `tools`: in OpenAI's format; None to leave calls in the text. `thoughts`: separate reasoning from text.
    """

    form: ReplyFormat = ReplyFormat()
    tools: Sequence[Mapping[str, Any]] | None = None
    thoughts: bool = False
    hides_thoughts: bool = False

    @property
    def is_plain(self) -> bool:
        if self.form.dialect == HARMONY:
            return False
        return (self.tools is None or self.form.dialect is None) and not (self.thoughts and self.form.thoughts)


@dataclass(frozen=True)
class Request:
    """One completion to run.

    Args:
        agent: None leaves no memory on disk.
        lineage: None for the one with the longest common prefix.
        n: number of answers; only the first leaves memory.
        salt: different salts never share a block.
        priority: None for background if nothing is generated, else interactive.
        adapter: None for the agent's own, or base.
        policy: None for the agent's or the adapter's own.
        invocation_start, invocation_optional: see docs/sharing.md.
        reading: `sampling.stop` applies to the answer's text, not to thoughts and calls.
    """

    request_id: str
    prompt: Prompt
    sampling: SamplingParams = field(default_factory=SamplingParams)
    agent: str | None = None
    lineage: str | None = None
    n: int = 1
    salt: str = ""
    priority: Priority | None = None
    adapter: str | None = None
    policy: Policy | None = None
    invocation_start: int | None = None
    invocation_optional: bool = False
    form: AnswerForm | None = None
    reading: Reading = field(default_factory=Reading, compare=False)

    @property
    def is_background(self) -> bool:
        if self.priority is None:
            return self.sampling.max_tokens == 0
        return self.priority is Priority.BACKGROUND

    def fork(self, index: int) -> Request:
        """Request of answer `index`, from 1; its seed is higher by `index`, as in vLLM."""
        own = self.sampling
        seed = None if own.seed is None else own.seed + index
        sampling = replace(own, seed=seed, prompt_logprobs=False)
        return replace(
            self, request_id=f"{self.request_id}-choice{index}", sampling=sampling, agent=None, lineage=None, n=1
        )

    @property
    def prompt_param(self) -> str:
        return self.prompt.param if isinstance(self.prompt, ChatPrompt) else "prompt"
