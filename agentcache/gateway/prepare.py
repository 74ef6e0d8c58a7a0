"""Tokenises a request and matches it with its agent's lineages. Runs on worker threads."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from agentcache.adapters.activation import AdapterUse, refuse_without_adapter, use_adapter
from agentcache.adapters.table import ServedAdapter, resolve_policy
from agentcache.agents.lineages import PlainPrompt, choose
from agentcache.agents.table import Agents
from agentcache.api.policy import Policy
from agentcache.api.report import PROMPT_END
from agentcache.api.request import ChatPrompt, Prompt, Request, TextPrompt, TokenPrompt
from agentcache.blocks.prefix_match import PromptMatch, match_text, match_tokens
from agentcache.blocks.transcript import Spelling, Transcript
from agentcache.errors import InvalidRequest
from agentcache.store.manifest import AgentRecord
from agentcache.text.front import find_front
from agentcache.text.grammars.compiler import Grammar
from agentcache.text.grammars.reply_grammar import reply_grammar
from agentcache.text.replies.dialects import calling_format
from agentcache.text.replies.stop_strings import NO_STOPS, StopStrings, stop_strings
from agentcache.text.tokenizer import Tokenizer
from agentcache.text.work_limit import UNLIMITED, WorkLimit

# Templates may omit thoughts and unknown tools, so messages may be this much longer.
_ROOM_TO_LEAVE_OUT = 4
_ALWAYS_RENDERED = 1_000_000  # characters; smaller chats are rendered without this check


def rough_size(request: Request) -> int:
    """Approximate size of prompt and answer form, in token ids or characters. Fast for large requests."""
    return _prompt_size(request.prompt) + (0 if request.form is None else request.form.num_chars)


def _prompt_size(prompt: Prompt) -> int:
    if isinstance(prompt, TokenPrompt):
        return len(prompt.token_ids)
    if isinstance(prompt, TextPrompt):
        return len(prompt.text)
    # `num_bytes` covers calls and tools; walking through them would block the event loop.
    return max(prompt.num_bytes, sum([len(message.get("content") or "") for message in prompt.messages]))


def check_size(prompt: Prompt, tokenizer: Tokenizer, limit: WorkLimit) -> None:
    """Refuse by size a prompt that would be slow to read and be refused then."""
    if isinstance(prompt, TokenPrompt):
        limit.check(len(prompt.token_ids))
    elif isinstance(prompt, TextPrompt):
        tokenizer.check_length(len(prompt.text), limit)
    else:
        limit.check(len(prompt.messages))
        num_chars = _num_chars(prompt.messages) + _num_chars(prompt.tools) + _num_chars(prompt.template_kwargs)
        if num_chars > _ALWAYS_RENDERED:
            tokenizer.check_length(num_chars // _ROOM_TO_LEAVE_OUT, limit)


def _num_chars(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_num_chars, value.keys())) + sum(map(_num_chars, value.values()))
    return sum(map(_num_chars, value)) if isinstance(value, Sequence) else 0


def read_prompt(prompt: Prompt, system: str | None, tokenizer: Tokenizer, limit: WorkLimit = UNLIMITED) -> PlainPrompt:
    """The prompt as marked text, or as its token ids.

    Raises:
        InvalidRequest: the messages do not fit the chat template, or the text or token ids are invalid.
        ContextLengthExceeded, InvalidRequest: from `limit`.
    """
    check_size(prompt, tokenizer, limit)
    if isinstance(prompt, TokenPrompt):
        _check_ids(prompt.token_ids, tokenizer.vocab_size)
        return PlainPrompt(array("I", prompt.token_ids))
    if isinstance(prompt, TextPrompt):
        return PlainPrompt(tokenizer.raw_prompt(prompt.text))
    messages = with_system(prompt.messages, system)
    options = prompt.tools, prompt.add_generation_prompt, prompt.template_kwargs
    told = tokenizer.tell_chat(messages, *options, limit=limit)
    return PlainPrompt(told.text, notes=told.notes)


def match(
    prompt: PlainPrompt, transcript: Transcript | None, tokenizer: Tokenizer, limit: WorkLimit = UNLIMITED
) -> PromptMatch:
    """Tokenise the prompt, reusing the tokens of a transcript.

    Args:
        transcript: empty for a new lineage; None without an agent, when the text is not kept.

    Raises ContextLengthExceeded or InvalidRequest from `limit`.
    """
    held = transcript or Transcript.empty()
    if isinstance(prompt.content, str):
        return match_text(held, prompt.content, partial(tokenizer.encode, limit=limit), tokenizer.control_ids)
    return match_tokens(held, prompt.content, _no_text if transcript is None else tokenizer.spell)


def _no_text(token_ids: Sequence[int]) -> Spelling:
    return Spelling("", [0] * len(token_ids))


def _check_ids(token_ids: list[int], vocab_size: int) -> None:
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        wrong = next(i for i, token in enumerate(token_ids) if not 0 <= token < vocab_size)
        message = f"token id {token_ids[wrong]} is outside the vocabulary of {vocab_size}"
        raise InvalidRequest(message, param=f"prompt[{wrong}]")


def _check_embeddings(token_ids: Sequence[int], num_embeddings: int | None) -> None:
    """Refuse tokens without an embedding, which MLX would read out of bounds.

    Gemma 3's text models lack their tokenizer's last token.
    """
    if num_embeddings is not None and len(token_ids) and (largest := int(np.max(token_ids))) >= num_embeddings:
        raise InvalidRequest(f"The model has no embedding for token {largest}, only {num_embeddings}.", param="prompt")


def with_system(messages: list[dict[str, Any]], system: str | None) -> list[dict[str, Any]]:
    """Add a system message in front unless there is one."""
    if system is None or (messages and messages[0].get("role") == "system"):
        return messages
    return [{"role": "system", "content": system}, *messages]


@dataclass(frozen=True)
class AdapterChoice:
    """Name of an adapter, and the requested policy; None leaves it open."""

    name: str | None
    policy: Policy | None


def choose_adapter(agents: Agents, request: Request) -> AdapterChoice:
    """The request's adapter, or its agent's. An agent's policy applies only to its own adapter."""
    record = next(iter(agents.known(request.agent)), None)
    if record is None or record.adapter is None or request.adapter not in (None, record.adapter):
        return AdapterChoice(request.adapter, request.policy)
    own = Policy(record.policy)
    return AdapterChoice(record.adapter, request.policy or (None if own is Policy.AUTO else own))


