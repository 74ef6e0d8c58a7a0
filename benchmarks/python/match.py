"""CPU time of matching a long prompt against its agent's transcript and the blocks of many agents."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentcache.agents.lineages import PlainPrompt, choose
from agentcache.agents.table import AgentTable
from agentcache.bench.ttft import WORDS
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.ledger import Ledger
from agentcache.blocks.pool import Group
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.blocks.prefix_match import PromptMatch, match_text
from agentcache.blocks.transcript import Transcript
from agentcache.store.manifest import AgentRecord
from agentcache.text.tokenizer import Tokenizer

_ROOT = "root"
_OWN_TOKENS = 2 * BLOCK_SIZE + 100  # of each agent, after the shared prefix
_TURN_WORDS = 150


@dataclass(frozen=True)
class MatchPlan:
    """`prompt_tokens` is a minimum. The prompt's agent has `lineages` too, which share most of its text."""

    agents: int = 1000
    lineages: int = 8
    prompt_tokens: int = 32768
    repeats: int = 50
    seed: int = 0


@dataclass(frozen=True)
class MatchCost:
    """Milliseconds for one prompt: CPU time, but wall time for the template, which a child process renders.

    Args:
        lineage_ms: choice of the lineage that the prompt continues.
        transcript_ms: match of the transcript, and tokenising the rest.
        tree_ms: lookup of cached blocks.
        open_ms: lookup plus block tables.
    """

    template_ms: float
    lineage_ms: float
    transcript_ms: float
    tree_ms: float
    open_ms: float
    prompt_tokens: int
    tree_nodes: int

    @property
    def match_ms(self) -> float:
        return self.lineage_ms + self.transcript_ms + self.tree_ms


def measure_match(plan: MatchPlan, tokenizer: Tokenizer, groups: Sequence[Group]) -> MatchCost:
    return _MatchBench(plan, tokenizer, PrefixCache(groups, Ledger(1 << 50))).run()


class _MatchBench:
    def __init__(self, plan: MatchPlan, tokenizer: Tokenizer, cache: PrefixCache) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        self._cache = cache
        self._random = random.Random(plan.seed)

    def run(self) -> MatchCost:
        messages, transcript = self._converse()
        messages.append({"role": "user", "content": "And then?"})
        self._fill_tree(list(transcript.ids))
        gc.collect()
        ids = list(self._match(transcript, messages).transcript.ids)
        text = self._tokenizer.render_chat(messages)
        lineages = self._lineages(transcript)
        return MatchCost(
            template_ms=self._median(lambda: self._tokenizer.render_chat(messages), time.perf_counter),
            lineage_ms=self._median(lambda: self._choose(lineages, PlainPrompt(text))),
            transcript_ms=self._median(
                lambda: match_text(transcript, text, self._tokenizer.encode, self._tokenizer.control_ids)
            ),
            tree_ms=self._median(lambda: self._cache.match_prefix(_ROOT, ids, len(ids) - 1)),
            open_ms=self._median(lambda: self._open(ids)),
            prompt_tokens=len(ids),
            tree_nodes=sum(1 for _ in self._cache.tree.walk()),
        )

    def _median(self, work: Callable[[], object], clock: Callable[[], float] = time.thread_time) -> float:
        """Return milliseconds, by default of this thread's CPU time."""
        times = []
        for _ in range(self._plan.repeats):
            started = clock()
            work()
            times.append((clock() - started) * 1e3)
        return statistics.median(times)

    def _converse(self) -> tuple[list[dict[str, Any]], Transcript]:
        messages: list[dict[str, Any]] = []
        transcript = Transcript.empty()
        while len(transcript) < self._plan.prompt_tokens:
            messages.append({"role": "user", "content": self._words(_TURN_WORDS)})
            prompt = self._match(transcript, messages).transcript
            reply = self._words(_TURN_WORDS)
            encoded = self._tokenizer.encode(reply)
            transcript = prompt.extended(reply, encoded.ids, encoded.ends, "generated")
            messages.append({"role": "assistant", "content": reply})
        return messages, transcript

    def _match(self, transcript: Transcript, messages: list[dict[str, Any]]) -> PromptMatch:
        text = self._tokenizer.render_chat(messages)
        return match_text(transcript, text, self._tokenizer.encode, self._tokenizer.control_ids)

    def _words(self, count: int) -> str:
        return " ".join(self._random.choices(WORDS.split(), k=count)) + "."

    def _fill_tree(self, token_ids: list[int]) -> None:
        """Let agents diverge near the end, so that the widest node is the deepest."""
        self._insert(token_ids)
        shared = token_ids[:-_OWN_TOKENS]
        for _ in range(self._plan.agents * self._plan.lineages - 1):
            self._insert(shared + self._random.choices(range(1000), k=_OWN_TOKENS))

    def _lineages(self, transcript: Transcript) -> list[AgentRecord]:
        """Let lineages diverge at several points; the conversation itself is last."""
        blank, num_tokens = AgentTable("model").new("alice"), len(transcript)
        step = num_tokens // (2 * self._plan.lineages)
        cuts = [transcript.cut(num_tokens - step * number) for number in range(1, self._plan.lineages)]
        left = [cut.extended(more := self._words(5), [1], [len(more)], "generated") for cut in cuts]
        return [replace(blank, lineage=str(number), transcript=each) for number, each in enumerate([*left, transcript])]

    @staticmethod
    def _choose(lineages: Sequence[AgentRecord], prompt: PlainPrompt) -> None:
        found = choose(lineages, prompt, "")
        assert found is lineages[-1] and prompt.extends(found.transcript)

    def _insert(self, token_ids: list[int]) -> None:
        sequence = self._cache.open(_ROOT, self._cache.match_prefix(_ROOT, token_ids, len(token_ids)))
        rest = token_ids[sequence.num_tokens :]
        self._cache.reserve(sequence, len(rest))
        self._cache.advance(sequence, rest)
        self._cache.close(sequence)

    def _open(self, token_ids: list[int]) -> None:
        self._cache.abandon(self._cache.open(_ROOT, self._cache.match_prefix(_ROOT, token_ids, len(token_ids) - 1)))
