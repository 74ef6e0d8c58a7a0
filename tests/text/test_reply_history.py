"""Which replies of a rendered history are told in the words that the model generated, and which are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentcache.blocks.transcript import Kind, Transcript
from agentcache.text.replies.history import ReplyReading, Retold, as_generated, first_thought, said_in, with_thoughts
from agentcache.text.tokenizer import Tokenizer
from tests.reply_formats import FAMILIES, TOOLS
from tests.text.templates import MISTRAL
from tests.tokenizers_factory import with_markers

QUESTION = {"role": "user", "content": "Where?"}
SPACED = '<think>\nI look.\n</think>\n\n<tool_call>\n{"arguments": {"n":1,   "at":"sky"}, "name": "look"}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(FAMILIES["qwen3"].write(tmp_path_factory.mktemp("qwen3")))


def told(tokenizer: Tokenizer, reply: str, opened: str = "") -> Transcript:
    """What a model has read and said; the prompt ends with `opened`."""
    prompt = tokenizer.chats.text([QUESTION], TOOLS) + opened
    asked, said = tokenizer.encode(prompt), tokenizer.encode(reply)
    return (
        Transcript.empty()
        .extended(prompt, asked.ids, asked.ends, "prompt")
        .extended(reply, said.ids, said.ends, "generated")
    )


def message(thought: str | None = "I look.", at: str = "sky", text: str = "") -> dict[str, Any]:
    function = {"name": "look", "arguments": {"at": at, "n": 1}}
    calls = [{"id": "a", "type": "function", "function": function}]
    known = {"role": "assistant", "content": text, "tool_calls": calls}
    return known if thought is None else known | {"reasoning_content": thought}


def history(reply: dict[str, Any], *more: dict[str, Any]) -> list[dict[str, Any]]:
    return [QUESTION, reply, {"role": "tool", "tool_call_id": "a", "content": "blue"}, *more]


@pytest.mark.parametrize(
    ("reply", "more", "is_found", "is_same"),
    [
        (message(), [], True, True),
        (message(thought=None), [], False, True),
        (message(thought="Another thought."), [], False, False),
        (message(at="sea"), [], False, False),
        (message(text="I have said more."), [], False, False),
        (message(), [{"role": "user", "content": "And now?"}], False, True),  # the template leaves out what was thought
    ],
    ids=["same", "no thought", "other thought", "other call", "more text", "thought left out"],
)
def test_only_what_says_the_same_is_told_again(
    tokenizer: Tokenizer, reply: dict[str, Any], more: list[dict[str, Any]], is_found: bool, is_same: bool
) -> None:
    transcript, reading = told(tokenizer, SPACED), ReplyReading(tokenizer, TOOLS)
    text = tokenizer.chats.text(history(reply, *more), TOOLS)
    found = as_generated(text, transcript, reading)
    assert found.text.startswith(transcript.text) == is_found and found.is_same == is_same
    if is_found:
        assert found.text.removeprefix(transcript.text) == text[text.index("<|im_end|>", len(transcript.text) - 80) :]
    else:
        assert found.text == text


@pytest.mark.parametrize("thought", ["I look.\nAgain.", "I look.Again.", "I look.\n\nAgain."])
@pytest.mark.parametrize("text", ["Yes.\nNo.", "Yes.No.", "Yes.\r\n\r\nNo."])
def test_blocks_of_a_reply_may_be_joined_in_any_way(tokenizer: Tokenizer, text: str, thought: str) -> None:
    call = SPACED.partition("</think>\n\n")[2]
    transcript = told(tokenizer, f"<think>\nI look.\n</think>\n\nYes.\n{call}\n<think>\nAgain.\n</think>\n\nNo.")
    found = tokenizer.chats.text(history(message(thought=thought, text=text)), TOOLS)
    assert as_generated(found, transcript, ReplyReading(tokenizer, TOOLS)).text.startswith(transcript.text)


_CALL = SPACED[SPACED.index("<tool_call>") :]
_PLAN = "I will do this and that. " * 30  # longer than what a stream holds back


@pytest.mark.parametrize(
    ("reply", "thought", "text"),
    [
        (f"<think>\nI look.\n</think>\n{_PLAN}\n</think>\n\nSo:\n", f"I look.\n{_PLAN}", "So:"),
        (f"<think>\nI look.\n</think>\n{_PLAN}\n</think>\n\nSo:\n", "I look.", f"{_PLAN}\n\n\nSo:"),
        (f"<think>\n\n</think>\n\n{_PLAN}</think>So:\n", _PLAN, "So:"),
        (f"<think>\n\n</think>\n\n{_PLAN}</think>So:\n", None, f"{_PLAN}So:"),
    ],
    ids=["whole", "streamed", "whole, nothing thought", "streamed, nothing thought"],
)
def test_a_thought_closed_twice_is_told_again_as_the_client_saw_it(
    tokenizer: Tokenizer, reply: str, thought: str | None, text: str
) -> None:
    transcript, reading = told(tokenizer, reply + _CALL), ReplyReading(tokenizer, TOOLS)
    said = history(message(thought=thought, text=text))
    found = as_generated(tokenizer.chats.text(said, TOOLS), transcript, reading)
    assert found.is_same and found.text.startswith(transcript.text)
    if thought is not None:
        [added] = with_thoughts(history(message(thought=None, text=text)), transcript, reading)
        assert added[1]["reasoning_content"] == thought.strip()


@pytest.mark.parametrize(("text", "is_found"), [("Yes.\nNo.", True), ("Yes.No.", False), ("Yes.\n\nNo.", False)])
def test_line_breaks_inside_a_block_count(tokenizer: Tokenizer, text: str, is_found: bool) -> None:
    """A history corrected in them is another one."""
    call = SPACED.partition("</think>\n\n")[2]
    transcript = told(tokenizer, f"<think>\nI look.\n</think>\n\nYes.\r\nNo.\n{call}")
    found = tokenizer.chats.text(history(message(thought="I look.", text=text)), TOOLS)
    retold = as_generated(found, transcript, ReplyReading(tokenizer, TOOLS))
    assert retold.text.startswith(transcript.text) == is_found


@pytest.mark.parametrize(
    ("opened", "reply", "written"),
    [
        ("<think>\n", f"</think>\n\n{_CALL}", ""),
        ("<think>\n", f"\n</think>\n\n{_CALL}", "<think></think>"),
        ("<think>", f"</think>{_CALL}", "</think>"),
        ("<think>\n\n</think>\n\n", _CALL, ""),
        ("<think></think>", _CALL, "</think>"),
        ("<think>\nThe budget is 0.\n</think>\n", _CALL, ""),
    ],
    ids=["opened", "written otherwise", "closed only", "closed in the prompt", "half", "with words"],
)
def test_an_empty_thought_stays_where_the_history_leaves_it_out(
    tokenizer: Tokenizer, opened: str, reply: str, written: str
) -> None:
    """Most templates write an empty thought into the prompt only, or into the history only."""
    transcript, reading = told(tokenizer, reply, opened), ReplyReading(tokenizer, TOOLS)
    text = tokenizer.chats.text(history(message(thought=None)), TOOLS)
    start = len(transcript.text) - len(opened) - len(reply)
    found = as_generated(text[:start] + written + text[start:], transcript, reading)
    assert found.is_same and found.text.startswith(transcript.text)
    assert found.text.removeprefix(transcript.text) == text[text.index("<|im_end|>", start) :]


def test_a_thought_that_the_history_leaves_out_stays_left_out(tokenizer: Tokenizer) -> None:
    transcript, reading = told(tokenizer, f"I look.\n</think>\n\n{_CALL}", "<think>\n"), ReplyReading(tokenizer, TOOLS)
    text = tokenizer.chats.text(history(message(thought=None)), TOOLS)
    assert as_generated(text, transcript, reading) == Retold(text, True)


def test_a_thought_of_an_earlier_turn_opens_no_reply(tokenizer: Tokenizer) -> None:
    text = "<think>\nI look.<|im_end|>\n<|im_start|>assistant\n</think>\n"
    assert ReplyReading(tokenizer, TOOLS).opened_at(text, len(text)) == len(text)


# As Apertus's: calls and their results are one turn, which is opened once.
ONE_TURN = (
    "{% set ns = namespace(is_open=false) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.is_open = false %}<|user_start|>{{ m.content }}<|user_end|>"
    "{% elif m.role == 'assistant' %}"
    "{% if not ns.is_open %}<|assistant_start|>{% set ns.is_open = true %}{% endif %}{{ m.content }}"
    "{% if m.tool_calls %}<|tools_prefix|>[{% for c in m.tool_calls %}"
    "{{ '{\"' + c.function.name + '\": ' + c.function.arguments | tojson + '}' }}{% endfor %}]<|tools_suffix|>"
    "{% endif %}{% else %}[{{ m.content }}]{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant_start|>{% endif %}"
)
# As Solar's: a call's id is shown, and words beside a call are a message of their own.
SHOWS_IDS = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|begin|>tool<|tool_response|>{{ m.tool_call_id + m.content }}"
    "<|end|>{% elif m.tool_calls %}<|begin|>assistant<|tool_calls|>{% for c in m.tool_calls %}"
    "<|tool_call:begin|>{{ c.id }}"
    "<|tool_call:name|>{{ c.function.name }}<|tool_call:args|>{{ c.function.arguments | tojson }}<|tool_call:end|>"
    "{% endfor %}<|calls|>{% else %}<|begin|>{{ m.role }}<|content|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant{% endif %}"
)
_APERTUS = ("<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|tools_prefix|>", "<|tools_suffix|>")
_SOLAR = ("begin", "end", "content", "calls", "tool_calls", "tool_response")
_SOLAR_CALL = ("begin", "name", "args", "end")
# As Gemma 4's: a result follows its call in the same turn.
RESULT_INSIDE = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|tool_response>response:look{{ m.content }}<tool_response|>"
    "{% else %}{% if m.role == 'user' %}<|turn|>user {{ m.content }}<|end|>{% endif %}"
    "{% if m.role == 'user' and (m == messages[-1] or add_generation_prompt) %}<|turn|>model {% endif %}"
    "{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name }}{% raw %}{{% endraw %}"
    """{% for k, v in c.function.arguments.items() %}{{ k }}:{% if v is string %}<|"|>{{ v }}<|"|>{% else %}{{ v }}"""
    "{% endif %}{% if not loop.last %},{% endif %}{% endfor %}}<tool_call|>{% endfor %}{% endif %}{% endfor %}"
)
_GEMMA = ("<|turn|>", "<|end|>", "<|tool_response>", "<tool_response|>", "<|tool_call>", "<tool_call|>", '<|"|>')


@pytest.mark.parametrize(
    ("template", "markers", "reply"),
    [
        (RESULT_INSIDE, _GEMMA, '<|tool_call>call:look{n:1,at:<|"|>sky<|"|>}<tool_call|>'),
        (ONE_TURN, _APERTUS, '<|tools_prefix|>[{"look": {"n":1, "at":"sky"}}]<|tools_suffix|>'),
        (
            SHOWS_IDS,
            (*(f"<|{name}|>" for name in _SOLAR), *(f"<|tool_call:{name}|>" for name in _SOLAR_CALL)),
            "<|tool_calls|><|tool_call:begin|>own<|tool_call:name|>look<|tool_call:args|>"
            '{"n":1, "at":"sky"}<|tool_call:end|>',
        ),
    ],
    ids=["result inside", "one turn", "shows ids"],
)
def test_a_reply_with_calls_ends_where_its_dialect_says(
    tmp_path: Path, template: str, markers: tuple[str, ...], reply: str
) -> None:
    tokenizer = Tokenizer.load(with_markers(tmp_path, template, markers))
    reading, transcript = ReplyReading(tokenizer, TOOLS), Transcript.empty()
    chat: list[dict[str, Any]] = [QUESTION]
    for number in range(3):  # with a result in front of the second and third reply
        chat += history(message(thought=None))[1:] if number else []
        prompt = as_generated(tokenizer.chats.text(chat, TOOLS), transcript, reading).text
        assert prompt.startswith(transcript.text), number
        parts: list[tuple[str, Kind]] = [(prompt.removeprefix(transcript.text), "prompt"), (reply, "generated")]
        for text, kind in parts:
            tokens = tokenizer.encode(text)
            transcript = transcript.extended(text, tokens.ids, tokens.ends, kind)
    tokenizer.close()


_OPENING = "<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "other",
    [
        *("<|im_start|>assistant\n", "<|im_end|>\n", "\n", ""),
        *("<|im_end|><|im_start|>model\n", "<|im_end|>\n<|im_start|>ai name=assistant\n"),
    ],
    ids=["not ended before", "no role", "a line", "nothing", "another role", "MiniMax M1's role"],
)
def test_a_reply_is_told_again_where_the_history_opens_it_otherwise(tokenizer: Tokenizer, other: str) -> None:
    """DeepSeek V3's template writes no role in front of calls, Bielik's does not end a result there."""
    transcript, reading = told(tokenizer, SPACED), ReplyReading(tokenizer, TOOLS)
    text = tokenizer.chats.text(history(message()), TOOLS)
    assert text.count(_OPENING) == 2  # of the reply, and of the next one
    found = as_generated(text.replace(_OPENING, other, 1), transcript, reading)
    assert found.text == as_generated(text, transcript, reading).text and found.is_same


@pytest.mark.parametrize(
    "other", ["<|im_end|>\n<|im_start|>user\n", " Now!" + _OPENING, "<|im_end|>\nSo:", "assistant"]
)
def test_other_words_in_front_of_a_reply_are_another_conversation(tokenizer: Tokenizer, other: str) -> None:
    transcript, reading = told(tokenizer, SPACED), ReplyReading(tokenizer, TOOLS)
    text = tokenizer.chats.text(history(message()), TOOLS).replace(_OPENING, other, 1)
    found = as_generated(text, transcript, reading)
    assert found.text == text and not found.is_same


def test_a_reply_is_told_again_where_the_history_parts_it(tokenizer: Tokenizer) -> None:
    """For templates that show no text beside a call, the text is a message of its own."""
    reply = SPACED.replace("<tool_call>", "So:\n<tool_call>")
    transcript, reading = told(tokenizer, reply), ReplyReading(tokenizer, TOOLS)
    text = tokenizer.chats.text(history(message(text="So:")), TOOLS)
    for opening in (_OPENING, _OPENING.replace("assistant", "ai name=assistant")):  # ChatML's, MiniMax M1's
        parted = text.replace("So:\n<tool_call>", f"So:{opening}<tool_call>")
        assert parted != text
        found = as_generated(parted, transcript, reading)
        assert found.text == as_generated(text, transcript, reading).text and found.is_same
    others = text.replace("So:\n<tool_call>", "So:<|im_end|>\n<|im_start|>user\nYes.<|im_end|>\n<tool_call>")
    assert as_generated(others, transcript, reading) == Retold(others, False)


def test_a_reply_is_told_again_where_the_template_drops_words_beside_its_call(tmp_path: Path) -> None:
    """As Mistral's do, which also show the tools in front of the last user message."""
    tokenizer = Tokenizer.load(with_markers(tmp_path, MISTRAL, ("[INST]", "[/INST]", "[TOOL_CALLS]")))
    reply = 'So:\n[TOOL_CALLS][{"arguments": {"n":1,   "at":"sky"}, "name": "look"}]'
    transcript, reading = told(tokenizer, reply), ReplyReading(tokenizer, TOOLS)
    text = tokenizer.chats.text(history(message(thought=None, text="So:")), TOOLS)
    found = as_generated(text, transcript, reading)
    assert found.is_same and found.text.startswith(transcript.text)
    assert found.text.count("[TOOL_CALLS]") == 1 and "blue" in found.text[len(transcript.text) :]
    tokenizer.close()


