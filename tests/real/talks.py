"""Conversations with tools whose replies a scripted model says in its family's dialect, and the client that holds them.

A turn's prompt is filled up to a multiple of `TURN` tokens, which chooses the reply. How long it is without that, the
server's own reading of prompts says in this process; a test compares what the server reports.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from agentcache.agents.table import Agents
from agentcache.blocks.transcript import Transcript
from agentcache.gateway.conversation import read_conversation
from agentcache.gateway.prepare import match
from agentcache.models.text.tokenizer import Tokenizer
from agentcache.request import ChatPrompt, Request
from agentcache.store.manifest import AgentRecord
from tests.real.call_histories import TOOLS, Message, Reply, behind_thought, written_by

TURN = 384  # tokens from one prompt to the next one
# Who speaks before the reply, and what the reply is.
PLAN = (
    ("user", "worded call"),
    ("tool", "call"),
    ("tool", "call"),
    ("tool", "answer"),
    ("user", "call"),
    ("tool", "call"),
    ("tool", "answer"),
    ("user", "worded call"),
    ("tool", "call"),
    ("tool", "answer"),
)
_SYSTEM: Message = {"role": "system", "content": "You look after files."}


def replies(tokenizer: Tokenizer) -> list[Reply]:
    """The replies of `PLAN` as the chat template shows them."""
    return [_shown(tokenizer, number, kind) for number, (_, kind) in enumerate(PLAN)]


def _shown(tokenizer: Tokenizer, number: int, kind: str) -> Reply:
    calls = () if kind == "answer" else (("write_file", {"path": f"src/x{number}.py", "count": number}),)
    full = Reply("" if kind == "call" else f"So, number {number}.", f"Hm, I look at {number}.", calls)
    written = written_by(tokenizer.render_chat, full)[1]
    if full.calls and full.text and any(end in written for end in tokenizer.turn_ends):
        return _shown(tokenizer, number, "call")  # the template writes words beside a call as a turn of their own
    thought = full.thought if full.thought in written and tokenizer.reply_format.thoughts else ""
    return Reply(full.text, thought, full.calls)


def script(tokenizer: Tokenizer, reply: Reply) -> list[int]:
    """The tokens of a reply as the chat template writes it, with the one that ends it."""
    prompt, written = written_by(tokenizer.render_chat, reply)
    text = behind_thought(tokenizer, prompt, written, bool(reply.thought))[1]
    whole = tokenizer.encode(tokenizer.render_chat([_SYSTEM, {"role": "user", "content": "a"}], TOOLS)).ids
    ends = [token for token in whole if token in tokenizer.eos_ids]
    return [*tokenizer.encode(text).ids, ends[-1] if ends else min(tokenizer.eos_ids)]


@dataclass
class Turn:
    """What the server says of one turn.

    Args:
        length: tokens of the prompt.
        added: tokens of the prompt that the turn before has neither read nor generated.
    """

    length: int
    added: int
    computed: int
    lineage: str


@dataclass
class Talk:
    """One conversation, as a client holds it.

    Args:
        drops: whether the client sends no thoughts back.
        word: fills the prompts; one token.
    """

    tokenizer: Tokenizer
    replies: Sequence[Reply]
    scripts: Sequence[Sequence[int]]
    agent: str
    drops: bool = False
    word: str = " a"
    turns: list[Turn] = field(default_factory=list)
    _messages: list[Message] = field(default_factory=lambda: [_SYSTEM])
    _held: Transcript = field(default_factory=Transcript.empty)

    @property
    def first_length(self) -> int:
        """Tokens of the shortest first prompt."""
        return len(self._prompt([_SYSTEM, self._asking("user", 0)]))

    def turn(self, http: httpx.Client, strides: int) -> None:
        """The next turn, whose prompt has `strides * TURN` tokens."""
        number = len(self.turns)
        self._messages.append(self._filled(PLAN[number][0], strides * TURN))
        prompt = self._prompt(self._messages)
        message, report = self._ask(http, streams=number % 2 == 1)
        assert report["prompt_tokens"] == len(prompt), number
        assert self._says(message) == self.replies[number], (number, message)
        added = report["prompt_tokens"] - len(self._held)
        self.turns.append(Turn(report["prompt_tokens"], added, report["computed_tokens"], report["lineage"]))
        self._hear(prompt, self.scripts[number])
        if self.drops:
            message.pop("reasoning_content", None)
        self._messages.append(message)

    def _asking(self, role: str, number: int, num_words: int = 1) -> Message:
        content = f"This is number {number}:{num_words * self.word}"
        if role == "user":
            return {"role": role, "content": content}
        return {"role": role, "content": content, "tool_call_id": self._messages[-1]["tool_calls"][0]["id"]}

    def _filled(self, role: str, length: int) -> Message:
        number = len(self.turns)
        missing = length - len(self._prompt([*self._messages, self._asking(role, number)]))
        asking = self._asking(role, number, 1 + missing)
        assert missing > 100 and len(self._prompt([*self._messages, asking])) == length, (number, missing)
        return asking

    def _prompt(self, messages: list[Message]) -> Transcript:
        """The prompt as the server reads it."""
        record = AgentRecord(self.agent, "m", "", 0.0, 0.0, None, "exact", None, None, self._held, 0, ())
        agents = Agents({self.agent: (record,)} if self._held else {})
        plain = read_conversation(
            Request("x", ChatPrompt(messages, TOOLS), agent=self.agent), None, agents, self.tokenizer
        )
        return match(plain, self._held, self.tokenizer).transcript

    def _hear(self, prompt: Transcript, said: Sequence[int]) -> None:
        """Take the reply into the transcript, as the server does."""
        detokenizer = self.tokenizer.detokenizer(after=prompt.ids[-1])
        kept = said[:-1]  # what ends a reply is told by the chat template
        for token in kept:
            detokenizer.add(token)
        detokenizer.finish()
        marked = self.tokenizer.marked_ends(detokenizer.text, detokenizer.ends)
        marked = self.tokenizer.with_markers(marked, kept)
        self._held = prompt.extended(marked.text, kept, marked.ends, "generated")

    def _ask(self, http: httpx.Client, *, streams: bool) -> tuple[Message, dict[str, Any]]:
        """The assistant's message, and the server's report."""
        body = {"messages": self._messages, "tools": TOOLS, "agent": self.agent, "temperature": 0, "stream": streams}
        response = http.post("/v1/chat/completions", json=body | {"agentcache": {"report": True}})
        assert response.status_code == 200, response.text
        if not streams:
            answer = response.json()
            return answer["choices"][0]["message"], answer["agentcache"]
        chunks = [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: {")]
        return _message([choice["delta"] for chunk in chunks for choice in chunk["choices"]]), chunks[-1]["agentcache"]

    def _says(self, message: Message) -> Reply:
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        told = tuple((call["name"], json.loads(call["arguments"])) for call in calls)
        return Reply((message.get("content") or "").strip(), message.get("reasoning_content", "").strip(), told)


def _message(deltas: Sequence[Message]) -> Message:
    """A message as clients make it of a stream."""
    calls: dict[int, Message] = {}
    for call in [call for delta in deltas for call in delta.get("tool_calls") or ()]:
        known = calls.setdefault(call["index"], {"function": {"name": "", "arguments": ""}})
        known |= {key: call[key] for key in ("id", "type") if key in call}
        for key, text in call["function"].items():
            known["function"][key] += text
    message: Message = {"role": "assistant", "content": "".join(each.get("content") or "" for each in deltas)}
    if thought := "".join(each.get("reasoning_content") or "" for each in deltas):
        message["reasoning_content"] = thought
    return message | ({"tool_calls": [calls[index] for index in sorted(calls)]} if calls else {})
