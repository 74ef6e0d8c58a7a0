"""Conversations told to strict templates: each template here is short and has one habit of published ones."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentcache.api.model import ReplyFormat
from agentcache.errors import InvalidRequest
from agentcache.text.chat import _unseen_tools
from agentcache.text.messages import plain_messages
from agentcache.text.repairs.calls import plain_schema, with_words
from agentcache.text.repairs.kinds import Repairs, call_notation
from agentcache.text.repairs.steps import repaired
from agentcache.text.tokenizer import Tokenizer
from tests.growth import MOST, growth
from tests.text.templates import MISTRAL
from tests.tokenizers_factory import byte_bpe, with_markers

Message = dict[str, Any]

LOOP = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
DROPS_LATER = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}<{{ m.role }}>{{ m.content }}{% endif %}"
    "{% endfor %}"
)
IN_TURNS = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
ONE_CALL = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}"
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('single') }}{% endif %}{{ m.tool_calls[0] | tojson }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
STRING_ARGUMENTS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}{% endfor %}"
)
# Roles in turns but for calls; the system's text stands with a last user's only; text beside calls is dropped.
SYSTEM_AT_THE_END = (
    "{% set ns = namespace(n=0) %}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}"
    "{% if m.role != 'tool' and m.tool_calls is not defined %}{% if (m.role == 'user') != (ns.n % 2 == 0) %}"
    "{{ raise_exception('turns') }}{% endif %}{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}"
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{% if m.tool_calls is defined %}"
    "{{ m.tool_calls | tojson }}{% elif loop.last and m.role == 'user' and system is defined %}"
    "<user>{{ system + m.content }}{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
# Kimi K2's template shows a call's id and no name.
SHOWS_IDS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.tool_call_id }}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}"
)
NAMES_AN_ABSENT_TOKEN = "{{ unk_token + '<start>' }}{% set n = tools | length %}" + LOOP
NAMES_FUNCTIONS = "{{ functions + datetime }}" + LOOP
TAKES_NOTHING = "{{ raise_exception('no') }}"
# Joins strings, as published templates do that write schemas in notations of their own; refuses the word `minimum`.
JOINS_SCHEMAS = (
    "{% for t in tools or [] %}{{ t.function.name + t.function.description }}"
    "{% for n, p in t.function.parameters.properties.items() %}{{ n + ': ' + p.type + ' ' + p.description }}"
    "{% if p.minimum is defined %}{{ raise_exception('minimum') }}{% endif %}{% endfor %}{% endfor %}" + LOOP
)
TEMPLATES = {
    "a loop": LOOP,
    "one system": ONE_SYSTEM,
    "drops later systems": DROPS_LATER,
    "in turns": IN_TURNS,
    "one call": ONE_CALL,
    "string arguments": STRING_ARGUMENTS,
    "shows ids": SHOWS_IDS,
    "names functions": NAMES_FUNCTIONS,
    "system at the end": SYSTEM_AT_THE_END,
    "names an absent token": NAMES_AN_ABSENT_TOKEN,
    "takes nothing": TAKES_NOTHING,
}

LOOK = {"type": "function", "function": {"name": "look", "description": "LOOKAROUND", "parameters": {}}}
SYSTEM, LATER = {"role": "system", "content": "BEKIND"}, {"role": "system", "content": "REMIND"}
USER, AGAIN = {"role": "user", "content": "HELLO"}, {"role": "user", "content": "AGAIN"}
ANSWER = {"role": "assistant", "content": "ANSWER"}


def call(id: str, arguments: str) -> Message:
    return {"id": id, "type": "function", "function": {"name": "look", "arguments": arguments}}


def result(id: str, text: str | None) -> Message:
    return {"role": "tool", "tool_call_id": id, "content": text}


CALLS = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [call("a", '{"p": "GARDEN"}'), call("b", '{"p": "CELLAR"}')]},
    result("a", "SLEEPS"),
    result("b", "OPENED"),
    AGAIN,
]


def calls_of(first: Any, second: Any) -> list[Message]:
    """`CALLS` with other ids of the calls and of their results."""
    made = [{**call("", f'{{"p": "{word}"}}'), "id": id} for id, word in ((first, "GARDEN"), (second, "CELLAR"))]
    results = [
        {"role": "tool", "tool_call_id": id, "content": text} for id, text in ((first, "SLEEPS"), (second, "OPENED"))
    ]
    return [USER, {"role": "assistant", "content": None, "tool_calls": made}, *results, AGAIN]


CONVERSATIONS: dict[str, list[Message]] = {
    "two systems": [SYSTEM, LATER, USER],
    "a later system": [SYSTEM, USER, ANSWER, LATER, AGAIN],
    "two users": [USER, AGAIN],
    "an assistant first": [ANSWER, USER],
    "no user": [SYSTEM],
    "calls": CALLS,
    "a call with words": [
        SYSTEM,
        USER,
        {"role": "assistant", "content": "ANSWER", "tool_calls": [call("a", '{"p": "GARDEN"}')]},
        result("a", "SLEEPS"),
    ],
    "odd arguments": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call("a", '{"p": "CUT'), call("b", "null")]},
        result("a", None),
        result("b", "OPENED"),
    ],
    "calls of one id": calls_of("a", "a"),
    "calls without ids": calls_of(None, None),
    "ids that are no text": calls_of(7, ["b"]),
    "odd parts": [USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": "HMMM"}]}, AGAIN],
}
WORDS = ("BEKIND", "REMIND", "HELLO", "AGAIN", "ANSWER", "GARDEN", "CELLAR", "SLEEPS", "OPENED", "CUT", "HMMM")
NOTATION = call_notation(ReplyFormat(), lambda text: text)
_MADE: dict[str, Tokenizer] = {}


def made(factory: pytest.TempPathFactory, name: str) -> Tokenizer:
    if name not in _MADE:
        _MADE[name] = Tokenizer.load(
            byte_bpe(factory.mktemp("repairs"), chat_template=TEMPLATES.get(name, JOINS_SCHEMAS))
        )
    return _MADE[name]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_word_reaches_the_model(tmp_path_factory: pytest.TempPathFactory, name: str, conversation: str) -> None:
    messages = CONVERSATIONS[conversation]
    told = made(tmp_path_factory, name).chats.render(messages, [LOOK])
    for word in (word for word in WORDS if word in str(messages)):
        assert word in told.text
    assert "LOOKAROUND" in told.text
    assert len(set(told.notes)) == len(told.notes)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "messages",
    [
        [SYSTEM, LATER, USER, ANSWER, AGAIN],
        [USER, ANSWER, LATER, AGAIN, ANSWER, USER],
        [USER, AGAIN, ANSWER, USER, ANSWER, USER],
        [*CALLS, ANSWER, USER],
    ],
    ids=["systems", "a later system", "neighbours", "calls"],
)
def test_the_prefix_holds(tmp_path_factory: pytest.TempPathFactory, name: str, messages: list[Message]) -> None:
    """The text of each turn's prompt is the beginning of the next one's."""
    tokenizer = made(tmp_path_factory, name)
    ends = [i + 1 for i, each in enumerate(messages[:-1]) if each["role"] != "assistant"]
    turns = [end for end in ends if messages[end]["role"] == "assistant"]
    texts = [tokenizer.chats.text(messages[:end], [LOOK], add_generation_prompt=False) for end in turns]
    whole = tokenizer.chats.text(messages, [LOOK], add_generation_prompt=False)
    assert all(whole.startswith(text) for text in texts)


def test_what_a_template_takes_is_told_as_it_is(tmp_path_factory: pytest.TempPathFactory) -> None:
    tokenizer = made(tmp_path_factory, "a loop")
    told = tokenizer.chats.render([SYSTEM, USER, LATER, AGAIN, ANSWER])
    assert told.text == "<system>BEKIND<user>HELLO<system>REMIND<user>AGAIN<assistant>ANSWER"
    assert told.notes == ()


def test_notes_say_what_was_repaired(tmp_path_factory: pytest.TempPathFactory) -> None:
    told = made(tmp_path_factory, "drops later systems").chats.render([SYSTEM, LATER, USER, ANSWER, LATER, AGAIN])
    assert [note.partition(";")[0] for note in told.notes] == [
        "messages: the leading system messages are sent as one",
        "messages: later system messages are sent as marked user text in place",
    ]


def test_a_template_that_takes_nothing_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer.load(byte_bpe(tmp_path, chat_template=TAKES_NOTHING))
    assert tokenizer.chats.uses_template
    assert tokenizer.chats.text([USER]).endswith("user: HELLO\nassistant:")
    assert not tokenizer.chats.uses_template
    assert tokenizer.chats.has_template
    assert tokenizer.chats.repairs() is None
    assert "refuses every conversation" in caplog.text


def test_half_a_pair_becomes_a_replacement_character(tmp_path_factory: pytest.TempPathFactory) -> None:
    told = made(tmp_path_factory, "a loop").chats.render([{"role": "user", "content": "a\ud83db"}])
    assert told.text == "<user>a\ufffdb"
    assert "surrogate" in told.notes[0]


def test_bare_tools_are_filled(tmp_path: Path) -> None:
    template = "{% for t in tools or [] %}{{ t.function.name + t.function.description }}{% endfor %}" + LOOP
    tokenizer = Tokenizer.load(byte_bpe(tmp_path, chat_template=template))
    assert "bare" in tokenizer.chats.text([USER], [{"type": "function", "function": {"name": "bare"}}])


_SAID = {"type": "string", "description": "PLACE"}


@pytest.mark.parametrize(
    ("place", "more"),
    [
        ({"type": ["string", "null"], "description": "PLACE"}, {}),
        ({"type": ["null", "string"], "description": "PLACE", "default": None}, {}),
        ({"description": "PLACE"}, {}),
        ({"const": "PLACE"}, {}),
        ({"type": "string", "enum": ["PLACE", None]}, {}),
        ({"$ref": "#/$defs/P"}, {"$defs": {"P": _SAID}}),
        ({"$ref": "#/definitions/a~1b"}, {"definitions": {"a/b": _SAID}}),
        ({"anyOf": [{"$ref": "#/$defs/P"}, {"type": "null"}], "default": None}, {"$defs": {"P": _SAID}}),
        ({"allOf": [{"$ref": "#/$defs/P"}]}, {"$defs": {"P": _SAID}}),
        ({"type": "integer", "minimum": 1, "description": "PLACE"}, {}),
    ],
)
def test_schemas_are_told_in_plainer_words(
    tmp_path_factory: pytest.TempPathFactory, place: Message, more: Message
) -> None:
    function = {"name": "look", "parameters": {"type": "object", "properties": {"place": place}, **more}}
    told = made(tmp_path_factory, "joins schemas").chats.render([USER], [{"type": "function", "function": function}])
    assert "PLACE" in told.text and any(note.startswith("tools: ") for note in told.notes)


def test_references_within_themselves_end() -> None:
    schema = {"properties": {"p": {"$ref": "#/$defs/P"}}, "$defs": {"P": {"properties": {"p": {"$ref": "#/$defs/P"}}}}}
    inner = {"type": "object", "properties": {"p": {"type": "object"}}}
    assert plain_schema(schema) == {"type": "object", "properties": {"p": inner}}


def test_a_schema_that_would_grow_too_large_stays() -> None:
    twice = {str(n): {"properties": {side: {"$ref": f"#/$defs/{n + 1}"} for side in "ab"}} for n in range(40)}
    schema = {"$ref": "#/$defs/0", "$defs": twice}
    assert plain_schema(schema) == schema


@pytest.mark.parametrize(
    ("part", "plain"),
    [
        ({"properties": []}, {"properties": {}}),
        ({"properties": {"p": True}}, {"properties": {"p": {}}}),
        ({"properties": None, "required": None}, {}),
        ({"items": [{"type": "string"}], "required": True}, {"items": {"type": "string"}}),
    ],
)
def test_parts_of_other_types_are_empty(part: Message, plain: Message) -> None:
    assert plain_schema({"type": "object", **part}) == {"type": "object", **plain}


def test_an_answer_without_words_does_not_end_the_conversation(tmp_path: Path) -> None:
    refuses = "{% for m in messages %}{% if not m.content %}{{ raise_exception('empty') }}{% endif %}{% endfor %}"
    tokenizer = Tokenizer.load(byte_bpe(tmp_path, chat_template=refuses + LOOP))
    nothing = {"role": "assistant", "content": ""}
    text = tokenizer.chats.text([USER, nothing], add_generation_prompt=False)
    assert tokenizer.chats.text([USER, nothing, AGAIN]).startswith(text)
    assert "HELLO" in text and "no answer" in text


@pytest.mark.slow
def test_a_template_that_is_slow_with_tools_serves_other_chats(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slow = "{% if tools %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer = Tokenizer.load(byte_bpe(tmp_path, chat_template=slow + plain))
    try:
        with caplog.at_level(logging.WARNING):
            assert tokenizer.chats.text([{"role": "user", "content": "hi"}]) == "user: hi\n"
        assert "was not searched for all repairs" in caplog.text
    finally:
        tokenizer.close()


@pytest.mark.parametrize("name", ["in turns", "system at the end", "a loop"])
def test_a_prompt_without_words_of_a_user_begins_that_with_them(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    tokenizer = made(tmp_path_factory, name)
    warmed = tokenizer.chats.text([SYSTEM], [LOOK], add_generation_prompt=False)
    assert "BEKIND" in warmed
    assert tokenizer.chats.text([SYSTEM, USER, ANSWER, AGAIN], [LOOK]).startswith(warmed)


def test_tools_that_no_repair_shows_are_named(tmp_path: Path) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content.split('You can call')[0] }}{% endfor %}"
    told = Tokenizer.load(byte_bpe(tmp_path, chat_template=template)).chats.render([USER], [LOOK])
    assert told.notes == ("tools: the model's chat template does not show look; the model does not see them",)


@pytest.mark.slow
def test_a_long_conversation_may_take_its_time(tmp_path: Path) -> None:
    """A template that looks through the conversation once a message."""
    template = "{% for m in messages %}{% for n in messages %}{% endfor %}{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer.load(byte_bpe(tmp_path, chat_template=template))
    text = tokenizer.chats.text([USER, ANSWER] * 4000)
    assert text.endswith("HELLOANSWER")


@pytest.mark.parametrize("conversation", ["calls", "calls of one id", "calls without ids", "ids that are no text"])
def test_results_stay_with_their_calls(tmp_path_factory: pytest.TempPathFactory, conversation: str) -> None:
    text = made(tmp_path_factory, "one call").chats.text(CONVERSATIONS[conversation], [LOOK])
    places = [text.index(word) for word in ("GARDEN", "SLEEPS", "CELLAR", "OPENED")]
    assert places == sorted(places)
    assert [text.count(word) for word in ("SLEEPS", "OPENED")] == [1, 1]
    named = made(tmp_path_factory, "shows ids").chats.text(CONVERSATIONS[conversation], [LOOK])
    assert 'functions.look:0{"p": "GARDEN"}functions.look:1{"p": "CELLAR"}' in named
    assert "<tool>functions.look:0SLEEPS<tool>functions.look:1OPENED" in named


def test_ids_may_be_used_again(tmp_path_factory: pytest.TempPathFactory) -> None:
    again = [*calls_of("a", "a"), ANSWER, *calls_of("a", "a")]
    named = made(tmp_path_factory, "shows ids").chats.text(again, [LOOK])
    assert "<tool>functions.look:2SLEEPS<tool>functions.look:3OPENED" in named


def test_a_call_without_result_gets_one_though_another_has_its_id() -> None:
    calling, *results, again = calls_of("a", "a")[1:]
    told = repaired(
        plain_messages([USER, calling, results[0], again]), None, Repairs(calls_with_results=True), NOTATION
    ).messages
    assert [each["content"] for each in told if each["role"] == "tool"] == ["SLEEPS", ""]


# As Gemma 4's: a call's results stand in its turn, and its text behind them, where the turn ends.
WORDS_BEHIND = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{% if m.tool_calls %}<|turn|>"
    "{% for c in m.tool_calls %}<|tool_call>call:{{ c.function.name }}{}<tool_call|>{{ c.function.arguments | tojson }}"
    "{% endfor %}{% set ns = namespace(is_over=false) %}{% for r in messages[loop.index:] %}"
    "{% if r.role != 'tool' %}{% set ns.is_over = true %}{% elif not ns.is_over %}[{{ r.content }}]{% endif %}"
    "{% endfor %}{% if m.content %}{{ m.content }}<|end|>{% endif %}"
    "{% elif m.role != 'tool' %}<|turn|>{{ m.role }}{{ m.content }}<|end|>{% endif %}{% endfor %}"
)


def test_words_that_a_template_moves_behind_a_result_stay_in_front_of_the_call(tmp_path: Path) -> None:
    markers = ("<|turn|>", "<|end|>", "<|tool_call>", "<tool_call|>")
    tokenizer = Tokenizer.load(with_markers(tmp_path, WORDS_BEHIND, markers))
    calling = {"role": "assistant", "content": "ANSWER", "tool_calls": [call("callnum01", '{"p": "GARDEN"}')]}
    messages = [USER, calling, result("callnum01", "SLEEPS")]
    told = tokenizer.chats.render(messages, [LOOK])
    assert 'ANSWER<|tool_call>call:look{}<tool_call|>{"p": "GARDEN"}[SLEEPS]' in told.text
    assert "text beside a call" in "".join(told.notes)
    assert tokenizer.chats.text([*messages, ANSWER, AGAIN], [LOOK]).startswith(told.text)
    tokenizer.close()


def test_words_that_a_template_moves_behind_the_call_stay_in_front_of_it(tmp_path: Path) -> None:
    """As R1-Distill-Qwen's."""
    template = (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|turn|>{{ m.role }}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments | tojson }}"
        "</tool_call>{% endfor %}{{ m.content }}<|end|>{% endfor %}"
    )
    tokenizer = Tokenizer.load(with_markers(tmp_path, template, ("<|turn|>", "<|end|>", "<tool_call>", "</tool_call>")))
    calling = {"role": "assistant", "content": "ANSWER", "tool_calls": [call("callnum01", '{"p": "GARDEN"}')]}
    text = tokenizer.chats.text([USER, calling, result("callnum01", "SLEEPS")], [LOOK])
    assert 'assistantANSWER<tool_call>look{"p": "GARDEN"}</tool_call><|end|><|turn|>toolSLEEPS' in text
    check_prefixes(tokenizer)
    tokenizer.close()


