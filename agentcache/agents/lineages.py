"""An agent's lineages: which of them a prompt extends, and which of them is missed least.

An agent is a name for what a client calls a session, and a session holds several conversations: the main one, those of
subagents, requests for a title, and what an edit or a regeneration has left behind. Each is a lineage.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.prefix_match import len_common_prefix
from agentcache.blocks.transcript import Transcript, TranscriptContent
from agentcache.errors import FileUnavailable, StoreError
from agentcache.report import Volatile
from agentcache.store.manifest import AgentRecord

log = logging.getLogger("agentcache.lineages")

# How text that a prompt leaves out is recognised: what follows it has to agree in this many characters, or in a few at
# the transcript's end; and how many passages may be left out.
_ANCHOR_CHARS, _LEAST_CHARS, _MOST_OMISSIONS = 32, 8, 64


class ReadTranscripts:
    """Transcripts of lineages, in RAM as long as this is referenced, but for those whose logs are gone or damaged.

    Making it reads logs, in the calling thread. Raises FileUnavailable for a log that cannot be read now: without it,
    a turn would begin anew what it continues.
    """

    def __init__(self, transcripts: Sequence[Transcript]) -> None:
        self._tried = tuple(transcripts)
        self._contents = [content for each in transcripts if (content := _content_of(each)) is not None]

    def covers(self, transcript: Transcript) -> bool:
        """Whether the transcript is in RAM, or reading it has failed before."""
        return transcript.is_in_ram or any(transcript is tried for tried in self._tried)


def _content_of(transcript: Transcript) -> TranscriptContent | None:
    try:
        return transcript.content()
    except FileUnavailable:
        raise
    except StoreError as error:  # the lineage stays; this request does without
        log.error("%s", error)
        return None


@dataclass(frozen=True)
class PlainPrompt:
    """A prompt before it is matched.

    Args:
        content: marked text, or token ids where it came as these.
        retells: transcripts whose conversation it continues, though it may word differently what was said there.
        volatile: lines in front that have changed since the last turn; None where none has.
        notes: what of a chat was told to the chat template in another way than it was sent.
        read: transcripts that it was compared with; those that could be read stay in RAM as long as the prompt.
    """

    content: str | array[int]
    retells: tuple[Transcript, ...] = ()
    volatile: Volatile | None = None
    notes: tuple[str, ...] = ()
    read: ReadTranscripts | None = field(default=None, compare=False, repr=False)

    def _same_of(self, transcript: Transcript) -> str | array[int]:
        return transcript.text if isinstance(self.content, str) else transcript.ids

    def shared_with(self, transcript: Transcript) -> int:
        """How many leading characters, or tokens, it has in common with a transcript."""
        return len_common_prefix(self._same_of(transcript), self.content)

    def extends(self, transcript: Transcript) -> bool:
        """Whether it begins with all of a transcript."""
        return self.shared_with(transcript) == len(self._same_of(transcript))

    def goes_on_from(self, transcript: Transcript) -> bool:
        """Whether the conversation is the same one: all of the transcript, but for generated text that was left out.

        Many chat templates leave out what a model has thought, once it has answered.
        """
        if self.extends(transcript) or any(transcript is told for told in self.retells):
            return True
        return isinstance(self.content, str) and _leaves_out_generated_text_only(self.content, transcript)

    def is_answered_by(self, transcript: Transcript) -> bool:
        """Whether a transcript is this prompt and an answer to it, and nothing else."""
        length = len(self.content)
        if self.shared_with(transcript) < length:
            return False
        if isinstance(self.content, str):
            return transcript.generated_ranges()[-1:] == [(length, len(transcript.text))]
        return transcript.spans[-1:] == (("generated", len(transcript.ids) - length),)

    def begins_with(self, other: PlainPrompt) -> bool:
        """Whether it begins with all of another prompt of its kind."""
        if type(self.content) is not type(other.content):
            return False
        return len_common_prefix(other.content, self.content) == len(other.content)

    def is_another_beginning(self, transcript: Transcript, shared: int) -> bool:
        """Whether what it shares with a transcript is less than half of either: a template's first words, say."""
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
    """Where from `start` to `end` the old text goes on as the new one does, whose next characters are `following`."""
    if following and (found := old.find(following, start, end + len(following))) >= 0:
        return found
    if end < len(old):
        return None
    tails = range(max(start, end - len(following)), end - _LEAST_CHARS + 1)
    return next((tail for tail in tails if following.startswith(old[tail:])), None)


def choose(lineages: Iterable[AgentRecord], prompt: PlainPrompt, salt: str) -> AgentRecord | None:
    """The lineage that a prompt extends: the one it shares most with; None for another beginning.

    Of equals, the one with more tokens in what is shared goes first, then the one used last. Lineages with another salt
    share nothing, whatever they say; nor do those whose transcripts are not in RAM, since their logs cannot be read.
    """
    best: tuple[tuple[int, int, float], AgentRecord] | None = None
    for record in lineages:
        if record.salt != salt or not record.transcript or not record.transcript.is_in_ram:
            continue
        shared = prompt.shared_with(record.transcript)
        rank = (shared, _tokens_within(record.transcript, prompt, shared), record.last_used)
        if best is None or rank > best[0]:
            best = rank, record
    if best is None or prompt.is_another_beginning(best[1].transcript, best[0][0]):
        return None
    return best[1]


def is_twin(found: AgentRecord, lineages: Iterable[AgentRecord], prompt: PlainPrompt) -> bool:
    """Whether a prompt that was sent before takes the place of `found`, its last answer.

    It does where the lineage is nothing but one prompt and its answer, such as a title or a retry. In a longer
    conversation an answer that is given anew leaves the old one, so that the user can go back to it, and the next
    one replaces the newer of the two.
    """
    if not prompt.is_answered_by(found.transcript):
        return False
    if sum(kind == "generated" for kind, _ in found.transcript.spans) == 1:
        return True
    others = (each for each in lineages if each.name != found.name and each.salt == found.salt)
    return any(each.transcript.is_in_ram and prompt.is_answered_by(each.transcript) for each in others)


def _tokens_within(transcript: Transcript, prompt: PlainPrompt, shared: int) -> int:
    return bisect_right(transcript.ends, shared) if isinstance(prompt.content, str) else shared


def _shared_blocks(one: AgentRecord, other: AgentRecord) -> int:
    """Leading blocks that both name. A block's chain covers all before it, so a few looks suffice."""
    pairs = range(min(len(one.blocks), len(other.blocks)))
    return bisect_left(pairs, True, key=lambda index: one.blocks[index].chain != other.blocks[index].chain)


def unshared_tokens(lineages: Sequence[AgentRecord]) -> dict[str, int]:
    """By name, how many saved tokens of each lineage no other of these has: what would be computed again without it.

    To the block: tokens of a block that only begins alike count as the lineage's own.
    """
    shared = dict.fromkeys((record.name for record in lineages), 0)
    for one, other in combinations(lineages, 2):
        if one.salt == other.salt:
            common = _shared_blocks(one, other) * BLOCK_SIZE
            shared[one.name] = max(shared[one.name], common)
            shared[other.name] = max(shared[other.name], common)
    return {record.name: max(0, record.num_saved - shared[record.name]) for record in lineages}


def staleness(record: AgentRecord, unshared: Mapping[str, int], now: float) -> float:
    """The larger, the sooner a lineage goes: seconds since its last use, times its agent's largest size over its own.

    So among lineages of one size, and among the longest ones of several agents, the least recently used goes first; a
    small one counts as the older, the smaller it is beside its agent's longest: a title of 30 tokens goes before a
    conversation of 30,000 that has been silent for a while (Blankstein et al. 2017, Hyperbolic Caching).

    Args:
        unshared: of `unshared_tokens`, for all lineages of the agent.
        now: seconds since 1970, after the last use of each of them (`use_time.time_after`).
    """
    age = max(now - record.last_used, 1e-6)
    return age * max(1, *unshared.values()) / max(1, unshared[record.name])
