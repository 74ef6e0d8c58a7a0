"""An agent's lineages: which of them a prompt goes on from, and which of them is missed least.

An agent is a name for what a client calls a session, and a session holds several conversations: the main one, those of
subagents, requests for a title, and what an edit or a regeneration has left behind. Each is a lineage.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from agentcache.blocks.prefix_match import len_common_prefix
from agentcache.blocks.transcript import Transcript
from agentcache.kv.manifest import AgentRecord


@dataclass(frozen=True)
class PlainPrompt:
    """A prompt before it is matched.

    Args:
        content: marked text, or token ids where it came as these.
    """

    content: str | array[int]

    def _same_of(self, transcript: Transcript) -> str | array[int]:
        return transcript.text if isinstance(self.content, str) else transcript.ids

    def shared_with(self, transcript: Transcript) -> int:
        """How many leading characters, or tokens, it has in common with a transcript."""
        return len_common_prefix(self._same_of(transcript), self.content)

    def extends(self, transcript: Transcript) -> bool:
        """Whether it begins with all of a transcript."""
        return self.shared_with(transcript) == len(self._same_of(transcript))

    def begins_with(self, other: PlainPrompt) -> bool:
        """Whether it begins with all of another prompt of its kind."""
        if type(self.content) is not type(other.content):
            return False
        return len_common_prefix(other.content, self.content) == len(other.content)

    def is_another_beginning(self, transcript: Transcript, shared: int) -> bool:
        """Whether what it shares with a transcript is less than half of either: a template's first words, say."""
        return not shared or 2 * shared < min(len(self._same_of(transcript)), len(self.content))


def choose(lineages: Iterable[AgentRecord], prompt: PlainPrompt, salt: str) -> AgentRecord | None:
    """The lineage that a prompt goes on from: the one it shares most with; None for another beginning.

    Of equals, the one with more tokens in what is shared goes first, then the one used last. Lineages with another salt
    share nothing, whatever they say.
    """
    best: tuple[tuple[int, int, float], AgentRecord] | None = None
    for record in lineages:
        if record.salt != salt or not record.transcript.ids:
            continue
        shared = prompt.shared_with(record.transcript)
        rank = (shared, _tokens_within(record.transcript, prompt, shared), record.last_used)
        if best is None or rank > best[0]:
            best = rank, record
    if best is None or prompt.is_another_beginning(best[1].transcript, best[0][0]):
        return None
    return best[1]


def _tokens_within(transcript: Transcript, prompt: PlainPrompt, shared: int) -> int:
    return bisect_right(transcript.ends, shared) if isinstance(prompt.content, str) else shared


def unshared_tokens(lineages: Sequence[AgentRecord]) -> dict[str, int]:
    """By name, how many saved tokens of each lineage no other of these has: what would be computed again without it."""
    shared = dict.fromkeys((record.name for record in lineages), 0)
    for one, other in combinations(lineages, 2):
        if one.salt == other.salt:
            common = len_common_prefix(one.transcript.ids, other.transcript.ids)
            shared[one.name] = max(shared[one.name], min(common, other.num_saved))
            shared[other.name] = max(shared[other.name], min(common, one.num_saved))
    return {record.name: max(0, record.num_saved - shared[record.name]) for record in lineages}


def staleness(record: AgentRecord, unshared: Mapping[str, int], now: float) -> float:
    """How gladly a lineage is given up: the seconds since its last use, times what its agent has in a larger one.

    So among lineages of one size, and among the longest ones of several agents, the least recently used goes first; a
    small one counts as the older, the smaller it is beside its agent's longest: a title of 30 tokens goes before a
    conversation of 30,000 that has been silent for a while (Blankstein et al. 2017, Hyperbolic Caching).

    Args:
        unshared: of `unshared_tokens`, for all lineages of the agent.
        now: seconds since 1970.
    """
    age = max(now - record.last_used, 1e-6)
    return age * max(1, *unshared.values()) / max(1, unshared[record.name])