def agent_policy(adapter: ServedAdapter | None, policy: Policy | None) -> Policy:
    """The policy to store for an agent; `auto` stands for the adapter's own. Raises InvalidRequest."""
    if adapter is not None:
        resolve_policy(policy or Policy.AUTO, adapter.source, adapter.residual_refusal)
        return policy or Policy.AUTO
    if policy not in (None, Policy.EXACT, Policy.AUTO):
        raise InvalidRequest(f"the policy {policy.value!r} needs an adapter", param="policy")
    return Policy.EXACT


@dataclass(frozen=True)
class Prepared:
    """A tokenised request, matched with its lineage.

    Args:
        adapter: None for base.
        system_tokens, repeated_tokens: as of `count_system_tokens` and `count_repeated_tokens`.
        stops: built here to save time on the engine thread.
    """

    match: PromptMatch
    adapter: AdapterUse | None
    system_tokens: int = 0
    repeated_tokens: int = 0
    grammar: Grammar | None = None
    stops: StopStrings = NO_STOPS


def prepare_request(
    request: Request,
    prompt: PlainPrompt,
    found: AgentRecord | None,
    tokenizer: Tokenizer,
    num_embeddings: int | None,
    adapter: ServedAdapter | None,
    policy: Policy | None,
    limit: WorkLimit,
    *,
    has_state: bool = False,
) -> Prepared:
    """Compute everything that a request needs before it runs.

    Args:
        prompt: result of `read_prompt`.
        found: lineage that it extends, if any.
        adapter, policy: as of `choose_adapter`.
        has_state: whether the model has recurrent layers.

    Raises:
        InvalidRequest: the prompt does not suit the adapter, or no answer can have the required form.
    """
    matched = match(prompt, held_by(request, found), tokenizer, limit)
    _check_embeddings(matched.transcript.ids, num_embeddings)
    system_tokens = count_system_tokens(request.prompt, matched.transcript)
    repeated_tokens = count_repeated_tokens(request, matched.transcript, tokenizer, limit) if has_state else 0
    if adapter is None:
        refuse_without_adapter(request)
        use = None
    else:
        use = use_adapter(adapter, policy, request, matched.transcript.ids)
    grammar = None if request.form is None else make_grammar(request, matched.transcript, tokenizer, limit)
    return Prepared(matched, use, system_tokens, repeated_tokens, grammar, stop_strings(request.sampling.stop))


def make_grammar(request: Request, prompt: Transcript, tokenizer: Tokenizer, limit: WorkLimit) -> Grammar:
    """Compile the grammar of the answer form. Raises InvalidRequest."""
    assert request.form is not None
    is_chat = isinstance(request.prompt, ChatPrompt)
    reply = calling_format(tokenizer.reply_format) if request.form.must_call else tokenizer.reply_format
    written = reply_grammar(request.form, reply, prompt.text[-PROMPT_END:] if is_chat else None)
    return tokenizer.grammars.compile(written, limit)


def count_system_tokens(prompt: Prompt, transcript: Transcript) -> int:
    """Number of tokens before the first user's text, which other prompts may share.

    0 if unknown. Affects cost only.
    """
    if not isinstance(prompt, ChatPrompt):
        return 0
    front = find_front(prompt.messages, transcript.text)
    return 0 if front is None else bisect_right(transcript.ends, front.end)


def count_repeated_tokens(request: Request, transcript: Transcript, tokenizer: Tokenizer, limit: WorkLimit) -> int:
    """Prompt tokens that a chat's next prompt repeats, if it does not repeat the reply as generated; else 0.

    Affects cost only.
    """
    prompt = request.prompt
    if not isinstance(prompt, ChatPrompt) or not prompt.add_generation_prompt:
        return 0
    options = prompt.tools, prompt.template_kwargs or {}, limit
    # Omitted thoughts are put back from an agent's transcript.
    tells = request.agent is not None
    left_at = tokenizer.next_prompt_leaves(transcript.text, prompt.messages, *options, tells_thoughts=tells)
    return 0 if left_at is None else bisect_right(transcript.ends, left_at)


def held_by(request: Request, found: AgentRecord | None) -> Transcript | None:
    if request.agent is None:
        return None
    return Transcript.empty() if found is None else found.transcript


def system_of(request: Request, agents: Agents) -> str | None:
    record = next(iter(agents.known(request.agent)), None)
    return None if record is None else record.system


def choose_lineage(request: Request, prompt: PlainPrompt, agents: Agents) -> AgentRecord | None:
    """The lineage that the request extends, or None. Raises NotFound."""
    if request.lineage is not None:
        [record] = agents.lineages(request.agent or "", request.lineage)
        return record if record.salt == request.salt or not record.transcript else None
    return choose(agents.known(request.agent), prompt, request.salt)