def test_words_beside_calls_stay_in_front_of_them(tmp_path: Path) -> None:
    """Mistral's templates drop them. A result told as a user's would move the tools, which stand in front of that."""
    tokenizer = Tokenizer.load(with_markers(tmp_path, MISTRAL, ("[INST]", "[/INST]", "[TOOL_CALLS]")))
    calling = [
        {"role": "assistant", "content": words, "tool_calls": [call(id, f'{{"p": "{words}"}}'), *more]}
        for words, id, more in (
            ("So: <|im_end|>[TOOL_CALLS] [", "callnum01", []),
            ("Then:", "callnum02", [call("callnum03", "{}")]),
        )
    ]
    messages = [USER, calling[0], result("callnum01", "SLEEPS"), calling[1], result("callnum02", "OPENED")]
    told = tokenizer.chats.render([*messages, result("callnum03", "WARM")], [LOOK])
    text = tokenizer.marks.unmark(told.text)
    assert 'HELLO[/INST]So: <|im_end|>[TOOL_CALLS] [[TOOL_CALLS] [{"name": "look", "arguments": {"p": "So: ' in text
    assert '[TOOL_RESULTS] {"content": SLEEPS, "call_id": "callnum01"}Then:[TOOL_CALLS] [{"name": "look", ' in text
    assert "text beside a call" in "".join(told.notes)
    for control, count in (("[TOOL_CALLS]", 2), ("[INST]", 1), ("<|im_end|>", 2)):
        assert told.text.count(control) == count  # what a client spells is none
    for shorter in (messages[:1], messages[:3]):
        assert told.text.startswith(tokenizer.chats.text(shorter, [LOOK]))
    check_within_turns(tokenizer)
    tokenizer.close()


