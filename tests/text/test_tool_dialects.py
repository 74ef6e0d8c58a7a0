"""Calls in the dialects that mlx-lm reads: what comes of them piece by piece is what mlx-lm makes of the whole."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from agentcache.api.model import ReplyFormat
from agentcache.text.json_values import MAX_DEPTH, MAX_REPLY_DEPTH, JsonText
from agentcache.text.replies.calls import Tools
from agentcache.text.replies.dialects import DIALECTS
from agentcache.text.replies.events import Call, blocks_of
from agentcache.text.replies.reader import open_reader
from agentcache.text.replies.tagged_calls import converted

PROPERTIES: dict[str, Any] = {
    "s": {"type": "string"},
    "i": {"type": "integer"},
    "f": {"type": "number"},
    "b": {"type": "boolean"},
    "o": {"type": "object"},
    "a": {"type": "array"},
    "e": {"type": "string", "enum": ["x", "y"]},
}
TOOLS = [{"type": "function", "function": {"name": "make", "parameters": {"type": "object", "properties": PROPERTIES}}}]
VALUES = {
    "s": 'a "b" \\ <c> {d}\n  e',
    "i": "7",
    "f": "2.5",
    "b": "true",
    "o": '{"k": [1, {"l": null}]}',
    "a": '["x", 2]',
    "e": "x",
}


def xml(begin: str, end: str) -> str:
    return "".join(f"{begin.format(key)}{value}{end}" for key, value in VALUES.items())


JSON = '{"s": "a \\"b\\" \\n", "i": 7, "o": {"k": [1, {"l": null}]}}'
INSIDES = {
    "json_tools": f'\n{{"name": "make", "arguments": {JSON}}}\n',
    "qwen3_coder": "\n<function=make>\n" + xml("<parameter={}>\n", "\n</parameter>\n") + "</function>\n",
    "glm47": "make\n" + xml("<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n"),
    "longcat": "make\n" + xml("<longcat_arg_key>{}</longcat_arg_key>\n<longcat_arg_value>", "</longcat_arg_value>\n"),
    "minimax_m2": '\n<invoke name="make">\n' + xml('<parameter name="{}">', "</parameter>\n") + "</invoke>\n",
    "minicpm5": '"make">' + xml('<param name="{}"><![CDATA[', "]]></param>"),
    "muse_spark": '\n<atem:invoke name="make">\n'
    + '<atem:parameter name="i">7</atem:parameter><atem:parameter name="o">{"k": [1]}</atem:parameter>'
    + "</atem:invoke>\n",
    "kimi_k3": '<|open|>call tool="make" index="1"<|sep|>'
    + '<|open|>argument key="s" type="string"<|sep|>a "b" {c}<|close|>argument<|sep|>'
    + '<|open|>argument key="o" type="object"<|sep|>{"k": [1]}<|close|>argument<|sep|>'
    + "<|close|>call<|sep|>",
    "kimi_k2": f"<|tool_call_begin|>functions.make:0<|tool_call_argument_begin|>{JSON}<|tool_call_end|>",
    "mistral": f"make[ARGS]{JSON}",
    "gemma4": 'call:make{s:<|"|>a "b"<|"|>,i:7,o:{k:[1]}}',
    "pythonic": "[make(s='a \"b\"', i=7, a=[1, None], b=True)]",
}


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("name", sorted(INSIDES))
def test_calls_are_those_that_mlx_lm_reads(name: str, step: int) -> None:
    parser = import_module(f"mlx_lm.tool_parsers.{name}")
    theirs = parser.parse_tool_call(INSIDES[name], TOOLS)
    [expected] = theirs if isinstance(theirs, list) else [theirs]
    text = parser.tool_call_start + INSIDES[name] + parser.tool_call_end
    reader = open_reader(ReplyFormat(name), Tools(TOOLS), thoughts=False)
    events = [event for at in range(0, len(text), step) for event in reader.add(text[at : at + step])]
    [call] = blocks_of([*events, *reader.finish(cut_off=False)])
    assert isinstance(call, Call) and call.name == expected["name"]
    assert json.loads(call.arguments) == expected["arguments"]


FIELDS = [
    ("gemma4", 'call:make{s:<|"|>\n"\\{},]\ud7ff🙂<|"|>,a:[<|"|>x, y:<|"|>,-2.5e3,{k:{}},[]],b:true,o:{}}call:make{}'),
    ("gemma4", "\ncall:make-it{\n}\n"),
    ("function_gemma", "call:make{s:sky is blue,i:7}"),
    ("pythonic", "[make(s='it\\'s \\x41\\u00e9\\U0001f642\\101\\n', i=-7, f=.5, b=False), now.make()]"),
    (
        "pythonic",
        """[make(s=\"\"\"a "quoted" 'line'\nand ''\"\"\", o={'k': (1, [2, None],), "l": {}}, a=["x)", ')]'], e='')]""",
    ),
    ("pythonic", '[make(a=[true, null], o={"k": {"l": false}},)]'),
    ("pythonic", "[make(s=the sky, i=7)]"),
]


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(("name", "inside"), FIELDS)
def test_fields_are_those_that_mlx_lm_reads(name: str, inside: str, step: int) -> None:
    parser = import_module(f"mlx_lm.tool_parsers.{name}")
    theirs = parser.parse_tool_call(inside, TOOLS)
    expected = [(call["name"], json.loads(json.dumps(call["arguments"]))) for call in _listed(theirs)]
    assert read_pieces(name, parser.tool_call_start + inside + parser.tool_call_end, step) == expected


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(
    ("name", "inside", "arguments"),
    [
        ("function_gemma", "call:make{a:[<escape>{<escape>,true]}", {"a": ["{", True]}),
        ("function_gemma", "call:make{o:{k:<escape>,x:<escape>}}", {"o": {"k": ",x:"}}),
        ("gemma4", 'call:make{"s": "a \\"b\\" {", "o": {"k": null}}', {"s": 'a "b" {', "o": {"k": None}}),
        ("gemma4", "call:make{e:x,f:1e400,s:<|\"|>y", {"e": "x", "f": "1e400", "s": "y"}),
        ("pythonic", r'[make(s="\ud83d\ude42 \ud83d \/", a=1', {"s": "🙂 \ufffd /"}),
        ("pythonic", r"""[make(s='\d\x4', a=["it's", ''])]""", {"s": "\\d\\x4", "a": ["it's", ""]}),
        ("pythonic", '[make("sky")]', {}),
    ],
)  # fmt: skip
def test_fields_that_mlx_lm_does_not_read(name: str, inside: str, arguments: dict[str, Any], step: int) -> None:
    parser = import_module(f"mlx_lm.tool_parsers.{name}")
    [call] = read_pieces(name, parser.tool_call_start + inside, step)
    assert call == ("make", arguments)


