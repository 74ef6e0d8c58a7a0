"""SIGKILL of either rank, and of both, at every step of the write path: what was acknowledged is there after a restart.

And nothing half-written is used: what is said then is what was said before.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from agentcache.store.verify import verify_folder
from tests.ranks.two_ranks import play
from tests.tiny import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BLOCK = ("before-temp", "temp-written", "before-fsync", "before-replace", "replaced", "before-folder-fsync")
OF_BLOCKS = [f"block-{step}" for step in BLOCK]
OF_MANIFESTS = [f"manifest-{step}" for step in BLOCK]
OF_LOGS = ["log-before-append", "log-appended", "log-synced"]
EVERY_CASE = [
    *(("0", step, 1) for step in (*OF_BLOCKS, *OF_MANIFESTS, *OF_LOGS)),
    *((ranks, step, 1) for ranks in ("1", "0,1") for step in OF_BLOCKS),
    *((ranks, step, 5) for ranks in ("0", "1") for step in OF_BLOCKS),  # the second turn's
]
# A case is four processes that load a model: every eighth one, one of each kind, unless all are asked for.
CASES = EVERY_CASE if os.environ.get("EVERY_KILL") else EVERY_CASE[::8]
FIRST, WHOLE = 285, 550  # tokens of the agent when its turns are acknowledged


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def said(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By ranks that nobody kills."""
    turns: list[dict[str, Any]] = play("a_turn", model, tmp_path_factory.mktemp("sound") / "cache").last["said"]
    return turns


@pytest.mark.parametrize(("ranks", "step", "occurrence"), CASES)
def test_no_acknowledged_turn_is_lost(
    ranks: str, step: str, occurrence: int, model: Path, said: list[dict[str, Any]], tmp_path: Path
) -> None:
    killed = play("a_turn", model, tmp_path / "cache", die_at=f"{ranks}:{step}:{occurrence}")
    assert -signal.SIGKILL in killed.codes
    acknowledged = max((line["acknowledged"] for line in killed.lines if "acknowledged" in line), default=0)
    after = play("a_turn", model, tmp_path / "cache").last
    # A turn that was durable but not told of yet may be there, too.
    assert max(after["before"], default=0) in {acknowledged, *(each for each in (FIRST, WHOLE) if each > acknowledged)}
    for ours, theirs in zip(after["said"], said, strict=True):
        assert ours["token_ids"] == theirs["token_ids"]
    if acknowledged:
        assert after["said"][0]["cache_state"] == "warm" and after["said"][0]["cached"] >= 256
    for rank in range(2):
        assert not verify_folder(tmp_path / "cache" / f"rank-{rank}-of-2").problems