# As RWKV's: names in front of turns, no token behind them, and a prompt that opens and closes a thought.
_NAMES = (
    "{% for m in messages %}{{ {'user': 'User: ', 'assistant': 'Assistant: '}[m.role] }}{{ m.content | trim }}\n\n"
    "{% endfor %}Assistant:"
)


@pytest.mark.parametrize(
    ("opened", "reply", "is_found", "is_same"),
    [
        (" <think>\n</think>", "Yes.", True, True),
        ("", " <think>\n</think>\n\nYes.", True, True),
        (" <think>\n</think>", "Yes, indeed.", False, False),
        ("", " <think>Hm.</think>\n\nYes.", False, True),
    ],
    ids=["closed in the prompt", "nothing thought", "other words", "a thought left out"],
)
def test_a_reply_is_told_again_where_no_token_ends_a_turn(
    tmp_path: Path, opened: str, reply: str, is_found: bool, is_same: bool
) -> None:
    tokenizer = Tokenizer.load(with_markers(tmp_path, _NAMES, ("<think>", "</think>")))
    transcript = Transcript.empty()
    texts: list[tuple[str, Kind]] = [(tokenizer.chats.text([QUESTION]) + opened, "prompt"), (reply, "generated")]
    for text, kind in texts:
        encoding = tokenizer.encode(text)
        transcript = transcript.extended(text, encoding.ids, encoding.ends, kind)
    said = {"role": "assistant", "content": "Yes."}
    text = tokenizer.chats.text([QUESTION, said, {"role": "user", "content": "And now?"}])
    found = as_generated(text, transcript, ReplyReading(tokenizer, None))
    assert (found.text.startswith(transcript.text), found.is_same) == (is_found, is_same)
    assert found.text.endswith("Yes.\n\nUser: And now?\n\nAssistant:")
    tokenizer.close()


