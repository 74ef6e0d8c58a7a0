"""A model with recurrent layers behind a real server that is killed and stopped: a turn costs what is new."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from agentcache.blocks.prefix_match import len_common_prefix
from tests.live.servers import agent_info, all_ids, chat, complete, make_ids, make_text, serving, stats, stop
from tests.serving.hybrids import EVERY, with_template, write_hybrid
from tests.text.templates import QWEN_3_5

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]  # serving/test_hybrids.py tries the same without servers

SETTINGS = ("--snapshot-tokens", str(EVERY))


def test_a_hybrids_conversation_goes_on_after_kill_and_stop(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    model, ids, answers = write_hybrid(tmp_path / "model", "qwen3_5"), make_ids(700), []
    with serving(model, tmp_path / "unharmed", *SETTINGS) as unharmed:
        for turn, end in enumerate(("kill", "stop", "none")):
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
    assert [other["computed_tokens"] for _, other in answers[1:]] == [41, 41], "hot"
    assert computed[1] <= 40 + EVERY, "after a kill"
    assert computed[2] == 41, "after a stop"
    assert all(one["saved"] for one, _ in answers)


LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
SILENT = {"chat_template_kwargs": {"enable_thinking": False}, "tools": [LOOK]}


@pytest.mark.parametrize("fields", [{}, SILENT], ids=["thinking", "silent"])
def test_a_chat_starts_in_front_of_what_its_history_does_not_repeat(fields: dict[str, Any], tmp_path: Path) -> None:
    """Hot, through a call of a tool where there is one, and after a kill."""
    (tmp_path / "plain").mkdir()
    model = with_template(write_hybrid(tmp_path / "plain", "qwen3_5"), tmp_path / "model", QWEN_3_5)
    messages: list[dict[str, Any]] = [{"role": "system", "content": make_text(300)}]
    last: list[int] = []

    def turn(said: dict[str, Any], **more: Any) -> tuple[int, int]:
        """Tokens that were computed, and that neither the prompt before it nor that one's answer has."""
        messages.append(said)
        answer = chat(server, messages, 40, agent="alice", **{**fields, **more})
        messages.append(answer["choices"][0]["message"])
        prompt = answer["choices"][0]["prompt_token_ids"]
        new = len(prompt) - len_common_prefix(last, prompt)
        last[:] = [*prompt, *answer["choices"][0]["token_ids"][:-1]]  # the last one is not computed
        return answer["agentcache"]["computed_tokens"], new

    user = {"role": "user", "content": "and now?"}
    with serving(model, tmp_path / "cache", *SETTINGS) as server:
        turn(user, **({"tool_choice": "required"} if fields else {}))
        if fields:
            call = messages[-1]["tool_calls"][0]["id"]
            computed, new = turn({"role": "tool", "tool_call_id": call, "content": "It rains."})
            assert computed == new < 100, "the call itself is in the cache"
        for _ in range(2):
            computed, new = turn(user)
            assert computed == new < 200
        server.kill()
    with serving(model, tmp_path / "cache", *SETTINGS) as server:
        computed, new = turn(user)
        assert computed <= new + EVERY < len(last)
        computed, new = turn(user)
        assert computed == new
        assert stats(server)["quarantined"] == 0
