"""The one internal request: every wire dialect is a thin translation to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from agentcache.adapter_settings import Policy


@dataclass(frozen=True)
class ChatPrompt:
    """Messages for the model's chat template, each a dict with `role` and `content` and whatever else it may carry."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True


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
class SamplingParams:
    """How to choose tokens.

    Args:
        max_tokens: tokens to generate; 0 only caches the prompt; None for as many as the context holds.
        temperature: 0 is greedy and deterministic.
        top_p, top_k, min_p: the usual truncations; 1.0, 0 and 0.0 switch them off.
        repetition_penalty: divides the logits of tokens seen before; 1.0 is off.
        logit_bias: added to the logits, by token id.
        seed: makes sampling repeatable.
        stop: strings that end the generation; they are not part of the text.
        logprobs: number of alternatives to report per token; None for no logprobs at all, 0 for the chosen one only.
        prompt_logprobs: report logprobs of the prompt's tokens too (computes the whole prompt).
        ignore_eos: run to max_tokens.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: bool = False
    ignore_eos: bool = False


@dataclass(frozen=True)
class Request:
    """One completion to run.

    Args:
        request_id: unique; the wire's id.
        prompt: what to continue.
        sampling: how to continue it.
        agent: the durable agent whose memory this extends; None for a request that leaves no memory on disk.
        lineage: the agent's lineage to go on from; None for the one that shares most with the prompt.
        salt: requests with different salts never share a block.
        priority: None for background where nothing is generated (a warm), interactive otherwise.
        adapter: name of the adapter to answer with; None for the agent's, or base.
        policy: how the adapter may share; None for the agent's or the adapter's own.
        invocation_start: token from which an activated adapter acts; None for its invocation's last occurrence.
        invocation_optional: base answers where the prompt does not invoke the adapter, instead of a refusal.
    """

    request_id: str
    prompt: Prompt
    sampling: SamplingParams = field(default_factory=SamplingParams)
    agent: str | None = None
    lineage: str | None = None
    salt: str = ""
    priority: Priority | None = None
    adapter: str | None = None
    policy: Policy | None = None
    invocation_start: int | None = None
    invocation_optional: bool = False

    @property
    def is_background(self) -> bool:
        if self.priority is None:
            return self.sampling.max_tokens == 0
        return self.priority is Priority.BACKGROUND

    @property
    def prompt_param(self) -> str:
        """What the wire calls the prompt, for errors about it."""
        return "messages" if isinstance(self.prompt, ChatPrompt) else "prompt"