def _listed(calls: Any) -> list[Any]:
    return calls if isinstance(calls, list) else [calls]


def read_pieces(name: str, text: str, step: int) -> list[tuple[str, Any]]:
    """Names and arguments of the calls in a text that comes in pieces; text beside them is left out."""
    reader = open_reader(ReplyFormat(name), Tools(TOOLS), thoughts=False)
    events = [event for at in range(0, len(text), step) for event in reader.add(text[at : at + step])]
    blocks = blocks_of([*events, *reader.finish(cut_off=False)])
    return [(block.name, json.loads(block.arguments)) for block in blocks if isinstance(block, Call)]


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_what_closes_a_value_may_stand_in_a_string_of_a_list(step: int) -> None:
    inside = '["</parameter>", "x\\"</parameter>"]'
    text = (
        f'<tool_call><function=make><parameter=a>{inside}</parameter><parameter=s>["</parameter></function></tool_call>'
    )
    reader = open_reader(ReplyFormat("qwen3_coder"), Tools(TOOLS), thoughts=False)
    events = [event for at in range(0, len(text), step) for event in reader.add(text[at : at + step])]
    [call] = blocks_of([*events, *reader.finish(cut_off=False)])
    assert isinstance(call, Call) and json.loads(call.arguments) == {"a": json.loads(inside), "s": '["'}


