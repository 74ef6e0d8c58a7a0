"""SIGKILL of either rank, and of both, at every step of the write path: what was acknowledged is there after a restart.

And nothing half-written is used: what is said then is what was said before. Likewise while an agent is brought in. The
other rank ends by itself, also where it waits inside MLX for a sum that never comes.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from agentcache.cli.serve import LOST_CODE
from agentcache.ranks.folders import folders_of_agent
from agentcache.store.archive import export_agent
from agentcache.store.verify import verify_folder
from tests.ranks.two_ranks import Played, play
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
EVERY_IMPORT = [
    *(
        ("0", step, 1)
        for step in ("block-temp-written", "block-replaced", "manifest-before-replace", "manifest-replaced")
    ),
    *((ranks, step, 2) for ranks in ("1", "0,1") for step in OF_BLOCKS),
]
IMPORTS = EVERY_IMPORT if os.environ.get("EVERY_KILL") else EVERY_IMPORT[2::6]
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
    check_codes(killed, ranks)
    acknowledged = max((line["acknowledged"] for line in killed.lines if "acknowledged" in line), default=0)
    after = play("a_turn", model, tmp_path / "cache").last
    # A turn that was durable but not told of yet may be there, too.
    assert max(after["before"], default=0) in {acknowledged, *(each for each in (FIRST, WHOLE) if each > acknowledged)}
    check_after(after["said"], said, tmp_path / "cache", is_warm=acknowledged > 0)


def check_codes(killed: Played, ranks: str) -> None:
    """Who was killed was killed, and who was not has ended by itself."""
    for rank, code in enumerate(killed.codes):
        expected = -signal.SIGKILL if str(rank) in ranks else LOST_CODE
        assert code == expected, f"rank {rank} ended with {code}, not {expected}: {killed.why}"


def check_after(after: list[dict[str, Any]], said: list[dict[str, Any]], cache: Path, *, is_warm: bool) -> None:
    assert [turn["token_ids"] for turn in after] == [turn["token_ids"] for turn in said]
    if is_warm:
        assert after[0]["cache_state"] == "warm" and after[0]["cached"] >= 256
    for rank in range(2):
        assert not verify_folder(cache / f"rank-{rank}-of-2").problems


@pytest.fixture(scope="module")
def archive(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an agent of two ranks as one file."""
    folder = tmp_path_factory.mktemp("exported")
    assert not any(play("a_turn", model, folder / "cache").codes)
    own, *others = folders_of_agent(folder / "cache", "anna")
    (folder / "files").mkdir()
    export_agent(own, "anna", folder / "files" / "anna", others=others)
    return folder / "files"


@pytest.mark.parametrize(("ranks", "step", "occurrence"), IMPORTS)
def test_an_agent_that_is_brought_in_is_there_whole_or_not_at_all(
    ranks: str, step: str, occurrence: int, model: Path, archive: Path, said: list[dict[str, Any]], tmp_path: Path
) -> None:
    killed = play("bring_in", model, tmp_path / "cache", archive, die_at=f"{ranks}:{step}:{occurrence}")
    check_codes(killed, ranks)
    assert not killed.lines  # of a turn
    after = play("bring_in", model, tmp_path / "cache", archive).last
    assert after["before"] == [WHOLE] and not after["refused"]
    assert after["known"] == (["anna"] if step == "manifest-replaced" else [])
    check_after(after["said"], said, tmp_path / "cache", is_warm=True)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_that_dies_while_the_model_is_loaded_is_not_waited_for(rank: str, model: Path, tmp_path: Path) -> None:
    """The other one's thread waits inside MLX for good, and `play` would for minutes."""
    check_codes(play("a_turn", model, tmp_path / "cache", die_at=f"{rank}:loading:3"), rank)


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("block", "block bytes with handle 1048576"),
        ("snapshot", "block bytes with handle 1048576"),
        ("adapter", "adapter 1048576"),
        ("message", "Dance"),
    ],
)
def test_what_rank_1_does_not_have_or_know_ends_both_and_costs_no_turn(
    what: str, named: str, model: Path, said: list[dict[str, Any]], tmp_path: Path
) -> None:
    ended = play("astray", model, tmp_path / "cache", Path(what))
    assert ended.codes == [LOST_CODE, LOST_CODE] and named in ended.errors[1], ended.why
    after = play("a_turn", model, tmp_path / "cache").last
    assert after["before"] == [FIRST]
    check_after(after["said"], said, tmp_path / "cache", is_warm=True)