def test_thoughts_are_put_back_where_the_client_has_none(tokenizer: Tokenizer) -> None:
    transcript, reading = told(tokenizer, SPACED), ReplyReading(tokenizer, TOOLS)
    for text in ("", None):
        without = message(thought=None) | {"content": text}
        told_again = without | {"reasoning_content": "I look."}
        assert with_thoughts(history(without), transcript, reading) == [history(told_again)]
    assert with_thoughts(history(message()), transcript, reading) == []
    assert with_thoughts(history(message(thought=None, at="sea")), transcript, reading) == []


def test_of_two_replies_that_say_the_same_either_may_be_the_one_that_is_held(tokenizer: Tokenizer) -> None:
    transcript, reading = told(tokenizer, SPACED), ReplyReading(tokenizer, TOOLS)
    twice = [*history(message(thought=None)), *history(message(thought=None))]
    assert with_thoughts(twice, transcript, reading) == [
        [*history(message()), *history(message(thought=None))],
        [*history(message(thought=None)), *history(message())],
    ]


def test_a_conversation_that_ends_earlier_is_not_the_same(tokenizer: Tokenizer) -> None:
    transcript, reading = told(tokenizer, SPACED), ReplyReading(tokenizer, TOOLS)
    text = tokenizer.chats.text([QUESTION], TOOLS)
    assert not as_generated(text, transcript, reading).is_same