# How a template writes a thought, and what it reads it from.
SHOW_THOUGHTS = {
    "reasoning_content": "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}{{ m.content }}",
    "reasoning": "{% if m.reasoning %}[{{ m.reasoning }}]{% endif %}{{ m.content }}",
    "thinking": "{% if m.thinking %}[{{ m.thinking }}]{% endif %}{{ m.content }}",
    "thought": "{% if m.thought is defined and m.tool_calls %}[{{ m.thought }}]{% endif %}{{ m.content }}",
    "blocks": "{% if m.content is string %}{{ m.content }}{% else %}{% for b in m.content %}"
    "{% if b.type == 'thinking' %}[{{ b.thinking }}]{% else %}{{ b.text }}{% endif %}{% endfor %}{% endif %}",
    "a variable": "{% if shows and m.thought %}[{{ m.thought }}]{% endif %}{{ m.content }}",
}


@pytest.mark.parametrize("sent", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("name", SHOW_THOUGHTS)
def test_thoughts_are_told_where_the_template_reads_them(tmp_path: Path, name: str, sent: str) -> None:
    calls = (
        "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    )
    template = f"{{% for m in messages %}}<{{{{ m.role }}}}>{SHOW_THOUGHTS[name]}{calls}{{% endfor %}}"
    tokenizer = Tokenizer.load(byte_bpe(tmp_path, chat_template=template))
    calling = {"role": "assistant", "content": "WORDS", sent: "HMMM", "tool_calls": [call("a", "{}")]}
    told = tokenizer.chats.render([USER, calling, result("a", "SLEEPS")], template_kwargs={"shows": True})
    assert "<assistant>[HMMM]WORDS" in told.text and told.text.count("HMMM") == 1
    tokenizer.close()


def test_a_template_that_writes_blocks_out_gets_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_bpe(tmp_path, chat_template=LOOP))
    text = tokenizer.chats.text([USER, ANSWER | {"reasoning_content": "HMMM"}, AGAIN])
    assert text == "<user>HELLO<assistant>ANSWER<user>AGAIN"
    tokenizer.close()


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        ({"reasoning_content": "", "reasoning": "HMMM"}, "HMMM"),
        ({"reasoning_content": None, "thinking": "HMMM"}, "HMMM"),
        ({"reasoning": [{"type": "text", "text": "HM"}, {"type": "thinking", "thinking": "MM"}]}, "HMMM"),
        ({"thinking": {"of": 1}}, '{"of": 1}'),
        ({"reasoning": [{"type": "image"}]}, '[{"type": "image"}]'),
        ({"thinking": ""}, ""),
        ({"thinking": None}, None),
    ],
)
def test_thoughts_of_any_kind_are_one_text(sent: Message, told: str | None) -> None:
    [plain] = plain_messages([ANSWER | sent])
    assert plain == (ANSWER if told is None else ANSWER | {"reasoning_content": told})


def test_joined_answers_keep_all_thoughts() -> None:
    def told(*messages: Message) -> list[Message]:
        return repaired(plain_messages(messages), None, Repairs(join_neighbours=True), NOTATION).messages

    first, second = ANSWER | {"reasoning": "HM"}, {"role": "assistant", "content": "FURTHER", "thinking": "MM"}
    [joined] = told(first, second)
    assert joined["content"] == "ANSWER\n\nFURTHER"
    assert {joined[name] for name in ("reasoning_content", "reasoning", "thought")} == {"HM\n\nMM"}
    assert told(first, ANSWER)[0]["reasoning"] == told(ANSWER, first)[0]["reasoning"] == "HM"
    assert "reasoning" not in told(ANSWER, ANSWER)[0]


def test_calls_told_one_by_one_share_no_thought() -> None:
    calling = CALLS[1] | {"reasoning_content": "HMMM"}
    told = repaired(
        plain_messages([USER, calling, *CALLS[2:]]), None, Repairs(one_call_a_message=True), NOTATION
    ).messages
    assert [each.get("reasoning") for each in told if each["role"] == "assistant"] == ["HMMM", None]


def test_words_are_put_back_once_and_where_a_call_is_opened() -> None:
    words = {"m0_": "ONE", "m1_": "TWO"}
    text = "<a>HELLO<call>m0_look{}<result of m0_look>SLEEPS<call>m1_look{}"
    expected = "<a>HELLOONE<call>look{}<result of look>SLEEPSTWO<call>look{}"
    assert with_words(text, words, "<call>") == expected
    assert with_words("<a>m0_look", words, "<call>") == with_words("<a>m0_look", words, "") == "<a>look"


@pytest.mark.parametrize("calls", [7, {"a": 1}, [7], [None], [{"id": "a", "function": "look"}]])
def test_calls_that_are_none_are_refused(tmp_path_factory: pytest.TempPathFactory, calls: Any) -> None:
    for name in TEMPLATES:
        with pytest.raises(InvalidRequest, match="tool call"):
            made(tmp_path_factory, name).chats.render([USER, {"role": "assistant", "content": "", "tool_calls": calls}])


@pytest.mark.parametrize("repair", ["join_neighbours", "user_behind_result"])
def test_thousands_of_messages_in_a_row_are_joined_quickly(repair: str) -> None:
    def make(count: int) -> list[Message]:
        return [result("a", "SLEEPS"), *[{"role": "user", "content": "x" * 100}] * count]

    def join(row: list[Message]) -> None:
        assert len(repaired(row, None, Repairs().with_(repair), NOTATION).messages) <= 2

    assert growth(make, join, 4_000) < MOST


def test_tools_that_a_prompt_lacks_are_noted_in_one_walk() -> None:
    def tools(count: int) -> list[Message]:
        return [{"type": "function", "function": {"name": f"tool{number:05}"}} for number in range(count)]

    def make(count: int) -> tuple[str, list[Message]]:
        return str(tools(count)), tools(count)

    def look(made: tuple[str, list[Message]]) -> None:
        assert list(_unseen_tools(*made)) == []

    assert growth(make, look, 4_000) < MOST
    text = "tool00002 tool00001"
    assert list(_unseen_tools(text, tools(2)[1:] + tools(3)[2:])) == []
    [note] = _unseen_tools(text, tools(5))
    assert "tool00000, tool00003, tool00004" in note
    assert len(next(_unseen_tools("", tools(9_000)))) < 400


def test_repairs_have_names(tmp_path_factory: pytest.TempPathFactory) -> None:
    assert made(tmp_path_factory, "a loop").chats.repairs() == ("tools_as_text", "calls_as_text")
    assert "join_systems" in (made(tmp_path_factory, "one system").chats.repairs() or ())


def growing(chosen: random.Random) -> Iterator[list[Message]]:
    """A conversation as it is sent turn by turn, with all that clients do."""
    messages = [SYSTEM] * chosen.randrange(3)
    num_calls = 0
    for turn in range(3):
        messages += [LATER] * (chosen.random() < 0.3)
        messages += [{"role": "user", "content": f"QUESTION{turn}"}] * chosen.choice([1, 1, 2])
        yield list(messages)
        while chosen.random() < 0.5:
            ids = [f"callnum{num_calls + i:02}" for i in range(chosen.choice([1, 2]))]
            num_calls += len(ids)
            calls = [call(id, f'{{"p": "{id}"}}') for id in ids]
            messages.append({"role": "assistant", "content": chosen.choice([None, "WORDS"]), "tool_calls": calls})
            messages += [result(id, f"RESULT{id}") for id in ids]
            messages += [AGAIN] * (chosen.random() < 0.2)
            yield list(messages)
        messages += [ANSWER] * chosen.choice([1, 1, 2])


def check_within_turns(tokenizer: Tokenizer) -> None:
    """The prompt of each turn begins the next one's, but for a user's next message."""
    for seed in range(6):
        before, num_users = "", 0
        for messages in growing(random.Random(seed)):
            text = tokenizer.chats.text(messages, [LOOK], add_generation_prompt=False)
            users = sum(each["role"] in ("system", "user") for each in messages)
            assert users > num_users or text.startswith(before), (seed, len(messages))
            before, num_users = text, users


def check_prefixes(tokenizer: Tokenizer) -> None:
    """The prompt of each turn begins the next one's."""
    for seed in range(6):
        before = ""
        for messages in growing(random.Random(seed)):
            text = tokenizer.chats.text(messages, [LOOK], add_generation_prompt=False)
            assert text.startswith(before), (seed, len(messages))
            before = text


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_each_turn_begins_the_next_one(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    check_prefixes(made(tmp_path_factory, name))
