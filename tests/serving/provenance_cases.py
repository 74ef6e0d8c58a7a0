"""Agents whose blocks have different producers, on a model without any adapter, so that all producers compute the same.

What each may use of the others is bookkeeping all the same, and is what is counted here; that the values differ is the
business of tests with real adapters.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from agentcache.api.report import CacheState, Report
from agentcache.blocks.keys import KVOrigin
from agentcache.store.verify import verify_folder
from tests.serving import inside
from tests.serving.by_hand import ByHand
from tests.serving.conversation import greedy, make_ids

PROMPT = make_ids(600)
START = 300
UPPER = frozenset([1])
A, B = KVOrigin("aa", START, UPPER), KVOrigin("bb", START, UPPER)
MORE = 40


def ask(hand: ByHand, ids: list[int], agent: str | None = None, producer: KVOrigin | None = None) -> Report:
    """Compute the prompt and a token behind it, which the cache does not get."""
    receiver = hand.submit(ids, greedy(1), agent, producer)
    hand.run(receiver)
    assert receiver.report.saved in (None, True)
    return receiver.report


def reused(report: Report) -> tuple[int, int]:
    """Tokens of the agent's own memory, and of others'."""
    return report.cached_tokens.own, report.cached_tokens.shared


def state(hand: ByHand, agent: str) -> CacheState:
    return inside.agent_info(hand.engine, agent).cache_state


def files(cache_dir: Path) -> Counter[tuple[str, str, int]]:
    """Group, producer and number of tokens of every block on disk."""
    found: Counter[tuple[str, str, int]] = Counter()
    for path in (cache_dir / "blocks").glob("*/*.safetensors"):
        data = path.read_bytes()
        metadata: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        length = int(metadata["total_tokens"]) - (int(metadata["num_blocks"]) - 1) * 256
        found[metadata["group"], metadata["producer"], length] += 1
    return found


def check_sound(cache_dir: Path) -> None:
    report = verify_folder(cache_dir)
    assert (report.missing_blocks, report.unnamed_blocks, report.problems) == (0, 0, ())