def test_a_reply_is_read_in_its_prompt(tokenizer: Tokenizer) -> None:
    transcript, reading = told(tokenizer, SPACED), ReplyReading(tokenizer, TOOLS)
    [(begin, end)] = transcript.generated_ranges()
    read = reading.read_at(transcript.text, begin, end)
    assert (read.thought, read.text) == ("I look.", "")
    assert read.calls == (("look", '{"at":"sky","n":1}'),) and said_in(message()) in read.repeated


@pytest.mark.parametrize(
    "arguments",
    ["[" * 2000 + "]" * 2000, '{"a":' * 500 + "1" + "}" * 500, "[" * 100_000, "1" * 5000, "NaN", r'"\ud800"', "{", ""],
    ids=["lists", "objects", "open", "digits", "nan", "surrogate", "cut", "empty"],
)
def test_arguments_that_cannot_be_read_are_another_reply(tokenizer: Tokenizer, arguments: str) -> None:
    transcript, reading = told(tokenizer, SPACED), ReplyReading(tokenizer, TOOLS)
    other = message(thought=None)
    other["tool_calls"][0]["function"]["arguments"] = arguments
    assert with_thoughts(history(other), transcript, reading) == []
    text = tokenizer.chats.text(history(other), TOOLS)
    assert not as_generated(text, transcript, reading).is_same


