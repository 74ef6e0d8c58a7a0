"""Each turn of a conversation with tools computes what it adds, in every published template's dialect.

Without a server: the leading tokens of a prompt that its agent's transcript holds are not computed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

import pytest

from agentcache.agents.table import Agents
from agentcache.api.model import HARMONY_ENDS
from agentcache.api.request import ChatPrompt, Request
from agentcache.blocks.transcript import Transcript
from agentcache.gateway.prepare import match, read_conversation
from agentcache.store.manifest import AgentRecord
from agentcache.text.thinking import ThinkingWish, can_switch, told
from agentcache.text.tokenizer import Tokenizer
from tests.real.call_histories import TOOLS, Message, Reply, behind_thought, characters, joined, read, written_by
from tests.real.folders import template_names, template_tokenizer

pytestmark = pytest.mark.slow

# Who speaks before the reply, whether the reply has text, and its calls.
PLAN = (
    ("user", True, 1),
    ("tool", False, 2),
    ("tool", True, 0),
    ("user", False, 1),
    ("tool", True, 0),
    ("user", True, 0),
)
_SYSTEM: Message = {"role": "system", "content": "You look after files."}
_WORDS = 60 * " a"
_PARTS = 4  # of the templates, for several processes


@dataclass
class Turn:
    """Lengths in tokens; `held` is the transcript's, of which the prompt repeats `shared`."""

    role: str
    length: int
    held: int
    shared: int
    end: int  # what the template writes behind the last message

    @property
    def computed(self) -> int:
        return self.length - min(self.shared, self.length - 1)


# What a template's authors let a turn compute beside what it adds: tokens of the prompt that may be held.
Held = Callable[[list[Turn], int], int]


def _all(turns: list[Turn], number: int) -> int:
    return turns[number].held


def _until_the_user_spoke(turns: list[Turn], number: int) -> int:
    """Old thoughts are left out once the user speaks again: all since the last time is another prompt."""
    asked = [at for at in range(number) if turns[at].role == "user"]
    return turns[asked[-1]].length if turns[number].role == "user" else turns[number].held


def _without_reply(turns: list[Turn], number: int) -> int:
    """Each thought is left out at once: the reply is another one."""
    return turns[number - 1].length


def _without_end(turns: list[Turn], number: int) -> int:
    """Instructions stand behind the last message, and the reply behind them."""
    return turns[number - 1].length - turns[number - 1].end


def _nothing_if_the_user_speaks(turns: list[Turn], number: int) -> int:
    """The tools stand in front of the last user message."""
    return 0 if turns[number].role == "user" else turns[number].held


WITH_THOUGHTS: dict[str, Held] = {
    **dict.fromkeys(
        (
            "GLM-4.6.jinja",
            "GLM-4.7-Flash.jinja",
            "Kimi-K2-Thinking.jinja",
            "LFM2.5-8B-A1B.jinja",
            "MiniMax-M2.jinja",
            "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.jinja",
            "Qwen-Qwen3-0.6B.jinja",
            "Qwen3.5-4B.jinja",
            "Reka-Edge.jinja",
            "StepFun3.5-Flash.jinja",
            "deepseek-ai-DeepSeek-V3.2.jinja",
            "google-gemma-4-31B-it-interleaved.jinja",
            "google-gemma-4-31B-it.jinja",
            "openai-gpt-oss-120b.jinja",
            "openbmb-MiniCPM5-1B.jinja",
        ),
        _until_the_user_spoke,
    ),
    **dict.fromkeys(
        (
            "Apriel-1.6-15b-Thinker-fixed.jinja",
            "Qwen-QwQ-32B.jinja",
            "deepseek-ai-DeepSeek-R1-Distill-Llama-8B.jinja",
            "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja",
            "llama-cpp-deepseek-r1.jinja",
            "llama-cpp-rwkv-world.jinja",
        ),
        _without_reply,
    ),
}
ALWAYS: dict[str, Held] = {
    "CohereForAI-c4ai-command-r-plus-tool_use.jinja": _without_end,
    "Mistral-Small-3.2-24B-Instruct-2506.jinja": _nothing_if_the_user_speaks,
    "mistralai-Mistral-Nemo-Instruct-2407.jinja": _nothing_if_the_user_speaks,
}