def test_types_are_found_behind_references_that_go_round_in_circles() -> None:
    wide = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in "abc" * 50] + [{"const": 2.5}]}
    schema = {
        "properties": {"x": wide, "y": {"$ref": "#/elsewhere"}},
        "$defs": dict.fromkeys("ab", wide) | {"c": {"type": "null"}},
    }
    tools = Tools([{"type": "function", "function": {"name": "f", "parameters": schema}}])
    assert tools.types("f", "x") == {"number", "null"} and not tools.types("f", "y")


def test_every_dialect_of_mlx_lm_is_read() -> None:
    folder = import_module("mlx_lm.tool_parsers").__path__[0]
    assert {path.stem for path in Path(folder).glob("[a-z]*.py")} <= set(DIALECTS)


@pytest.mark.parametrize(
    ("text", "mended"),
    [
        ('{"a": [1, 2,], "b": {"c": true,},}', '{"a": [1, 2], "b": {"c": true}}'),
        ('{"a": "one\ntwo\ttabs \\d"}', '{"a": "one\\ntwo\\ttabs \\\\d"}'),
        ('{"a": True, "b": None}', '{"a": true, "b": null}'),
        (r'{"a": "\ud83d\ude42 \ud83d \ude42"}', r'{"a": "\ud83d\ude42 \ufffd \ufffd"}'),
        ('{"a": "cut \\u12', '{"a": "cut "}'),
        ('{"a": {"b": [1, {"c": "d', '{"a": {"b": [1, {"c": "d"}]}}'),
        ('{"a": 1, "b": tru', '{"a": 1}'),
        ('{"a": 1, "bcd', '{"a": 1}'),
        ('{"a": 1 nonsense', '{"a": 1}'),
        ('{"a": 1e400, "b": 2}', "{}"),
    ],
)
@pytest.mark.parametrize("step", [1, 1000])
def test_json_is_mended(text: str, mended: str, step: int) -> None:
    value, out = JsonText(), ""
    for at in range(0, len(text), step):
        piece = text[at : at + step]
        if value.feed(piece, 0) < len(piece):
            break
        out += value.take()
    value.complete()
    out += value.take()
    assert out == mended and isinstance(json.loads(out), dict)


@pytest.mark.parametrize("depth", [MAX_REPLY_DEPTH - 1, MAX_REPLY_DEPTH, MAX_DEPTH, 5000])
def test_no_call_is_nested_deeper_than_a_client_can_send_back(depth: int) -> None:
    lists = "[" * depth + "]" * depth
    for found in (converted(lists, frozenset({"array"}), untyped=False), converted(lists, frozenset(), untyped=True)):
        assert isinstance(found, list) == (depth < MAX_REPLY_DEPTH)
    in_string = json.dumps({"name": "make", "arguments": f'{{"a": {lists}}}'})
    reader = open_reader(ReplyFormat("json_tools"), Tools(TOOLS), thoughts=True)
    events = [*reader.add(f"<tool_call>{in_string}</tool_call>", ()), *reader.finish(cut_off=False)]
    called = [block for block in blocks_of(events) if isinstance(block, Call)]
    assert bool(called) == (depth < MAX_REPLY_DEPTH)


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("7", {"integer"}, 7),
        ("7.0", {"integer"}, 7),
        ("7.5", {"integer"}, 7.5),
        ("seven", {"integer"}, "seven"),
        ("null", {"string"}, "null"),
        ("null", {"string", "null"}, None),
        ("null", {"integer", "null"}, None),
        ("True", {"boolean"}, True),
        ("maybe", {"boolean"}, "maybe"),
        ("{'a': (1, 2)}", {"object"}, {"a": [1, 2]}),
        ("1e400", {"number"}, "1e400"),
        ("12", {"string", "integer"}, 12),
    ],
)
def test_arguments_have_the_types_that_the_tool_asks_for(text: str, types: set[str], value: object) -> None:
    found = converted(text, frozenset(types), untyped=False)
    assert found == value and type(found) is type(value)
