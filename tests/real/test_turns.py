"""Ten turns with tools in a family's own dialect compute what they add, hot and after SIGKILL, over HTTP."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from agentcache.text.tokenizer import Tokenizer
from tests.live.servers import http_of, serving, stop
from tests.real.call_histories import Reply
from tests.real.clients import ChatClient, Client, MessagesClient, ResponsesClient
from tests.real.folders import FAMILIES, family_folder, rescript, template_folder
from tests.real.talks import PLAN, TURN, Talk, fillers, replies, script

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FEW = 8  # tokens; a reply that counts as another one costs more
NUM_HOT = 5  # turns before the server is killed
# The chat template leaves out what was thought before the last user message: from the first thought that it leaves out
# on, the prompt is another one, and is computed again once for each user message.
LEAVES_OUT_OLD_THOUGHTS = {"qwen3", "gptoss"}
# The chat template puts the tools in front of the last user message: what follows them is another prompt's once the
# user has spoken again.
MOVES_TOOLS = {"Mistral-Small-3.2-24B-Instruct-2506.jinja", "mistralai-Mistral-Nemo-Instruct-2407.jinja"}
# Agents whose clients send back no thoughts.
WITHOUT_THOUGHTS = {"chat-drops", "messages-drops"}
TEMPLATES = (
    "Mistral-Small-3.2-24B-Instruct-2506.jinja",
    "mistralai-Mistral-Nemo-Instruct-2407.jinja",
    "Qwen3-Coder.jinja",
    "deepseek-ai-DeepSeek-V4.jinja",
    "Kimi-K2-Instruct.jinja",
)


@pytest.mark.parametrize("name", [*FAMILIES, *TEMPLATES])
def test_ten_turns_compute_what_they_add(name: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    is_family = name in FAMILIES
    folder = family_folder(model, name, ["x"], small=True) if is_family else template_folder(model, name)
    tokenizer = Tokenizer.load(folder)
    said = replies(tokenizer)
    scripts = [script(tokenizer, reply) for reply in said]
    talks = [
        Talk(tokenizer, said, scripts, agent, client, word, thinks=agent not in WITHOUT_THOUGHTS)
        for word, (agent, client) in zip(fillers(tokenizer), clients(said), strict=False)
    ]
    first = 1 + (talks[0].first_length + 100) // TURN
    rescript(folder, [scripts[(number - first) % len(scripts)] for number in range(len(scripts))], TURN)
    for turns in (range(NUM_HOT), range(NUM_HOT, len(PLAN))):
        with serving(folder, tmp_path / "cache") as server, http_of(server) as http:
            for talk in talks:
                for number in turns:
                    talk.turn(http, first + number)
            stop(server, signal.SIGKILL)
    tokenizer.close()
    assert [found for talk in talks for found in too_much(name, talk)] == []


def clients(said: Sequence[Reply]) -> Iterator[tuple[str, Client]]:
    """Each with an agent's name."""
    yield "chat", ChatClient()
    yield "messages", MessagesClient(thinks=True)
    yield "responses", ResponsesClient()
    yield "stored", ResponsesClient(stores=True)
    if any(reply.thought for reply in said):
        yield "chat-drops", ChatClient(drops=True)
        yield "messages-drops", MessagesClient()


def too_much(name: str, talk: Talk) -> list[str]:
    """Turns that compute more than they may."""
    found = []
    asked = 0  # the turn with the last user message
    for number, turn in list(enumerate(talk.turns))[1:]:
        added, is_asked = turn.added, PLAN[number][0] == "user"
        if name in LEAVES_OUT_OLD_THOUGHTS and is_asked:
            added = turn.length - talk.turns[asked].length
        if name in MOVES_TOOLS and is_asked:
            added = turn.length
        if is_asked:
            asked = number
        if turn.computed > min(1.2 * added, added + FEW):
            found.append(f"{talk.agent} {number}: {turn}")
    return found
