"""A reply that a client sends back is told in the words that the model generated, whatever the dialect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from agentcache.agents.table import Agents
from agentcache.api.report import FinishReason, Update
from agentcache.api.request import ChatPrompt, Request
from agentcache.blocks.transcript import Transcript
from agentcache.gateway.prepare import read_conversation
from agentcache.store.manifest import AgentRecord
from agentcache.text.tokenizer import Tokenizer
from tests.real.call_histories import characters, joined
from tests.real.clients import ChatClient, Client, MessagesClient, ResponsesClient
from tests.reply_formats import FAMILIES, TOOLS
from tests.server.driver import post
from tests.server.fake_engine import MODEL, REPORT, FakeEngine

QUESTION = {"role": "user", "content": "Where?"}
_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
_LOOK = '<tool_call>\n{"name": "look", "arguments": {"at": "x", "n": %s}}\n</tool_call>'
REPLIES = {
    "words behind a call": f"First.\n{_NOW}\nSecond.\n\nThird.",
    "words between calls": f"First.\n{_NOW}\nSecond.\n{_NOW}",
    "a thought behind a call": f"<think>\nOne,\ntwo.\n</think>\n\n{_NOW}\n<think>\nThree.\n</think>\n\nFour.",
    "a whole number with a fraction": _LOOK % "2.0",
    "a number with an exponent": _LOOK % "[1e3, -0.0, 1.5e-7]",
    "a number that is no double": _LOOK % '{"id": 12345678901234567890}',
    "a half of a pair": _LOOK % '"\\ud83d"',
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    tokenizer = Tokenizer.load(FAMILIES["qwen3"].write(tmp_path_factory.mktemp("qwen3")))
    yield tokenizer
    tokenizer.close()


@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES)
@pytest.mark.parametrize(
    "client",
    [
        lambda: ChatClient(drops=True),
        lambda: MessagesClient(thinks=True),
        lambda: MessagesClient(),
        lambda: ResponsesClient(),
        lambda: ResponsesClient(stores=True),
    ],
    ids=["chat", "messages", "messages without thoughts", "responses", "stored responses"],
)
def test_a_reply_that_is_sent_back_is_the_generated_one(tokenizer: Tokenizer, client: Any, reply: str) -> None:
    engine = _engine(tokenizer, reply)
    prompt = _converse(engine, client())
    told = read_conversation(Request("x", prompt, agent="a"), None, _having_said(tokenizer, reply), tokenizer)
    assert _prompt(tokenizer) + reply in str(told.content)


def _prompt(tokenizer: Tokenizer) -> str:
    return tokenizer.chats.text([QUESTION], TOOLS)


def _engine(tokenizer: Tokenizer, reply: str) -> FakeEngine:
    def says(request: object) -> list[Update | float | Exception]:
        first = Update(prompt_token_ids=(1,), prompt_end=_prompt(tokenizer)[-256:])
        text, markers = joined(characters(tokenizer, reply))
        said = Update(text, (2,), markers=tuple(markers))
        return [first, said, Update(finish_reason=FinishReason.STOP, report=REPORT)]

    return FakeEngine(says, model=replace(MODEL, reply_format=tokenizer.reply_format))


def _having_said(tokenizer: Tokenizer, reply: str) -> Agents:
    prompt = _prompt(tokenizer)
    asked, said = tokenizer.encode(prompt), tokenizer.encode(reply)
    told = Transcript.empty().extended(prompt, asked.ids, asked.ends, "prompt")
    told = told.extended(reply, said.ids, said.ends, "generated")
    return Agents({"a": (AgentRecord("a", "m", "", 0.0, 0.0, None, "exact", None, None, told, 0, ()),)})


class _Http(httpx.Client):
    """Asks a fake engine."""

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__()
        self._engine = engine

    def post(self, path: Any, *, json: Any = None, **options: Any) -> httpx.Response:
        return post(self._engine, str(path), json)


def _converse(engine: FakeEngine, client: Client) -> ChatPrompt:
    """The prompt of the second turn."""
    with _Http(engine) as http:
        client.hear(QUESTION)
        message, _ = client.ask(http, TOOLS, streams=True, agent="a")
        for call in message.get("tool_calls", ()):
            client.hear({"role": "tool", "tool_call_id": call["id"], "content": "done"})
        client.ask(http, TOOLS, streams=False, agent="a")
    prompt = engine.requests[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt
