"""Matches prompts to an agent's lineages, and ranks lineages for eviction.

Lineages are an agent's conversations: the main one, subagents, titles, and branches left by edits.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from agentcache.api.report import Volatile
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.prefix_match import len_common_prefix
from agentcache.blocks.transcript import Transcript, TranscriptContent
from agentcache.errors import FileUnavailable, StoreError
from agentcache.store.manifest import AgentRecord

log = logging.getLogger("agentcache.lineages")

# Characters that must match after an omission, and at the transcript's end; most omissions.
_ANCHOR_CHARS, _LEAST_CHARS, _MOST_OMISSIONS = 32, 8, 64


class ReadTranscripts:
    """Reads logs, and keeps transcripts in RAM while referenced, except with missing or damaged logs.

    Raises FileUnavailable: without the transcript, a turn would restart a conversation.
    """

    def __init__(self, transcripts: Sequence[Transcript]) -> None:
        self._tried = tuple(transcripts)
        self._contents = [content for each in transcripts if (content := _content_of(each)) is not None]

    def covers(self, transcript: Transcript) -> bool:
        return transcript.is_in_ram or any(transcript is tried for tried in self._tried)


def _content_of(transcript: Transcript) -> TranscriptContent | None:
    try:
        return transcript.content()
    except FileUnavailable:
        raise
    except StoreError as error:  # this request does not match it
        log.error("%s", error)
        return None


@dataclass(frozen=True)
class PlainPrompt:
    """A prompt before it is matched."""

    content: str | array[int]  # marked text, or token ids
    retells: tuple[Transcript, ...] = ()  # those that it continues, perhaps reworded
    volatile: Volatile | None = None
    notes: tuple[str, ...] = ()
    read: ReadTranscripts | None = field(default=None, compare=False, repr=False)  # those compared

    def _same_of(self, transcript: Transcript) -> str | array[int]:
        return transcript.text if isinstance(self.content, str) else transcript.ids

    def shared_with(self, transcript: Transcript) -> int:
        return len_common_prefix(self._same_of(transcript), self.content)

    def extends(self, transcript: Transcript) -> bool:
        return self.shared_with(transcript) == len(self._same_of(transcript))

    def goes_on_from(self, transcript: Transcript) -> bool:
        """Whether it continues the transcript, apart from generated text: templates may omit thoughts."""
        if self.extends(transcript) or any(transcript is told for told in self.retells):
            return True
        return isinstance(self.content, str) and _leaves_out_generated_text_only(self.content, transcript)

    def is_answered_by(self, transcript: Transcript) -> bool:
        """Whether the transcript is exactly this prompt and one answer."""
        length = len(self.content)
        if self.shared_with(transcript) < length:
            return False
        if isinstance(self.content, str):
            return transcript.generated_ranges()[-1:] == [(length, len(transcript.text))]
        return transcript.spans[-1:] == (("generated", len(transcript.ids) - length),)

    def begins_with(self, other: PlainPrompt) -> bool:
        if type(self.content) is not type(other.content):
            return False
        return len_common_prefix(other.content, self.content) == len(other.content)

    def is_another_beginning(self, transcript: Transcript, shared: int) -> bool:
        """Whether the shared part, such as a template's beginning, is under half of both."""
        return not shared or 2 * shared < min(len(self._same_of(transcript)), len(self.content))


def _leaves_out_generated_text_only(text: str, transcript: Transcript) -> bool:
    generated, old = transcript.generated_ranges(), transcript.text
    at, old_at = 0, 0
    for _ in range(_MOST_OMISSIONS):
        shared = len_common_prefix(old[old_at:], text[at:])
        at, old_at = at + shared, old_at + shared
        if old_at == len(old):
            return True
        end = next((end for begin, end in generated if begin <= old_at < end), None)
        resumed = None if end is None else _resumed_at(old, old_at, end, text[at : at + _ANCHOR_CHARS])
        if resumed is None:
            return False
        old_at = resumed
    return False


def _resumed_at(old: str, start: int, end: int, following: str) -> int | None:
    if following and (found := old.find(following, start, end + len(following))) >= 0:
        return found
    if end < len(old):
        return None
    tails = range(max(start, end - len(following)), end - _LEAST_CHARS + 1)
    return next((tail for tail in tails if following.startswith(old[tail:])), None)


def choose(lineages: Iterable[AgentRecord], prompt: PlainPrompt, salt: str) -> AgentRecord | None:
    """Return the lineage that shares most with a prompt, then the last used; None if that is too little.

    Another salt, or a transcript outside RAM, never matches.
    """
    best: tuple[tuple[int, int, float], AgentRecord] | None = None
    for record in lineages:
        if record.salt != salt or not record.transcript or not record.transcript.is_in_ram:
            continue
        shared = prompt.shared_with(record.transcript)
        tokens = bisect_right(record.transcript.ends, shared) if isinstance(prompt.content, str) else shared
        rank = (shared, tokens, record.last_used)
        if best is None or rank > best[0]:
            best = rank, record
    if best is None or prompt.is_another_beginning(best[1].transcript, best[0][0]):
        return None
    return best[1]


def is_twin(found: AgentRecord, lineages: Iterable[AgentRecord], prompt: PlainPrompt) -> bool:
    """Whether a repeated prompt replaces `found`, its last answer.

    True for a single prompt with its answer, such as a title. Else the first regenerated answer is a new lineage, for
    the user to go back to; later ones replace it.
    """
    if not prompt.is_answered_by(found.transcript):
        return False
    if sum(kind == "generated" for kind, _ in found.transcript.spans) == 1:
        return True
    others = (each for each in lineages if each.name != found.name and each.salt == found.salt)
    return any(each.transcript.is_in_ram and prompt.is_answered_by(each.transcript) for each in others)


def _shared_blocks(one: AgentRecord, other: AgentRecord) -> int:
    pairs = range(min(len(one.blocks), len(other.blocks)))
    return bisect_left(pairs, True, key=lambda index: one.blocks[index].chain != other.blocks[index].chain)


def unshared_tokens(lineages: Sequence[AgentRecord]) -> dict[str, int]:
    """Return saved tokens by lineage that would be computed again without it."""
    shared = dict.fromkeys((record.name for record in lineages), 0)
    for one, other in combinations(lineages, 2):
        if one.salt == other.salt:
            common = _shared_blocks(one, other) * BLOCK_SIZE
            shared[one.name] = max(shared[one.name], common)
            shared[other.name] = max(shared[other.name], common)
    return {record.name: max(0, record.num_saved - shared[record.name]) for record in lineages}


def eviction_priority(record: AgentRecord, unshared: Mapping[str, int], now: float) -> float:
    """Return seconds since last use, times the agent's largest unshared size over the lineage's.

    Source: Blankstein et al. 2017, Hyperbolic Caching. `now` is after every use (`table.time_after`).
    """
    age = max(now - record.last_used, 1e-6)
    return age * max(1, *unshared.values()) / max(1, unshared[record.name])