@pytest.mark.parametrize(
    ("said", "corrected"),
    [
        ("1", "true"),
        ("0", "false"),
        ("1", '"1"'),
        ("0.0", "-0.0"),
        ("[1, 0]", "[1, false]"),
        ('{"x": {"y": 1}}', '{"x": {"y": true}}'),
        ("9007199254740993", "9007199254740993.0"),
        ("9007199254740993", "9007199254740991"),
        ('"caf\\u00e9"', '"cafe\\u0301"'),
        ('"\\u212b"', '"\\u00c5"'),
        ("null", '"null"'),
        ("[]", "{}"),
        ("[1]", "[1, 1]"),
    ],
)
def test_a_corrected_value_is_another_reply(tokenizer: Tokenizer, said: str, corrected: str) -> None:
    assert _is_told_again(tokenizer, said, said)
    assert not _is_told_again(tokenizer, said, corrected)
    assert not _is_told_again(tokenizer, corrected, said)


@pytest.mark.parametrize(
    ("said", "repeated"),
    [
        ("1.0", "1"),
        ("[1e3, 1.50, -0.0, 2e30]", f"[1000, 1.5, 0, {int(2e30)}]"),
        ('{"id": 12345678901234567890}', '{"id": 12345678901234567168}'),
        ("9007199254740993", "9007199254740992"),
    ],
)
def test_numbers_are_repeated_as_javascript_writes_them(tokenizer: Tokenizer, said: str, repeated: str) -> None:
    assert _is_told_again(tokenizer, said, repeated)
    assert not _is_told_again(tokenizer, repeated, said)


