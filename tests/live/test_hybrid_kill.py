"""A model with recurrent layers behind a real server that is killed and stopped: a turn costs what is new."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.live.servers import agent_info, all_ids, complete, make_ids, serving, stats, stop
from tests.serving.hybrids import EVERY, write_hybrid

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]  # serving/test_hybrids.py tries the same without servers

SETTINGS = ("--snapshot-tokens", str(EVERY))


def test_a_hybrids_conversation_goes_on_after_kill_and_stop(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    model, ids, answers = write_hybrid(tmp_path / "model", "qwen3_5"), make_ids(700), []
    with serving(model, tmp_path / "unharmed", *SETTINGS) as unharmed:
        for turn, end in enumerate(("kill", "stop", "kill", "none")):
            with serving(model, tmp_path / "cache", *SETTINGS) as server:
                one, other = (complete(each, ids, 6, agent="alice") for each in (server, unharmed))
                assert all_ids(one) == all_ids(other)
                answers.append((one["agentcache"], other["agentcache"]))
                assert stats(server)["ram_used_bytes"]["state"] > 0
                assert stats(server)["quarantined"] == 0
                assert agent_info(server, "alice")["tokens"] == len(all_ids(one))
                if end == "kill":
                    server.kill()
                elif end == "stop":
                    assert stop(server, signal.SIGTERM) == 0
            ids = [*all_ids(one), *make_ids(40, seed=turn)]
    computed = [one["computed_tokens"] for one, _ in answers]
    assert [other["computed_tokens"] for _, other in answers[1:]] == [41, 41, 41], "hot"
    assert computed[1] <= 40 + EVERY, "after a kill"
    assert computed[2] == 41, "after a stop"
    assert computed[3] <= 40 + EVERY
    assert all(one["saved"] for one, _ in answers)
