"""Makes tokens of prompts, in the words of agents' transcripts. Runs on worker threads."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from agentcache.adapters.activation import AdapterUse, refuse_without_adapter, use_adapter
from agentcache.adapters.table import ServedAdapter, resolve_policy
from agentcache.agents.lineages import PlainPrompt, ReadTranscripts, choose
from agentcache.agents.table import Agents
from agentcache.api.policy import Policy
from agentcache.api.report import PROMPT_END, Volatile
from agentcache.api.request import ChatPrompt, Prompt, Request, TextPrompt, TokenPrompt
from agentcache.blocks.prefix_match import PromptMatch, len_common_prefix, match_text, match_tokens
from agentcache.blocks.transcript import Spelling, Transcript
from agentcache.errors import AgentUnavailable, FileUnavailable, InvalidRequest
from agentcache.store.manifest import AgentRecord
from agentcache.text.grammars.compiler import Grammar
from agentcache.text.grammars.reply_grammar import reply_grammar
from agentcache.text.messages import plain_messages, with_strings
from agentcache.text.replies.dialects import calling_format
from agentcache.text.replies.history import ReplyReading, Retold, as_generated, with_thoughts
from agentcache.text.replies.stop_strings import NO_STOPS, StopStrings, stop_strings
from agentcache.text.system_prefix import (
    ClientForm,
    PrefixChanges,
    find_changes,
    find_system_prefix,
    in_client_form,
    leading,
    what_changed,
    with_notice,
)
from agentcache.text.tokenizer import Tokenizer
from agentcache.text.work_limit import UNLIMITED, WorkLimit

# Templates may omit thoughts and unknown tools, so messages may be this much longer.
_ROOM_TO_LEAVE_OUT = 4
_ALWAYS_RENDERED = 1_000_000  # characters


def rough_size(request: Request) -> int:
    """Token ids or characters, approximately."""
    return _prompt_size(request.prompt) + (0 if request.form is None else request.form.num_chars)


def _prompt_size(prompt: Prompt) -> int:
    if isinstance(prompt, TokenPrompt):
        return len(prompt.token_ids)
    if isinstance(prompt, TextPrompt):
        return len(prompt.text)
    # `num_bytes` covers calls and tools; walking through them would block the event loop.
    return max(prompt.num_bytes, sum([len(message.get("content") or "") for message in prompt.messages]))


def check_size(prompt: Prompt, tokenizer: Tokenizer, limit: WorkLimit) -> None:
    """Refuse a prompt that would be slow to read and then refused."""
    if isinstance(prompt, TokenPrompt):
        limit.check(len(prompt.token_ids))
    elif isinstance(prompt, TextPrompt):
        tokenizer.encoder.check_length(len(prompt.text), limit)
    else:
        limit.check(len(prompt.messages))
        num_chars = _num_chars(prompt.messages) + _num_chars(prompt.tools) + _num_chars(prompt.template_kwargs)
        if num_chars > _ALWAYS_RENDERED:
            tokenizer.encoder.check_length(num_chars // _ROOM_TO_LEAVE_OUT, limit)


def _num_chars(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_num_chars, value.keys())) + sum(map(_num_chars, value.values()))
    return sum(map(_num_chars, value)) if isinstance(value, Sequence) else 0


def read_prompt(prompt: Prompt, system: str | None, tokenizer: Tokenizer, limit: WorkLimit = UNLIMITED) -> PlainPrompt:
    """The prompt as marked text or token ids. Raises InvalidRequest, ContextLengthExceeded."""
    check_size(prompt, tokenizer, limit)
    if isinstance(prompt, TokenPrompt):
        _check_ids(prompt.token_ids, tokenizer.vocab_size)
        return PlainPrompt(array("I", prompt.token_ids))
    if isinstance(prompt, TextPrompt):
        return PlainPrompt(tokenizer.raw_prompt(prompt.text))
    messages = with_system(prompt.messages, system)
    options = prompt.tools, prompt.add_generation_prompt, prompt.template_kwargs
    told = tokenizer.chats.render(messages, *options, limit=limit)
    return PlainPrompt(told.text, notes=told.notes)


def match(
    prompt: PlainPrompt, transcript: Transcript | None, tokenizer: Tokenizer, limit: WorkLimit = UNLIMITED
) -> PromptMatch:
    """Tokenise the prompt, reusing tokens of a transcript; None without an agent."""
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
    # MLX would read out of bounds. Gemma 3's text models lack their tokenizer's last token.
    if num_embeddings is not None and len(token_ids) and (largest := int(np.max(token_ids))) >= num_embeddings:
        raise InvalidRequest(f"The model has no embedding for token {largest}, only {num_embeddings}.", param="prompt")


def with_system(messages: list[dict[str, Any]], system: str | None) -> list[dict[str, Any]]:
    if system is None or (messages and messages[0].get("role") == "system"):
        return messages
    return [{"role": "system", "content": system}, *messages]


@dataclass(frozen=True)
class AdapterChoice:
    """An adapter and a policy; None for an open one."""

    name: str | None
    policy: Policy | None


def choose_adapter(agents: Agents, request: Request) -> AdapterChoice:
    """The request's adapter, or its agent's; an agent's policy applies only to its own adapter."""
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
    """Tokenise a request and check that it can run.

    `found`: lineage that it extends. `has_state`: the model has recurrent layers. Raises InvalidRequest if the prompt
    does not suit the adapter, or no answer can have the required form.
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
    """The grammar of the answer form, compiled. Raises InvalidRequest."""
    assert request.form is not None
    is_chat = isinstance(request.prompt, ChatPrompt)
    reply = calling_format(tokenizer.reply_format) if request.form.must_call else tokenizer.reply_format
    written = reply_grammar(request.form, reply, prompt.text[-PROMPT_END:] if is_chat else None)
    return tokenizer.grammars.compile(written, limit)


def count_system_tokens(prompt: Prompt, transcript: Transcript) -> int:
    """Tokens before the first user's text; 0 if unknown. Affects cost only."""
    if not isinstance(prompt, ChatPrompt):
        return 0
    front = find_system_prefix(prompt.messages, transcript.text)
    return 0 if front is None else bisect_right(transcript.ends, front.end)


