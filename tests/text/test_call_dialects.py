"""The dialect of a model's calls is the one that reads what its chat template writes for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from agentcache.api.model import MarkerToken, ReplyFormat
from agentcache.system.confined import ConfinedWork
from agentcache.text.json_values import MAX_REPLY_DEPTH, parse_json
from agentcache.text.replies.calls import Tools
from agentcache.text.replies.dialects import DIALECTS, call_syntax
from agentcache.text.replies.events import Block, Call, Reasoning, Text, blocks_of
from agentcache.text.replies.find_format import WrittenReply, find_format, render_in, write_in, write_replies
from agentcache.text.replies.reader import open_reader

# A conversation; the calls of a message stand where CALLS is.
_CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% if m.tool_calls %}CALLS{% endif %}</turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
_EACH = "{% for c in m.tool_calls %}{% set f = c.function %}"
_COMMA = "{{ ', ' if not loop.last }}{% endfor %}"
_OBJECT = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
_ITEMS = "{% for k, v in f.arguments.items() %}{% set w = v if v is string else v | tojson %}"
_DSML = (
    '<｜DSML｜invoke name="{{ f.name }}">\n' + _ITEMS + '<｜DSML｜parameter name="{{ k }}" string="'
    "{{ 'true' if v is string else 'false' }}\">{{ w }}</｜DSML｜parameter>\n{% endfor %}"
    "</｜DSML｜invoke>\n{% endfor %}"
)

TEMPLATES: dict[str, str] = {
    "json_tools": f"{_EACH}<tool_call>\n{_OBJECT}\n</tool_call>\n{{% endfor %}}",
    "qwen3_coder": _EACH
    + "<tool_call>\n<function={{ f.name }}>\n"
    + _ITEMS
    + "<parameter={{ k }}>\n{{ w }}\n</parameter>\n{% endfor %}</function>\n</tool_call>\n{% endfor %}",
    "glm47": _EACH
    + "<tool_call>{{ f.name }}\n"
    + _ITEMS
    + "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ w }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}",
    "hunyuan": "<tool_calls:opensource>\n"
    + _EACH
    + "<tool_call:opensource>{{ f.name }}<tool_sep:opensource>\n"
    + _ITEMS
    + "<arg_key:opensource>{{ k }}</arg_key:opensource>\n<arg_value:opensource>{{ w }}</arg_value:opensource>\n"
    + "{% endfor %}</tool_call:opensource>\n{% endfor %}</tool_calls:opensource>",
    "seed_oss": _EACH
    + "<seed:tool_call>\n<function={{ f.name }}>\n"
    + "{% for k, v in f.arguments.items() %}<parameter={{ k }}>{{ v }}</parameter>\n{% endfor %}"
    + "</function>\n</seed:tool_call>{% endfor %}",
    "deepseek_v4": f"\n\n<｜DSML｜tool_calls>\n{_EACH}{_DSML}</｜DSML｜tool_calls>",
    "deepseek_v32": f"\n\n<｜DSML｜function_calls>\n{_EACH}{_DSML}</｜DSML｜function_calls>",
    "apertus": f"<|tools_prefix|>[{_EACH}"
    + '{"{{ f.name }}": {{ f.arguments | tojson }}}'
    + f"{_COMMA}]<|tools_suffix|>",
    "cohere": f"<|START_ACTION|>[\n{_EACH}"
    + '    {"tool_call_id": "0", "tool_name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
    + f"{_COMMA}\n]<|END_ACTION|>",
    "command_r": f"\nAction:\n```json\n[\n{_EACH}"
    + '{"tool_name": "{{ f.name }}",\n "parameters": {{ f.arguments | tojson(indent=4) }}\n}'
    + f"{_COMMA}\n]```\n",
    "minimax_m1": f"<tool_calls>\n{_EACH}{_OBJECT}\n{{% endfor %}}</tool_calls>",
    "apriel": f'\n<tool_calls>[{_EACH}{_OBJECT[:-1]}, "id": "x"}}{_COMMA}]</tool_calls>',
    "nemotron": f"<TOOLCALL>[{_EACH}{_OBJECT}{_COMMA}]</TOOLCALL>",
    "gigachat": f"<|function_call|>{_EACH}{{% if loop.first %}}{_OBJECT}{{% endif %}}{{% endfor %}}",
    "gigachat_3": f"<|message_sep|>\n\nfunction call<|role_sep|>\n{_EACH}"
    + f"{{% if loop.first %}}{_OBJECT}{{% endif %}}{{% endfor %}}",
    "functools": f" functools[{_EACH}{_OBJECT}{_COMMA}]",
    "solar": f"<|tool_calls|>{_EACH}"
    + "<|tool_call:begin|>{{ c.id }}<|tool_call:name|>{{ f.name }}<|tool_call:args|>{{ f.arguments | tojson }}"
    + "<|tool_call:end|>{% endfor %}<|calls|>",
    "kimi_k3": "<|open|>tools<|sep|>"
    + _EACH
    + '<|open|>call tool="{{ f.name }}" index="{{ loop.index }}"<|sep|>'
    + _ITEMS
    + '<|open|>argument key="{{ k }}" type="'
    + "{{ 'string' if v is string else 'number' if v is number else 'object' }}\"<|sep|>{{ w }}"
    + "<|close|>argument<|sep|>{% endfor %}<|close|>call<|sep|>{% endfor %}<|close|>tools<|sep|>",
    "functions": _EACH + "<function={{ f.name }}>{{ f.arguments | tojson }}</function>{% endfor %}",
    "mistral": _EACH + "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]{{ f.arguments | tojson }}{% endfor %}",
    "llama3": "{% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}"
    + _EACH
    + '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% endfor %}',
}
_SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}},
}
TOOLS = [{"type": "function", "function": {"name": "make", "description": "Make.", "parameters": _SCHEMA}}]
ARGUMENTS: dict[str, Any] = {"path": 'a "b" <c> {d}\n  日本 🙂', "n": 7, "o": {"k": [1, "x, y", True]}}


@pytest.fixture(scope="module")
def work() -> Iterator[ConfinedWork]:
    work = ConfinedWork("agentcache.text.template_child")
    yield work
    work.close()


def written(work: ConfinedWork, name: str) -> tuple[str, tuple[WrittenReply, ...]]:
    template = _CHAT.replace("CALLS", TEMPLATES[name])
    return template, write_in(work, template, {})


def read(form: ReplyFormat, *pieces: str, prompt: str = "") -> list[Block]:
    reader = open_reader(form, Tools(TOOLS), thoughts=True)
    reader.begin(prompt)
    events = [event for piece in pieces for event in reader.add(piece)]
    return blocks_of([*events, *reader.finish(cut_off=False)])


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_tells_its_dialect_by_what_it_writes(name: str, work: ConfinedWork) -> None:
    template, replies = written(work, name)
    others = {"<tool_call>": (7, False), "[TOOL_CALLS]": (8, True)}  # that a tokenizer has says less
    assert find_format(template, others, None, replies).dialect == name


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_writes_is_read_at_every_border(name: str, work: ConfinedWork) -> None:
    message = {"role": "assistant", "content": "" if name == "llama3" else "Well."}
    call = {"id": "call00001", "type": "function", "function": {"name": "make", "arguments": ARGUMENTS}}
    template = _CHAT.replace("CALLS", TEMPLATES[name])
    text = render(work, template, message | {"tool_calls": [call]})
    expected = [*([Text("Well.")] if message["content"] else []), ("make", ARGUMENTS)]
    for at in range(len(text)):
        blocks = read(ReplyFormat(name), text[:at], text[at:])
        told = [(each.name, json.loads(each.arguments)) if isinstance(each, Call) else each for each in blocks]
        assert told == expected
    blocks = read(ReplyFormat(name), *text)
    assert json.loads(blocks[-1].arguments if isinstance(blocks[-1], Call) else "") == ARGUMENTS


M3 = "]<]minimax[>["
_CALL = {"path": "a <b> </path>\n", "n": 7, "o": {"k": [1, {"l": "x"}], "m": True}}
_TREE = (
    f'{M3}<tool_call>\n{M3}<invoke name="make">{M3}<path>a <b> </path>\n{M3}</path>{M3}<n>7{M3}</n>{M3}<o>{M3}<k>'
    f"{M3}<item>1{M3}</item>{M3}<item>{M3}<l>x{M3}</l>{M3}</item>{M3}</k>{M3}<m>true{M3}</m>{M3}</o>{M3}</invoke>\n"
)
_ATEM = (
    '<atem:function_calls>\n<atem:invoke name="make">\n<atem:parameter name="path">a <b> </path>\n</atem:parameter>\n'
    '<atem:parameter name="n">7</atem:parameter>\n<atem:parameter name="o">{"k": [1, {"l": "x"}], "m": true}'
    "</atem:parameter>\n</atem:invoke>\n</atem:function_calls>"
)
_MUSE = ReplyFormat("muse_spark", (("to=self<|message|>", "<|eom|>"),))
_AT_START = "<|start|>assistant"
HEADED = [
    (ReplyFormat("minimax_m3"), "", f"Well.{_TREE}{M3}</tool_call>", ["Well.", _CALL]),
    (
        ReplyFormat("minimax_m3"),
        "",
        f'{_TREE}{M3}<invoke name="make">{M3}</invoke>\n{M3}</tool_call>',
        [_CALL, {}],
    ),
    (ReplyFormat("minimax_m3"), "", _TREE.partition(f"{M3}</k>")[0], [{"path": _CALL["path"], "n": 7}]),
    (ReplyFormat("minimax_m3"), "", f'{M3}<tool_call>{M3}<invoke name="make">{{"n": 7}}{M3}</invoke>', [{"n": 7}]),
    (_MUSE, _AT_START, " to=user<|message|>Well.<|eot|>", ["Well."]),
    (
        _MUSE,
        _AT_START,
        f" to=self<|message|>Hm.<|eom|>{_AT_START} to=make<|message|>{_ATEM}<|eom|>"
        f"{_AT_START} to=make<|message|>{_ATEM}",
        [("Hm.",), _CALL, _CALL],
    ),
    (_MUSE, _AT_START, _ATEM, [_CALL]),  # as it is demanded
    (_MUSE, _AT_START, "to be", ["to be"]),
    (ReplyFormat("functionary"), ">>>", "all\nWell.", ["Well."]),
    (ReplyFormat("functionary"), ">>>", f"all\nWell.>>>make\n{json.dumps(_CALL)}", ["Well.", _CALL]),
    (ReplyFormat("functionary"), ">>>", f'make\n{json.dumps(_CALL)}>>>make\n{{"n": 7}}', [_CALL, {"n": 7}]),
    (ReplyFormat("functionary"), ">>>", "all\n>>> 1 + 1\n2", [">>> 1 + 1\n2"]),
    (ReplyFormat("functionary"), ">>>", '{"a": 1}', ['{"a": 1}']),
    (ReplyFormat("functionary"), "", '>>>make\nplease: {"n": 7}', ['>>>make\nplease: {"n": 7}']),
    (_MUSE, "", f"{_AT_START}] no header<|message|>Well.", ["] no header<|message|>Well."]),
    (ReplyFormat("apertus"), "", r'<|tools_prefix|>[{"ma\ke": {}}]', [{}]),
    (ReplyFormat("apertus"), "", '<|tools_prefix|>[{"": {}}]', ['[{"": {}}]']),
]


@pytest.mark.parametrize(("form", "prompt", "text", "expected"), HEADED)
def test_trees_and_headers_are_read_at_every_border(
    form: ReplyFormat, prompt: str, text: str, expected: list[Any]
) -> None:
    for pieces in ([*text], *([text[:at], text[at:]] for at in range(len(text)))):
        told = [
            json.loads(each.arguments)
            if isinstance(each, Call)
            else (each.text,)
            if isinstance(each, Reasoning)
            else each.text
            for each in read(form, *pieces, prompt=prompt)
        ]
        assert told == expected


@pytest.mark.parametrize("num_tags", [30, 60, 88, 89, 200])
def test_arguments_are_never_nested_too_deeply_to_be_sent_back(num_tags: int) -> None:
    tags = [f"{M3}<k{index}>" for index in range(num_tags)]
    value = f"{''.join(tags)}{'[' * 60}{']' * 60}{''.join(reversed(tags)).replace('<k', '</k')}"
    first = read(ReplyFormat("minimax_m3"), f'{M3}<tool_call>{M3}<invoke name="make">{value}{M3}</invoke>')[0]
    assert isinstance(first, Call)
    assert set(parse_json(first.arguments, max_depth=MAX_REPLY_DEPTH)) <= {"k0"}


@pytest.mark.parametrize(
    "begin",
    ["<tool_call>\n<function=make>\n<parameter=", f'{M3}<tool_call>{M3}<invoke name="make">{M3}<'],
    ids=["tagged", "nested"],
)
@pytest.mark.parametrize("tag", ["x" * 2_000, f"{'x' * 1_000}>"], ids=["open", "closed"])
def test_a_reply_goes_on_behind_a_tag_that_is_too_long(begin: str, tag: str) -> None:
    form, text = ReplyFormat("qwen3_coder" if "function" in begin else "minimax_m3"), f"{begin}{tag} Well."
    for pieces in ([text], [*text]):
        call, said = read(form, *pieces)
        assert isinstance(call, Call) and call.arguments == "{}"
        assert isinstance(said, Text) and said.text.endswith("xxx Well." if tag[-1] == "x" else "xxx> Well.")


def test_zones_count_a_marker_that_is_told_as_text() -> None:
    reader = open_reader(ReplyFormat("functionary", tokens=(MarkerToken(">>>", 1, True),)), Tools(TOOLS), thoughts=True)
    reader.begin("")
    text = ">>>nothing like a call\nwell"
    blocks = blocks_of([*reader.add(text, [(0, ">>>")]), *reader.finish(cut_off=False)])
    assert blocks == [Text(text)]
    assert sum(length for length, _ in reader.take_zones()) == len(text)


@pytest.mark.parametrize("name", ["glm47", "minimax_m2", "kimi_k3", "hunyuan", "seed_oss", "deepseek_v4", "muse_spark"])
def test_strings_between_tags_keep_their_white_space(name: str) -> None:
    text = "  a\n\n\tb\n"
    syntax = call_syntax(ReplyFormat(name))
    argument = syntax.argument
    assert argument is not None
    written = f"{argument.name_open}path{argument.name_closed('string')}{argument.value_open}{text}{argument.close}"
    call = f"{syntax.begin}{syntax.opened('make')}{written}{syntax.close}{syntax.end}"
    for pieces in ([call], [*call]):
        [block] = read(ReplyFormat(name), *pieces)
        assert isinstance(block, Call) and json.loads(block.arguments) == {"path": text}


def render(work: ConfinedWork, template: str, message: dict[str, Any]) -> str:
    """What a template writes for one message of the assistant, without what is around it."""
    text = render_in(work, template, {}, [message], TOOLS, add_generation_prompt=False)
    assert text is not None
    return text.removeprefix("<assistant>").removesuffix("</turn>\n")


def test_every_dialect_can_be_demanded() -> None:
    for name in DIALECTS:
        assert "make" in call_syntax(ReplyFormat(name)).opened("make")


def test_templates_that_show_no_calls_are_known_by_their_markers() -> None:
    assert write_replies("{{ messages[0].content }}", ()) == ()
    for template, dialect in {
        "List of tools: <|tool_list_start|>": "pythonic",
        "Use <|tool_call|> to call": "granite",
        "{{ '<tool_calls{}>'.format(SUFFIX) }}": "hunyuan",
        "answer with functools[...]": "functools",
    }.items():
        assert find_format(template, {}, None).dialect == dialect


def test_a_template_that_breaks_off_tells_nothing() -> None:
    assert write_replies("{{ tool_calls }}{% for i in range(10**9) %}x{% endfor %}", ()) == ()
    assert write_replies("{{ tool_calls }}{{ raise_exception('no') }}", ()) == ()


@pytest.mark.parametrize(
    ("template", "is_thought"),
    [
        ("{{ messages[0].content.split('</think>')[-1] }}", True),
        ("{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}{% endif %}", False),
    ],
)
def test_only_a_template_that_is_sure_of_thoughts_begins_with_one(template: str, is_thought: bool) -> None:
    form = find_format(template, {}, None)
    assert form.thinks_first == is_thought
    assert read(form, "<think>hm</think>Plain.") == [Reasoning("hm"), Text("Plain.")]
    if not is_thought:
        assert read(form, "Plain.") == [Text("Plain.")]


@pytest.mark.parametrize(
    ("prompt", "text", "start"),
    [
        ("", "<seed:think>hm</seed:think>yes", "<seed:think>"),
        ("", "<mm:think>hm</mm:think>yes", "<mm:think>"),
        ("", "<think:opensource>hm</think:opensource>yes", "<think:opensource>"),
        ("", "<|START_THINKING|>hm<|END_THINKING|>yes", "<|START_THINKING|>"),
        ("", "<|inner_prefix|>hm<|inner_suffix|>yes", "<|inner_prefix|>"),
        ("", "<|think|>hm<|end|><|begin|>assistant<|content|>yes<|end|>", "<|think|>"),
        ("Here are my reasoning steps:\n", "hm\n[BEGIN FINAL RESPONSE]\nyes[END FINAL RESPONSE]", "Here are"),
    ],
)
def test_thoughts(prompt: str, text: str, start: str) -> None:
    template = prompt + text + (" <tool_calls>" if prompt else " <|tool_call:begin|>")
    form = find_format(template, {}, None)
    assert any(each.startswith(start) for each, _ in form.thoughts)
    for at in range(len(text)):
        assert read(form, text[:at], text[at:], prompt=prompt) == [Reasoning("hm"), Text("yes")]
