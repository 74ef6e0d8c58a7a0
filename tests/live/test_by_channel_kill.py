"""A killed server with `--kv 4` goes on as one that never stopped, to the last bit."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from agentcache.store.verify import verify_folder
from tests.live.servers import agent_info, make_text, serving
from tests.live.test_kill import Talk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_conversation_goes_on_after_each_kill(live_model: Path, tmp_path: Path, agent: str) -> None:
    """Each turn adds some blocks, which the next one reads in their full form."""
    talk = Talk(agent)
    with serving(live_model, tmp_path / "hot", kv="4") as never_stopped:
        for turn in range(3):
            with ExitStack() as stack:
                server = stack.enter_context(serving(live_model, tmp_path / "killed", kv="4"))
                if turn:
                    assert agent_info(server, agent)["cache_state"] == "warm"
                [killed, hot] = talk.turn(make_text(200, seed=turn), server, never_stopped)
                assert killed["agentcache"]["computed_tokens"] == hot["agentcache"]["computed_tokens"]
                assert killed["agentcache"]["lost_tokens"] == 0
                server.kill()
    assert verify_folder(tmp_path / "killed").problems == ()