def count_repeated_tokens(request: Request, transcript: Transcript, tokenizer: Tokenizer, limit: WorkLimit) -> int:
    """Prompt tokens that a chat's next prompt repeats, if not the whole reply; else 0. Affects cost only."""
    prompt = request.prompt
    if not isinstance(prompt, ChatPrompt) or not prompt.add_generation_prompt:
        return 0
    options = prompt.tools, prompt.template_kwargs or {}, limit
    # Omitted thoughts are put back from an agent's transcript.
    tells = request.agent is not None
    left_at = tokenizer.next_prompts.left_at(transcript.text, prompt.messages, *options, tells_thoughts=tells)
    return 0 if left_at is None else bisect_right(transcript.ends, left_at)


def held_by(request: Request, found: AgentRecord | None) -> Transcript | None:
    if request.agent is None:
        return None
    return Transcript.empty() if found is None else found.transcript


def system_of(request: Request, agents: Agents) -> str | None:
    record = next(iter(agents.known(request.agent)), None)
    return None if record is None else record.system


def choose_lineage(request: Request, prompt: PlainPrompt, agents: Agents) -> AgentRecord | None:
    """The lineage that the request continues or edits. Raises NotFound."""
    if request.lineage is not None:
        [record] = agents.lineages(request.agent or "", request.lineage)
        return record if record.salt == request.salt or not record.transcript else None
    return choose(agents.known(request.agent), prompt, request.salt)


def read_conversation(
    request: Request,
    system: str | None,
    agents: Agents,
    tokenizer: Tokenizer,
    limit: WorkLimit = UNLIMITED,
    *,
    stable_prefix: bool = False,
) -> PlainPrompt:
    """Render the prompt, with the model's own text for replies that say the same, and thoughts that the client omits.

    With `stable_prefix`, changed lines of the system prefix stay as cached, with a moved notice. Raises
    AgentUnavailable if a transcript is unreadable now, and as `read_prompt`.
    """
    transcripts = transcripts_for(request, agents)
    try:
        read_before = ReadTranscripts(transcripts)
    except FileUnavailable as error:
        raise AgentUnavailable(request.agent or "", str(error)) from error
    prompt = replace(read_prompt(request.prompt, system, tokenizer, limit), read=read_before)
    held = [transcript for transcript in transcripts if transcript.is_in_ram]
    if not isinstance(request.prompt, ChatPrompt) or not held:
        return prompt
    if prompt.extends(max(held, key=prompt.shared_with)):
        return prompt
    read = partial(read_prompt, system=system, tokenizer=tokenizer, limit=limit)
    teller = _Teller(request.prompt, prompt, system, tokenizer, read, stable_prefix)
    told = [teller.tell(transcript) for transcript in held]
    text = max(told, key=lambda each: each.shared).text
    changed = max(told, key=lambda each: each.would_share).volatile
    return PlainPrompt(
        text, tuple(each.transcript for each in told if each.is_same), changed, prompt.notes, read_before
    )


