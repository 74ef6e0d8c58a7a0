"""Rewrites prompts into the words of transcripts, so that the cache matches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from agentcache.agents.lineages import PlainPrompt, ReadTranscripts
from agentcache.agents.table import Agents
from agentcache.api.report import Volatile
from agentcache.api.request import ChatPrompt, Request
from agentcache.blocks.prefix_match import len_common_prefix
from agentcache.blocks.transcript import Transcript
from agentcache.errors import AgentUnavailable, FileUnavailable, InvalidRequest
from agentcache.gateway.prepare import read_prompt, with_system
from agentcache.text.front import (
    ClientsWords,
    FrontChanges,
    find_changes,
    find_front,
    in_clients_words,
    leading,
    what_changed,
    with_notice,
)
from agentcache.text.messages import plain_messages, with_strings
from agentcache.text.replies.history import ReplyReading, Retold, as_generated, with_thoughts
from agentcache.text.tokenizer import Tokenizer
from agentcache.text.work_limit import UNLIMITED, WorkLimit


def read_conversation(
    request: Request,
    system: str | None,
    agents: Agents,
    tokenizer: Tokenizer,
    limit: WorkLimit = UNLIMITED,
    *,
    stable_prefix: bool = False,
) -> PlainPrompt:
    """Render the prompt, with the model's own text for replies that say the same.

    Thoughts that the client omits return if the chat template shows them and the cache has them.

    Args:
        stable_prefix: whether changed lines of the system prefix stay as cached, with a moved notice.

    Raises AgentUnavailable if a transcript is unreadable now, and as `read_prompt`.
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
    """A prompt rewritten for a transcript.

    Args:
        is_same: as in `Retold`.
        would_share: characters shared if the system prefix were unchanged.
        volatile: changed lines of the system prefix.
    """

    text: str
    transcript: Transcript
    is_same: bool
    would_share: int = 0
    volatile: Volatile | None = None

    @property
    def shared(self) -> int:
        return len_common_prefix(self.text, self.transcript.text)


class _Teller:
    """Rewrites one request's prompt for different transcripts.

    Args:
        prompt: `chat`, rendered.
        read: renders other messages the same way.
    """

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
        self._front = find_front(with_strings(messages, tokenizer.mark), self._text)

    def tell(self, transcript: Transcript) -> _Telling:
        changes = self._find_changes(transcript)
        if changes is None or self._front is None:
            told = self._retold(self._chat, self._text, transcript)
            return _Telling(told.text, transcript, told.is_same)
        words = in_clients_words(transcript, self._text, self._front, changes)
        if self._stable_prefix and (stable := self._told_behind(words, changes)) is not None:
            text, is_moved = words.as_held(stable.text), True
        else:
            stable, is_moved = self._retold(self._chat, self._text, transcript), False
            text = stable.text
        lines = tuple(map(self._tokenizer.unmark, changes.lines))
        volatile = Volatile(lines, moved=is_moved) if lines else None
        return _Telling(text, transcript, stable.is_same, len_common_prefix(words.text, self._text), volatile)

    def _find_changes(self, transcript: Transcript) -> FrontChanges | None:
        if self._front is None:
            return None
        return find_changes(self._text, self._front, transcript.text, self._tokenizer.controls)

    def _told_behind(self, words: ClientsWords, changes: FrontChanges) -> Retold | None:
        """The prompt with a moved notice, if the system prefix differs from the last one sent.

        None if no message can hold the notice.
        """
        told, now = self._retold(self._chat, self._text, words), what_changed(changes.lines)
        if now == words.last_told(told.text):
            return told
        messages = with_notice(plain_messages(self._chat.messages), self._tokenizer.unmark(now))
        if messages is None:
            return None
        chat = replace(self._chat, messages=messages)
        return self._retold(chat, str(self._read(chat).content), words)

    def _retold(self, chat: ChatPrompt, text: str, words: Transcript | ClientsWords) -> Retold:
        """The version that shares most with a transcript, with its replies, and thoughts if the template shows them."""
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
