"""Conversations with tools whose replies a scripted model says in its family's dialect.

A turn's prompt is filled up to a multiple of `TURN` tokens, which chooses the reply. How long it is without that, the
server's own reading of prompts says in this process; a test compares what the server reports.
"""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import httpx

from agentcache.agents.table import Agents
from agentcache.api.request import ChatPrompt, Request
from agentcache.blocks.transcript import Transcript
from agentcache.gateway.prepare import match, read_conversation
from agentcache.store.manifest import AgentRecord
from agentcache.text.tokenizer import Tokenizer
from tests.real.call_histories import TOOLS, Message, Reply, behind_thought, written_by
from tests.real.clients import Client

TURN = 576  # tokens from one prompt to the next one
# Who speaks before the reply, and what the reply is.
PLAN = (
    ("user", "worded call"),
    ("tool", "call"),
    ("tool", "call"),
    ("tool", "answer"),
    ("user", "call"),
    ("tool", "two calls"),
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
    share = float(number) if number % 2 else number + 0.5
    call = ("write_file", {"share": share, "path": f"src/x{number}.py", "count": number})
    calls = {"answer": (), "two calls": (call, ("now", {"zone": "UTC"}))}.get(kind, (call,))
    full = Reply(
        f"So, number {number}." if kind in ("answer", "worded call") else "", f"Hm, I look at {number}.", calls
    )
    written = written_by(tokenizer.chats.text, full)[1]
    if kind in ("worded call", "two calls") and any(end in written for end in tokenizer.turn_ends):
        return _shown(tokenizer, number, "call")  # the template writes them as turns of their own
    thought = full.thought if full.thought in written and tokenizer.reply_format.thoughts else ""
    return Reply(full.text, thought, full.calls)


def script(tokenizer: Tokenizer, reply: Reply) -> list[int]:
    """The tokens of a reply as the chat template writes it, with the one that ends it."""
    prompt, written = written_by(tokenizer.chats.text, reply)
    text = behind_thought(tokenizer, prompt, written, bool(reply.thought))[1]
    whole = tokenizer.encode(tokenizer.chats.text([_SYSTEM, {"role": "user", "content": "a"}], TOOLS)).ids
    ends = [token for token in whole if token in tokenizer.eos_ids]
    return [*tokenizer.encode(text).ids, ends[-1] if ends else min(tokenizer.eos_ids)]


def fillers(tokenizer: Tokenizer) -> Iterator[str]:
    """Words of one token each."""
    for letter in string.ascii_letters:
        if len(tokenizer.encode(f"x {letter} {letter}").ids) == len(tokenizer.encode(f"x {letter}").ids) + 1:
            yield f" {letter}"


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
        client: speaks one dialect.
        word: fills the prompts; one of `fillers`. Conversations with the same one would share their cache.
        thinks: whether the client holds thoughts, if there are any.
    """

    tokenizer: Tokenizer
    replies: Sequence[Reply]
    scripts: Sequence[Sequence[int]]
    agent: str
    client: Client
    word: str
    thinks: bool = True
    turns: list[Turn] = field(default_factory=list)
    _messages: list[Message] = field(default_factory=list)
    _held: Transcript = field(default_factory=Transcript.empty)

    def __post_init__(self) -> None:
        self._say(_SYSTEM)

    def _say(self, message: Message) -> None:
        self._messages.append(message)
        self.client.hear(message)

    @property
    def first_length(self) -> int:
        """Tokens of the shortest first prompt."""
        return len(self._prompt([_SYSTEM, self._asking("user", 0)]))

    def turn(self, http: httpx.Client, strides: int) -> None:
        """The next turn, whose prompt has `strides * TURN` tokens."""
        number = len(self.turns)
        calls = self._messages[-1].get("tool_calls") or ()
        for call in calls[:-1]:
            self._say({"role": "tool", "content": "Done.", "tool_call_id": call["id"]})
        self._say(self._filled(PLAN[number][0], strides * TURN))
        prompt = self._prompt(self._messages)
        message, report = self.client.ask(http, TOOLS, streams=number % 2 == 1, agent=self.agent)
        assert report["prompt_tokens"] == len(prompt), (self.agent, number)
        assert _said(message) == self._expected(number), (self.agent, number, message)
        added = report["prompt_tokens"] - len(self._held)
        self.turns.append(Turn(report["prompt_tokens"], added, report["computed_tokens"], report["lineage"]))
        self._hear(prompt, self.scripts[number])
        self._messages.append(message)

    def _expected(self, number: int) -> Reply:
        reply = self.replies[number]
        return reply if self.thinks else Reply(reply.text, "", reply.calls)

    def _asking(self, role: str, number: int, num_words: int = 1) -> Message:
        content = f"This is number {number}:{num_words * self.word}"
        if role == "user":
            return {"role": role, "content": content}
        said = next(message for message in reversed(self._messages) if message["role"] == "assistant")
        return {"role": role, "content": content, "tool_call_id": said["tool_calls"][-1]["id"]}

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
        # What ends a reply is told by the chat template.
        kept = list(itertools.takewhile(lambda token: token not in self.tokenizer.eos_ids, said))
        for token in kept:
            detokenizer.add(token)
        detokenizer.finish()
        marked = self.tokenizer.marks.marked_ends(detokenizer.text, detokenizer.ends)
        marked = self.tokenizer.with_markers(marked, kept)
        self._held = prompt.extended(marked.text, kept, marked.ends, "generated")


def _said(message: Message) -> Reply:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    told = tuple((call["name"], json.loads(call["arguments"])) for call in calls)
    return Reply((message.get("content") or "").strip(), message.get("reasoning_content", "").strip(), told)
