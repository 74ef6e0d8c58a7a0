"""Two processes with a part of the model each, as one server: turns survive the end of either."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import httpx
import pytest

from agentcache.cli.serve import LOST_CODE
from agentcache.client import ServerError
from agentcache.ranks.lost import EXIT_CODE
from agentcache.server_process import ServerNotStarted
from agentcache.store.verify import verify_folder
from tests.conftest import ModelFolder
from tests.live.servers import (
    agent_info,
    complete,
    greedy,
    http_of,
    make_ids,
    outcome,
    serving,
    stats,
    stop,
    wait_until,
    wait_until_computing,
)
from tests.live.world import World, serving_together

pytestmark = pytest.mark.slow
# A signal, and the seconds that a rank may be silent: one that is dead is noticed long before.
DEATHS = pytest.mark.parametrize(("number", "seconds"), [(signal.SIGKILL, "600"), (signal.SIGSTOP, "4")])


def turn(world: World, ids: list[int], agent: str = "anna", tokens: int = 6) -> list[int]:
    answer = complete(world.server, ids, tokens, agent=agent)
    return outcome(answer)[0]


def test_a_conversation_goes_on_warm_after_a_restart_and_is_what_one_process_says(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    model = model_folder("llama")
    first = make_ids(300)
    with serving_together(model, tmp_path / "two") as world:
        said = turn(world, first)
        with http_of(world.server) as http:
            assert http.get("/health").json()["ranks"] == 2
            assert "agentcache_ranks 2.0" in http.get("/metrics").text
    assert world.end_of_follower() == 0
    second = [*first, *said, *make_ids(20, seed=2)]
    with serving_together(model, tmp_path / "two") as world:
        answer = complete(world.server, second, 6, agent="anna")
        report = answer["agentcache"]
        assert report["cache_state"] == "warm"
        assert report["restored_bytes"] > 0
    with serving(model, tmp_path / "one") as server:
        assert outcome(complete(server, first, 6))[0] == said
        assert outcome(complete(server, second, 6))[0] == outcome(answer)[0]
    for rank in range(2):
        found = verify_folder(tmp_path / "two" / f"rank-{rank}-of-2")
        assert not found.problems and found.blocks


def wait_for_failure(world: World) -> str:
    """What /health says when it says that the engine has failed."""

    def has_failed() -> bool:
        with http_of(world.server) as http:
            return http.get("/health").status_code == 503

    wait_until(has_failed, "the server notices")
    with http_of(world.server) as http:
        return str(http.get("/health").json()["error"])


def ask_for_long(world: World, answers: list[httpx.Response]) -> threading.Thread:
    """A request that is still being answered when this returns."""
    body = {"prompt": make_ids(40), "agent": "bea", **greedy(5000)}

    def ask() -> None:
        with http_of(world.server) as http:
            answers.append(http.post("/v1/completions", json=body))

    asking, before = threading.Thread(target=ask), stats(world.server)["computed_tokens"]
    asking.start()
    wait_until_computing(world.server, before + 45)
    return asking


@DEATHS
def test_when_rank_1_dies_or_hangs_requests_are_told_and_no_turn_is_lost(
    model_folder: ModelFolder, tmp_path: Path, number: signal.Signals, seconds: str
) -> None:
    model, first, answers = model_folder("llama"), make_ids(300), list[httpx.Response]()
    with serving_together(model, tmp_path / "cache", rank_timeout=seconds) as world:
        said = turn(world, first)
        asking = ask_for_long(world, answers)
        os.kill(world.follower.pid, number)
        asking.join()
        assert answers[0].status_code == 503
        assert answers[0].json()["error"]["code"] == "rank_lost"
        assert "another process" in wait_for_failure(world)
        with pytest.raises(ServerError, match="another process") as refused:
            turn(world, first)
        assert refused.value.status == 503
        assert stop(world.server) == LOST_CODE
        os.kill(world.follower.pid, signal.SIGKILL)
    with serving_together(model, tmp_path / "cache") as world:
        assert agent_info(world.server, "anna")["tokens"] == len(first) + len(said)
        answer = complete(world.server, [*first, *said, 11, 12], 6, agent="anna")
        assert answer["agentcache"]["cache_state"] == "warm"


@DEATHS
def test_when_rank_0_dies_or_hangs_rank_1_ends_by_itself(
    model_folder: ModelFolder, tmp_path: Path, number: signal.Signals, seconds: str
) -> None:
    model, first = model_folder("llama"), make_ids(300)
    with serving_together(model, tmp_path / "cache", rank_timeout=seconds) as world:
        said = turn(world, first)
        os.kill(world.server.pid, number)
        assert world.end_of_follower() in (LOST_CODE, EXIT_CODE)
        os.kill(world.server.pid, signal.SIGKILL)
    with serving_together(model, tmp_path / "cache") as world:
        answer = complete(world.server, [*first, *said, 11, 12], 6, agent="anna")
        assert answer["agentcache"]["cache_state"] == "warm"


def test_a_model_that_cannot_be_spread_is_refused_by_name(model_folder: ModelFolder, tmp_path: Path) -> None:
    refused = pytest.raises(ServerNotStarted, match="gemma3_text cannot be spread over 2 ranks")
    with refused, serving_together(model_folder("gemma3_text"), tmp_path / "cache"):
        pass
