"""The one internal request: every wire dialect is a thin translation to it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from agentcache.adapter_settings import Policy
from agentcache.answer_form import AnswerForm
from agentcache.models.text.replies.reading import Reading
from agentcache.sampling import SamplingParams


@dataclass(frozen=True)
class ChatPrompt:
    """Messages for the model's chat template, each a dict with `role` and `content` and whatever else it may carry.

    Args:
        param: what the wire calls them, for errors about them.
        num_bytes: length of the body that they came in; 0 if unknown.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    param: str = field(default="messages", compare=False)
    num_bytes: int = field(default=0, compare=False)


@dataclass(frozen=True)
class TextPrompt:
    """Raw text; special tokens in it are control tokens, and the tokenizer's BOS is put in front."""

    text: str


@dataclass(frozen=True)
class TokenPrompt:
    """Token ids, taken as they are."""

    token_ids: list[int]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


class Priority(StrEnum):
    """Who goes first where requests compete; a background request waits, but never for ever."""

    INTERACTIVE = "interactive"
    BACKGROUND = "background"


@dataclass(frozen=True)
class Request:
    """One completion to run.

    Args:
        request_id: unique; the wire's id.
        prompt: what to continue.
        sampling: how to continue it.
        agent: the durable agent whose memory this extends; None for a request that leaves no memory on disk.
        lineage: the agent's lineage to go on from; None for the one that shares most with the prompt.
        n: answers to give. The first is the agent's turn; the others go on from the same blocks and leave no memory.
        salt: requests with different salts never share a block.
        priority: None for background where nothing is generated (a warm), interactive otherwise.
        adapter: name of the adapter to answer with; None for the agent's, or base.
        policy: how the adapter may share; None for the agent's or the adapter's own.
        invocation_start: token from which an activated adapter acts; None for its invocation's last occurrence.
        invocation_optional: base answers where the prompt does not invoke the adapter, instead of a refusal.
        form: what form the answer must have; None for any.
        reading: what the answer is read for: `sampling.stop` counts in its text, outside thoughts and calls.
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
        """Number `index` (from 1) of its further answers, drawn with the seed `index` further on (as in vLLM)."""
        own = self.sampling
        seed = None if own.seed is None else own.seed + index
        sampling = replace(own, seed=seed, prompt_logprobs=False)
        return replace(
            self, request_id=f"{self.request_id}-choice{index}", sampling=sampling, agent=None, lineage=None, n=1
        )

    @property
    def prompt_param(self) -> str:
        """What the wire calls the prompt, for errors about it."""
        return self.prompt.param if isinstance(self.prompt, ChatPrompt) else "prompt"
