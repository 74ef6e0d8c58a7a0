"""Golden replies of every format, through a real tokenizer, split at tokens and at bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentcache.api.model import MarkerToken, ReplyFormat
from agentcache.engine.output import Output
from agentcache.text.replies.calls import Tools
from agentcache.text.replies.dialects import DIALECTS, THOUGHTS
from agentcache.text.replies.events import (
    Block,
    Call,
    Event,
    Reasoning,
    ReasoningDelta,
    Text,
    TextDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    blocks_of,
)
from agentcache.text.replies.reader import DOUBTED, DOUBTED_UNTHOUGHT, open_reader
from agentcache.text.tokenizer import Tokenizer
from tests.examples import examples
from tests.growth import MOST, growth
from tests.reply_formats import FAMILIES, TOOLS

GOLDEN = [
    pytest.param(name, reply, blocks, id=f"{name} {number}")
    for name, family in FAMILIES.items()
    for number, (reply, blocks) in enumerate(family.replies)
]
QUESTION = [{"role": "user", "content": "Hi"}]


@cache
def tokenizer_of(name: str, folder: Path) -> Tokenizer:
    return Tokenizer.load(FAMILIES[name].write(folder / name.replace(" ", "-")))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replies")


def in_bytes(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[int]:
    """The same text in tokens of one byte each; markers stay."""
    one = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1}
    split: list[int] = []
    for token in token_ids:
        whole = token in tokenizer.markers or token in tokenizer.control_ids
        split += [token] if whole else [one[bytes([byte])] for byte in tokenizer.token_bytes(token)]
    return split


def events_of(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[Event]:
    """The events of a reply; each character of its text is in one zone."""
    prompt = tokenizer.chats.text(QUESTION, TOOLS)
    output = Output(tokenizer.detokenizer(tokenizer.encode(prompt).ids[-1]), markers=tokenizer.markers)
    reader = open_reader(tokenizer.reply_format, Tools(TOOLS), thoughts=True)
    reader.begin(prompt[-256:])
    events, length, in_zones = list[Event](), 0, 0
    for shown in [*map(output.add, token_ids), output.finish()]:
        events += reader.add(shown.text, shown.markers)
        length += len(shown.text)
        in_zones += sum(size for size, _ in reader.take_zones())
        assert in_zones <= length
    events += reader.finish(cut_off=False)
    assert in_zones + sum(size for size, _ in reader.take_zones()) == length
    return events


@pytest.mark.parametrize("cut", ["tokens", "bytes"])
@pytest.mark.parametrize(("name", "reply", "blocks"), GOLDEN)
def test_what_a_reply_says(name: str, reply: str, blocks: tuple[Block, ...], cut: str, folder: Path) -> None:
    tokenizer = tokenizer_of(name, folder)
    ids = list(tokenizer.encode(reply).ids)
    events = events_of(tokenizer, ids if cut == "tokens" else in_bytes(tokenizer, ids))
    assert blocks_of(events) == list(blocks)
    check(events, name)


def check(events: Sequence[Event], name: str) -> None:
    """Calls are whole, one at a time, and readable; no marker is in what is shown."""
    open_call: int | None = None
    num_calls = 0
    for event in events:
        match event:
            case ToolCallStart(index):
                assert open_call is None and index == num_calls
                open_call, num_calls = index, num_calls + 1
            case ToolCallArguments(index):
                assert index == open_call
            case ToolCallEnd(index):
                assert index == open_call
                open_call = None
            case TextDelta(text) | ReasoningDelta(text):
                assert open_call is None and text
                assert not any(marker in text for marker in (*FAMILIES[name].special, *FAMILIES[name].plain))
    assert open_call is None
    assert all(isinstance(json.loads(each.arguments), dict) for each in blocks_of(events) if isinstance(each, Call))


# Where the name comes last, everything waits for it.
STREAMED = [
    pytest.param(name, reply, id=f"{name} {number}")
    for name, family in FAMILIES.items()
    for number, (reply, blocks) in enumerate(family.replies)
    if '{"arguments"' not in reply
    if any(isinstance(each, Call) and len(each.arguments) > 25 for each in blocks)
]


@pytest.mark.parametrize(("name", "reply"), STREAMED)
def test_arguments_come_while_they_are_generated(name: str, reply: str, folder: Path) -> None:
    tokenizer = tokenizer_of(name, folder)
    events = events_of(tokenizer, in_bytes(tokenizer, tokenizer.encode(reply).ids))
    assert len([event for event in events if isinstance(event, ToolCallArguments) and event.index == 0]) > 10


@pytest.mark.parametrize("name", list(FAMILIES))
@settings(max_examples=examples(60))
@given(data=st.data())
def test_anything_that_is_cut_off_or_garbled_is_readable(name: str, data: st.DataObject, folder: Path) -> None:
    tokenizer = tokenizer_of(name, folder)
    replies = [list(tokenizer.encode(reply).ids) for reply, _ in FAMILIES[name].replies]
    pieces = [reply[begin : begin + 7] for reply in replies for begin in range(0, len(reply), 7)]
    reply = data.draw(st.sampled_from(replies))[: data.draw(st.integers(0, 80))]
    ids = [*reply, *(token for piece in data.draw(st.lists(st.sampled_from(pieces), max_size=6)) for token in piece)]
    events = events_of(tokenizer, ids)
    assert blocks_of(events) == blocks_of(events_of(tokenizer, in_bytes(tokenizer, ids)))
    check(events, name)


# Not: those whose prompt opens a thought, and Harmony, in which every text has a marker in front of it.
PLAIN = [name for name in FAMILIES if name not in ("deepseek", "closing marker only", "harmony")]


@pytest.mark.parametrize("name", PLAIN)
@settings(max_examples=examples(100))
@given(text=st.text(alphabet='ab{}[]":, \n\té🙂', max_size=40), size=st.integers(1, 8))
@example(text=' {"name": "nobody", "a": [1]} \n', size=1)
def test_text_without_markers_stays_as_it_is(name: str, text: str, size: int, folder: Path) -> None:
    reader = open_reader(tokenizer_of(name, folder).reply_format, Tools(TOOLS), thoughts=True)
    reader.begin("<|im_start|>assistant\n")
    events = [event for at in range(0, len(text), size) for event in reader.add(text[at : at + size])]
    shown = [event.text for event in [*events, *reader.finish(cut_off=False)] if isinstance(event, TextDelta)]
    assert "".join(shown) == text


@pytest.mark.parametrize(
    "name", ["hermes, markers in pieces", "bare function", "mistral", "kimi", "glm", "gemma", "lfm"]
)
def test_an_opening_without_a_call_holds_no_text_back(name: str, folder: Path) -> None:
    """A model that talks on behind a marker is shown while it does."""
    tokenizer = tokenizer_of(name, folder)
    opening = next(iter(DIALECTS[tokenizer.reply_format.dialect or ""].opens))
    ids = tokenizer.encode(opening + "and so on, without an end " * 60).ids
    output = Output(tokenizer.detokenizer(None), markers=tokenizer.markers)
    reader = open_reader(tokenizer.reply_format, Tools(TOOLS), thoughts=True)
    shown = ""
    for token in ids:
        piece = output.add(token)
        shown += "".join(e.text for e in reader.add(piece.text, piece.markers) if isinstance(e, TextDelta))
    assert len(shown) > 1400 and opening not in shown


_VALUE = {
    "qwen3_coder": "<tool_call>\n<function=look>\n<parameter={}>",
    "glm47": "<tool_call>look\n<arg_key>{}</arg_key>\n<arg_value>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="look">\n<parameter name="{}">',
    "longcat": "<longcat_tool_call>look\n<longcat_arg_key>{}</longcat_arg_key>\n<longcat_arg_value>",
}
_END = {
    "qwen3_coder": "</parameter>",
    "glm47": "</arg_value>",
    "minimax_m2": "</parameter>",
    "longcat": "</longcat_arg_value>",
}


@pytest.mark.parametrize("dialect", _VALUE)
@pytest.mark.parametrize(
    ("key", "begin", "piece"),
    [("at", "", "  "), ("n", "", " \n"), ("list", '["', "{end}"), ("at", "x", "\n"), ("list", "[", "1, ")],
    ids=["space", "space of a number", "ends in a string", "space behind", "a list"],
)
def test_a_piece_costs_the_same_whatever_came_before(dialect: str, key: str, begin: str, piece: str) -> None:
    parameters = {"type": "object", "properties": {"at": {"type": "string"}, "n": {"type": "integer"}, "list": {}}}
    tools = Tools([{"type": "function", "function": {"name": "look", "parameters": parameters}}])
    piece = piece.format(end=_END[dialect])

    def read(num_pieces: int) -> None:
        reader = open_reader(ReplyFormat(dialect), tools, thoughts=False)
        reader.begin("")
        reader.add(_VALUE[dialect].format(key) + begin)
        for _ in range(num_pieces):
            reader.add(piece)
        assert reader.num_calls == 1

    assert growth(lambda size: size, read, 500) < MOST


# What an argument says of its own dialect, in front of and behind what really ends it.
_CALLS = {
    "json_tools": ("<tool_call>\n<function=look>\n<parameter=at>\n{}\n</parameter>\n</function>\n</tool_call>", True),
    "qwen3_coder": ("<tool_call>\n<function=look>\n<parameter=at>\n{}\n</parameter>\n</function>\n</tool_call>", True),
    "functions": ("<function=look>\n<parameter=at>\n{}\n</parameter>\n</function>", True),
    "glm47": ("<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>", True),
    "longcat": (
        "<longcat_tool_call>look\n<longcat_arg_key>at</longcat_arg_key>\n<longcat_arg_value>{}</longcat_arg_value>\n"
        "</longcat_tool_call>",
        True,
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="look">\n<parameter name="at">{}</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        True,
    ),
    "minicpm5": ('<function name="look"><param name="at">{}</param></function>', True),
    "muse_spark": (
        '<atem:function_calls>\n<atem:invoke name="look">\n<atem:parameter name="at">{}</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls>",
        True,
    ),
    "kimi_k3": (
        '<|open|>tools<|sep|><|open|>call tool="look"<|sep|><|open|>argument key="at" type="string"<|sep|>{}'
        "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
        True,
    ),
    "deepseek": ('<|tool_call_begin|>look<|tool_sep|>{{"at": "{}"}}<|tool_call_end|>', False),
    "kimi_k2": ('<|tool_call_begin|>look<|tool_call_argument_begin|>{{"at": "{}"}}<|tool_call_end|>', False),
    "granite": ('<|tool_call|>[{{"name": "look", "arguments": {{"at": "{}"}}}}]<|/tool_call|>', False),
    "mistral": ('[TOOL_CALLS]look[ARGS]{{"at": "{}"}}', False),
    "llama3": ('<|python_tag|>{{"name": "look", "parameters": {{"at": "{}"}}}}', False),
    "gemma4": ('<|tool_call>call:look{{at:<|"|>{}<|"|>}}<tool_call|>', False),
    "function_gemma": ("<start_function_call>call:look{{at:<escape>{}<escape>}}<end_function_call>", False),
    "pythonic": ('<|tool_call_start|>[look(at="{}")]<|tool_call_end|>', False),
}
_SAYS = "x " + " y ".join(
    (
        *("</parameter>", "</function>", "</tool_call>", "</arg_value>", "<tool_call>", "<function=now>", "{}", ","),
        *("</longcat_arg_value>", "</longcat_tool_call>", "</invoke>", "</minimax:tool_call>", "</param>", "</think>"),
        *("</atem:parameter>", "</atem:invoke>", "<|close|>argument<|sep|>", "<|tool_call_end|>", "<tool_call|>"),
        *("<|/tool_call|>", "<escape>", "<end_function_call>", "[TOOL_CALLS]", "<|tool_call_start|>", "z"),
    )
)
_ENDS = ("</parameter>", "</param>", "</arg_value>", "</longcat_arg_value>", "</atem:parameter>")


def read_in(dialect: str, pieces: Sequence[str], types: str = "string") -> list[Block]:
    parameters = {"type": "object", "properties": {"at": {"type": types} if types else {}}}
    tools = Tools([{"type": "function", "function": {"name": "look", "parameters": parameters}}])
    reader = open_reader(ReplyFormat(dialect), tools, thoughts=False)
    reader.begin("")
    events = [event for piece in pieces for event in reader.add(piece)]
    return blocks_of([*events, *reader.finish(cut_off=False)])


@pytest.mark.parametrize("types", ["string", ""])
@pytest.mark.parametrize("dialect", _CALLS)
def test_a_closing_tag_in_an_argument_does_not_end_it(dialect: str, types: str) -> None:
    form, ends = _CALLS[dialect]
    for said in (_SAYS, *(f"a {end} b{end}\n{end} c" for end in _ENDS if ends)):
        reply, expected = form.format(said), json.dumps({"at": said})
        for pieces in ([reply], list(reply), *([reply[:at], reply[at:]] for at in range(0, len(reply), 7))):
            (call,) = read_in(dialect, pieces, types)
            assert isinstance(call, Call) and json.loads(call.arguments) == json.loads(expected)


@pytest.mark.parametrize(
    ("reply", "arguments"),
    [
        ("<parameter=at>\nx\n</parameter>", {"at": "x"}),
        ("<parameter=at>\nx\n</parameter>\n", {"at": "x"}),
        ("<parameter=at>\nx\n</parameter>\n</fun", {"at": "x"}),
        ("<parameter=at>\nx\n</parameter>\n</tool_call>", {"at": "x"}),
        ("<parameter=at>\nx</parameter><parameter=b>y</parameter></function>", {"at": "x", "b": "y"}),
        ("<parameter=at>\nx </parameter> y", {"at": "x </parameter> y"}),
        ("<parameter=at>\n</parameter></function>", {"at": ""}),
        ("<parameter=at>\n\n\n</parameter></function>", {"at": "\n"}),
        ("<parameter=at>\n</parameter>x\n</parameter></function>", {"at": "</parameter>x"}),
        ("<parameter=at>\nx</parameter>\n<function=look>\n<parameter=b>y</parameter></function>", {"at": "x"}),
    ],
)
def test_where_an_argument_ends(reply: str, arguments: dict[str, str]) -> None:
    whole = "<tool_call>\n<function=look>\n" + reply
    for pieces in ([whole], list(whole)):
        call = read_in("qwen3_coder", pieces)[0]
        assert isinstance(call, Call) and json.loads(call.arguments) == arguments


def test_a_number_ends_at_its_tag_and_words_behind_the_call_are_text() -> None:
    reply = "<tool_call>\n<function=look>\n<parameter=at>\n5\n</parameter>\nDone."
    for pieces in ([reply], list(reply)):
        assert read_in("qwen3_coder", pieces, "integer") == [Call("look", '{"at": 5}'), Text("Done.")]


def test_an_argument_has_special_tokens_as_text() -> None:
    """A file about a format is written as the model wrote it, although text hides special tokens."""
    end, hidden = "<｜tool▁call▁end｜>", MarkerToken("<｜tool▁call▁end｜>", 7, is_shown=False)
    begin = MarkerToken("<｜tool▁call▁begin｜>", 6, is_shown=False)
    reader = open_reader(ReplyFormat("deepseek", tokens=(begin, hidden)), Tools(TOOLS), thoughts=False)
    reader.begin("")
    text = 'look{"at": "a b"}'
    events = reader.add(text, [(0, begin.name), (text.index(" b"), end), (len(text), end)])
    assert blocks_of([*events, *reader.finish(cut_off=False)]) == [Call("look", '{"at": "a<｜tool▁call▁end｜> b"}')]


# Replies whose thought is closed twice: what they say as a whole, and as a stream where that is another thing.
_TWICE: list[tuple[str, str, list[Block], list[Block]]] = [
    ("{s}\n", "{e}private planning{e}visible", [Reasoning("private planning"), Text("visible")], []),
    ("{s}\n", "{e}\nprivate\n\n{e}\n\nvisible", [Reasoning("private"), Text("visible")], []),
    ("{s}", "a{e}b{e}c", [Reasoning("a\nb"), Text("c")], []),
    ("{s}", "a{e}b{e}c{e}d", [Reasoning("a\nb\nc"), Text("d")], []),
    ("", "{s}a{e}b{e}c", [Reasoning("a\nb"), Text("c")], []),
    ("", "{e}b{e}c", [Reasoning("b"), Text("c")], []),
    ("", "{s}{e}b{s}c{e}d", [Reasoning("bc"), Text("d")], []),
    ("", "b{e}c", [Reasoning("b"), Text("c")], [Text("bc")]),
    ("", "Well{s}a{e}c", [Text("Well"), Reasoning("a"), Text("c")], []),
    (
        "{s}",
        "a{e}" + "b" * 900 + "{e}c",
        [Reasoning("a\n" + "b" * 900), Text("c")],
        [Reasoning("a"), Text("b" * 900 + "c")],
    ),
    (
        "{s}",
        "a{e}" + "b" * 900 + "\n{e}\n\nc",
        [Reasoning("a\n" + "b" * 900), Text("c")],
        [Reasoning("a"), Text("b" * 900 + "\n\n\nc")],
    ),
    ("", "b\n{e}\nc", [Reasoning("b"), Text("c")], [Text("b\n\nc")]),
    ("{s}", "a{e}b" + "{e}" * 3, [Reasoning("a\nb")], []),
    ("{s}", "a{e}only this", [Reasoning("a"), Text("only this")], []),
    ("{s}", "a{e}b<tool_call>none</tool_call> c{e}d", [Reasoning("a\nbnone c"), Text("d")], []),
    (
        "{s}",
        'a{e}b<tool_call>{{"name": "now", "arguments": {{}}}}</tool_call>c{e}d',
        [Reasoning("a"), Text("b"), Call("now", "{}"), Text("cd")],
        [],
    ),
]


@pytest.mark.parametrize("pair", THOUGHTS, ids=[start for start, _ in THOUGHTS])
@pytest.mark.parametrize(("prompt", "reply", "whole", "stream"), _TWICE)
def test_a_thought_that_is_closed_twice(
    pair: tuple[str, str], prompt: str, reply: str, whole: list[Block], stream: list[Block]
) -> None:
    start, end = pair
    prompt, reply = (text.format(s=start, e=end) for text in (prompt, reply))
    for is_whole, expected in ((True, whole), (False, stream or whole)):
        for size in (1, 3, len(reply)):
            reader = open_reader(ReplyFormat("json_tools", (pair,)), Tools(TOOLS), thoughts=True, whole=is_whole)
            reader.begin(prompt)
            events = [event for at in range(0, len(reply), size) for event in reader.add(reply[at : at + size])]
            assert blocks_of([*events, *reader.finish(cut_off=False)]) == expected
            assert sum(length for length, _ in reader.take_zones()) == len(reply)


@pytest.mark.parametrize(("thought", "most"), [("hm", DOUBTED), ("", DOUBTED_UNTHOUGHT)])
def test_an_answer_is_held_no_longer_than_needed(thought: str, most: int) -> None:
    """Behind the first closing marker; without a thought, not at all."""
    reader = open_reader(ReplyFormat("json_tools", (("<think>", "</think>"),)), Tools(TOOLS), thoughts=True)
    reader.begin("<think>")
    reader.add(thought + "</think>")
    given = shown = 0
    while given < 1000:
        given += 1
        shown += sum(len(event.text) for event in reader.add("x") if isinstance(event, TextDelta))
        assert shown == (0 if given < most else given)
    plain = open_reader(ReplyFormat("json_tools", (("<think>", "</think>"),)), Tools(TOOLS), thoughts=True)
    plain.begin("<think></think>")
    assert plain.add("x") == [TextDelta("x")]


@pytest.mark.parametrize("name", list(FAMILIES))
def test_zones_are_what_is_said(name: str, folder: Path) -> None:
    tokenizer = tokenizer_of(name, folder)
    prompt = tokenizer.chats.text(QUESTION, TOOLS)
    for reply, blocks in FAMILIES[name].replies:
        output = Output(tokenizer.detokenizer(tokenizer.encode(prompt).ids[-1]), markers=tokenizer.markers)
        reader = open_reader(tokenizer.reply_format, Tools(TOOLS), thoughts=True)
        reader.begin(prompt[-256:])
        text = ""
        for token in tokenizer.encode(reply).ids:
            shown = output.add(token)
            reader.add(shown.text, shown.markers)
            text += shown.text
        reader.finish(cut_off=False)
        zones = reader.take_zones()
        ends = accumulate(length for length, _ in zones)
        said = "".join(text[end - length : end] for end, (length, is_said) in zip(ends, zones, strict=True) if is_said)
        assert said.split() == "".join(block.text for block in blocks if isinstance(block, Text)).split()


@pytest.mark.parametrize("size", [1, 100])
def test_white_space_on_both_sides_of_a_thought_is_in_no_text(size: int) -> None:
    form, reply = ReplyFormat("json_tools", (("<think>", "</think>"),)), "So.\n<think>a</think>\nYes"
    reader = open_reader(form, Tools(TOOLS), thoughts=True)
    reader.begin("")
    events = [event for at in range(0, len(reply), size) for event in reader.add(reply[at : at + size])]
    assert blocks_of([*events, *reader.finish(cut_off=False)]) == [Text("So."), Reasoning("a"), Text("Yes")]


def test_text_behind_a_call_is_shown_at_once() -> None:
    """No marker makes a thought of it any more."""
    reader = open_reader(ReplyFormat("json_tools", (("<think>", "</think>"),)), Tools(TOOLS), thoughts=True)
    reader.begin("<think>")
    for piece in ("a</think>", '<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>'):
        reader.add(piece)
    assert reader.num_calls == 1
    assert reader.add("Done so far") == [TextDelta("Done so far")]


def test_a_second_thought_that_is_not_closed_is_no_answer() -> None:
    form = ReplyFormat("json_tools", (("<think>", "</think>"),), thinks_first=True)
    reader = open_reader(form, Tools(TOOLS), thoughts=True)
    reader.begin("")
    events = [*reader.add("a</think>Yes" + " so" * 400), *reader.add("<think>b"), *reader.finish(cut_off=False)]
    assert blocks_of(events) == [Reasoning("a"), Text("Yes" + " so" * 400), Reasoning("b")]