@pytest.mark.parametrize(
    ("said", "repeated"),
    [
        ("1.0", "1.00"),
        ("1.0", "1e0"),
        ('"\\u00e9"', '"\u00e9"'),
        ('{"x": 1, "y": 2}', '{ "y":2,"x":1 }'),
        ('{"x": 1, "x": 2}', '{"x": 2}'),  # as templates show it
    ],
)
def test_another_spelling_of_a_value_is_the_same_reply(tokenizer: Tokenizer, said: str, repeated: str) -> None:
    assert _is_told_again(tokenizer, said, repeated)


def _is_told_again(tokenizer: Tokenizer, said: str, repeated: str) -> bool:
    """Whether a reply with the argument `said` is told again to a client that repeats it in this way."""
    call = f'<think>\nhm\n</think>\n\n<tool_call>\n{{"name": "look", "arguments": {{"at":   {said}}}}}\n</tool_call>'
    transcript, reading = told(tokenizer, call), ReplyReading(tokenizer, TOOLS)
    function = {"name": "look", "arguments": f'{{"at": {repeated}}}'}
    reply = {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": function}]}
    found = as_generated(tokenizer.chats.text(history(reply), TOOLS), transcript, reading)
    has_thought = with_thoughts(history(reply), transcript, reading) != []
    assert found.is_same == has_thought
    return has_thought


def test_the_first_thing_that_was_thought_is_found(tokenizer: Tokenizer) -> None:
    """What a template may not show again begins there: with the marker, also where the prompt has written that."""
    form = tokenizer.reply_format
    for reply in (SPACED, "It is blue."):
        transcript = told(tokenizer, reply)
        begin = first_thought(transcript, form)
        assert (begin is None) == (reply != SPACED)
        assert begin is None or transcript.text[transcript.ends[begin - 1] :] == SPACED
    opened, thought = tokenizer.encode("Where?<think>\n"), tokenizer.encode("I look.")
    transcript = (
        Transcript.empty()
        .extended("Where?<think>\n", opened.ids, opened.ends, "prompt")
        .extended("I look.", thought.ids, thought.ends, "generated")
    )
    begin = first_thought(transcript, form)
    assert begin is not None and transcript.text[transcript.ends[begin - 1] :] == "<think>\nI look."