@dataclass
class Talk:
    """A conversation whose client sends no thoughts back.

    Args:
        thinks: whether every second reply has a thought; if not, thinking is off.
        makes_ids: whether the client has ids of calls of its own.
    """

    tokenizer: Tokenizer
    thinks: bool
    makes_ids: bool
    turns: list[Turn] = field(default_factory=list)
    _messages: list[Message] = field(default_factory=lambda: [_SYSTEM])
    _held: Transcript = field(default_factory=Transcript.empty)

    def run(self) -> list[Turn]:
        for role, has_text, num_calls in PLAN:
            self._ask(role)
            prompt = self._prompt()
            end = len(self.tokenizer.encode(prompt.text.rpartition(_WORDS)[2]).ids)
            same = takewhile(lambda pair: pair[0] == pair[1], zip(prompt.ids, self._held.ids, strict=False))
            self.turns.append(Turn(role, len(prompt), len(self._held), sum(1 for _ in same), end))
            self._hear(prompt, *self._reply(prompt, has_text, num_calls))
        return self.turns

    def _ask(self, role: str) -> None:
        content = f"This is number {len(self.turns)}:{_WORDS}"
        calls = self._messages[-1].get("tool_calls") or () if role == "tool" else ()
        self._messages += [{"role": "tool", "tool_call_id": call["id"], "content": content} for call in calls]
        if role == "user":
            self._messages.append({"role": "user", "content": content})

    def _prompt(self) -> Transcript:
        record = AgentRecord("x", "m", "", 0.0, 0.0, None, "exact", None, None, self._held, 0, ())
        agents = Agents({"x": (record,)} if self._held else {})
        wish = {} if self.thinks else told(ThinkingWish(enabled=False), self.tokenizer.thinking)
        chat = ChatPrompt(self._messages, TOOLS, template_kwargs=wish)
        return match(
            read_conversation(Request("x", chat, agent="x"), None, agents, self.tokenizer), self._held, self.tokenizer
        ).transcript

    def _reply(self, prompt: Transcript, has_text: bool, num_calls: int) -> tuple[str, Reply]:
        """What the model writes, and what is read; as much of the plan as the dialect has words for."""
        number = len(self.turns)
        calls = [("write_file", {"path": f"src/x{number}.py", "count": at}) for at in range(num_calls)]
        thought = f"Hm, I look at {number}." if self.thinks and number % 2 == 1 else ""
        for text, num in ((has_text, num_calls), (False, num_calls), (False, 1)):
            planned = Reply(f"So, number {number}." if text else "", thought, tuple(calls[:num]))
            written = _written(self.tokenizer, planned, prompt.text[-300:])
            found = read(self.tokenizer, prompt.text, [joined(characters(self.tokenizer, written))])
            is_one = sum(written.count(end) for end in HARMONY_ENDS) < 2  # each call ends a reply
            if is_one and (found.text, found.calls) == (planned.text, planned.calls):
                return written, found
        raise AssertionError(f"turn {number}: {found} in {written!r}")

    def _hear(self, prompt: Transcript, written: str, reply: Reply) -> None:
        kept = self.tokenizer.encode(written).ids
        detokenizer = self.tokenizer.detokenizer(after=prompt.ids[-1])
        for token in kept:
            detokenizer.add(token)
        detokenizer.finish()
        marked = self.tokenizer.with_markers(self.tokenizer.marks.marked_ends(detokenizer.text, detokenizer.ends), kept)
        self._held = prompt.extended(marked.text, kept, marked.ends, "generated")
        message: Message = {"role": "assistant", "content": reply.text}
        if reply.calls:
            form = "call_{}_{:016d}" if self.makes_ids else "abcd{}{:04d}"
            message["tool_calls"] = [
                {
                    "id": form.format(at, len(self._messages)),
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments)},
                }
                for at, (name, arguments) in enumerate(reply.calls)
            ]
        self._messages.append(message)


def _written(tokenizer: Tokenizer, reply: Reply, prompt_end: str) -> str:
    prompt, written = written_by(tokenizer.chats.text, reply)
    if reply.calls and reply.text and any(end in written for end in tokenizer.turn_ends):
        # The template parts them; a model may write both at once.
        text, calls = Reply(reply.text, reply.thought), Reply("", "", reply.calls)
        return f"{_written(tokenizer, text, prompt_end)}\n{_written(tokenizer, calls, '')}"
    written = behind_thought(tokenizer, prompt, written, bool(reply.thought) and reply.thought in written)[1]
    for start, end in tokenizer.reply_format.thoughts:
        if prompt_end.rstrip().endswith(start):
            written = written.lstrip().removeprefix(start)
            return written if end in written else f"{reply.thought}{end}\n\n{written}"
        if prompt_end.rstrip().endswith(end):
            return written.rpartition(end)[2].lstrip()
    return written


@pytest.mark.parametrize("part", range(_PARTS))
def test_each_turn_computes_what_it_adds(part: int, tmp_path: Path) -> None:
    failed = {}
    for name in template_names()[part::_PARTS]:
        tokenizer = Tokenizer.load(template_tokenizer(tmp_path / name, name))
        for thinks in (True, False) if _prompts_tell_of_thoughts(tokenizer) else (True,):
            turns = Talk(tokenizer, thinks, makes_ids=thinks).run()
            held = ALWAYS.get(name) or (WITH_THOUGHTS.get(name) if thinks else None)
            print(f"{name:50} {thinks:d} {' '.join(f'{turn.computed}/{turn.length - turn.held}' for turn in turns)}")
            if held is not None and not _too_much(turns, _all):
                failed[name, thinks] = "needs no exception"
            elif found := _too_much(turns, held or _all):
                failed[name, thinks] = str(found)
        tokenizer.close()
    assert failed == {}


def _prompts_tell_of_thoughts(tokenizer: Tokenizer) -> bool:
    prompt_end = tokenizer.chats.text([{"role": "user", "content": _WORDS}], TOOLS).rpartition(_WORDS)[2]
    opens = any(marker in prompt_end for marker in sum(tokenizer.reply_format.thoughts, ()))
    return opens or can_switch(tokenizer.thinking)


def _too_much(turns: list[Turn], held: Held) -> list[tuple[int, Turn]]:
    return [
        (number, turn)
        for number, turn in enumerate(turns)
        if number and turn.computed > 1.2 * (turn.length - held(turns, number))
    ]