def transcripts_for(request: Request, agents: Agents) -> list[Transcript]:
    records = (
        agents.known(request.agent)
        if request.lineage is None
        else agents.lineages(request.agent or "", request.lineage)
    )
    return [record.transcript for record in records if record.salt == request.salt and record.transcript]


@dataclass(frozen=True)
class _Telling:
    """`would_share`: characters shared if the system prefix were unchanged."""

    text: str
    transcript: Transcript
    is_same: bool
    would_share: int = 0
    volatile: Volatile | None = None

    @property
    def shared(self) -> int:
        return len_common_prefix(self.text, self.transcript.text)


class _Teller:
    def __init__(
        self,
        chat: ChatPrompt,
        prompt: PlainPrompt,
        system: str | None,
        tokenizer: Tokenizer,
        read: Callable[[ChatPrompt], PlainPrompt],
        stable_prefix: bool,
    ) -> None:
        self._chat, self._text = chat, str(prompt.content)
        self._tokenizer, self._read, self._stable_prefix = tokenizer, read, stable_prefix
        self._reading = ReplyReading(tokenizer, chat.tools) if chat.tools or tokenizer.reply_format.is_known else None
        messages = plain_messages(leading(with_system(chat.messages, system)))
        self._front = find_system_prefix(with_strings(messages, tokenizer.marks.mark), self._text)

    def tell(self, transcript: Transcript) -> _Telling:
        changes = self._find_changes(transcript)
        if changes is None or self._front is None:
            told = self._retold(self._chat, self._text, transcript)
            return _Telling(told.text, transcript, told.is_same)
        words = in_client_form(transcript, self._text, self._front, changes)
        if self._stable_prefix and (stable := self._told_behind(words, changes)) is not None:
            text, is_moved = words.as_held(stable.text), True
        else:
            stable, is_moved = self._retold(self._chat, self._text, transcript), False
            text = stable.text
        lines = tuple(map(self._tokenizer.marks.unmark, changes.lines))
        volatile = Volatile(lines, moved=is_moved) if lines else None
        return _Telling(text, transcript, stable.is_same, len_common_prefix(words.text, self._text), volatile)

    def _find_changes(self, transcript: Transcript) -> PrefixChanges | None:
        if self._front is None:
            return None
        return find_changes(self._text, self._front, transcript.text, self._tokenizer.controls)

    def _told_behind(self, words: ClientForm, changes: PrefixChanges) -> Retold | None:
        """The prompt with a moved notice; None if no message can hold it."""
        told, now = self._retold(self._chat, self._text, words), what_changed(changes.lines)
        if now == words.last_told(told.text):
            return told
        messages = with_notice(plain_messages(self._chat.messages), self._tokenizer.marks.unmark(now))
        if messages is None:
            return None
        chat = replace(self._chat, messages=messages)
        return self._retold(chat, str(self._read(chat).content), words)

    def _retold(self, chat: ChatPrompt, text: str, words: Transcript | ClientForm) -> Retold:
        ranges = words.generated_ranges()
        if self._reading is None or not ranges:
            return Retold(text, False)
        first = self._reading.opened_at(words.text, ranges[0][0])
        if len_common_prefix(words.text, text) < self._reading.opening_at(words.text, first, first=0):
            return Retold(text, False)  # a different beginning
        texts = [text]
        for full in with_thoughts(chat.messages, words, self._reading):
            with suppress(InvalidRequest):
                texts.append(str(self._read(replace(chat, messages=full)).content))
        told = [as_generated(each, words, self._reading) for each in texts]
        return max(told, key=lambda each: len_common_prefix(each.text, words.text))
