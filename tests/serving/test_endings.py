"""Where an answer ends and what of it is which, in every dialect of the wire, streamed and not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.conftest import ModelFolder
from tests.serving.front import open_front
from tests.serving.scripted import scripted
from tests.serving.talk import Talk
from tests.serving.wire import Said, say_in
from tests.text.test_replies import in_bytes

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "STOP"}}\n</tool_call>'


@pytest.fixture(scope="module")
def talk(model_folder: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talk]:
    folder = model_folder("mistral", "qwen3", num_hidden_layers=1)
    with scripted() as script, open_front(folder, tmp_path_factory.mktemp("cache")) as front:
        yield Talk(front, script)


def stop_in(dialect: str, *strings: str) -> dict[str, Any]:
    return {"stop_sequences" if dialect == "messages" else "stop": list(strings)}


@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("<think>\n9.8 STOP\n</think>\n\nIt is 4. STOP more", Said("9.8 STOP", "It is 4. ", (), "STOP")),
        ("<think>\nhm STOP\n</think>\n\nIt is 4.", Said("hm STOP", "It is 4.", (), None)),
        ("<think>\nhm ST</think>OP is not one", Said("hm ST", "OP is not one", (), None)),
        (f"Let me see.\n{CALL}", Said("", "Let me see.", (("look", {"at": "STOP"}),), None)),
        ("<think>\n</think>private planning</think>visible", Said("private planning", "visible", (), None)),
    ],
)
def test_stop_strings_count_in_what_is_said(talk: Talk, dialect: str, reply: str, expected: Said) -> None:
    talk.say(reply)
    for streams in (False, True):
        said = say_in(talk.front, dialect, streams=streams, **stop_in(dialect, "STOP"))
        assert said == (expected if dialect == "messages" else replace(expected, stop=None))


@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
def test_a_stop_string_is_looked_for_in_what_is_left_as_text(talk: Talk, dialect: str) -> None:
    talk.say(f"<think>hm</think>Well {CALL}")
    raw: Mapping[str, Any] = {"agentcache": {"parse_tools": False, "parse_reasoning": False}}
    for streams in (False, True):
        said = say_in(talk.front, dialect, streams=streams, **stop_in(dialect, "STOP", "hmm"), **raw)
        assert said.text.endswith('"at": "') and not said.thought


def test_each_choice_ends_by_itself(talk: Talk) -> None:
    talk.say("<think>STOP</think>It is STOP")
    body = {"messages": [{"role": "user", "content": "Hi"}], "stop": "STOP", "n": 3}
    answer = talk.front.post("/v1/chat/completions", body).json()
    for choice in answer["choices"]:
        assert choice["message"] == {"role": "assistant", "content": "It is ", "reasoning_content": "STOP"}
        assert choice["finish_reason"] == "stop"


def test_text_completions_know_no_thoughts(talk: Talk) -> None:
    talk.say("<think>STOP</think>It is")
    body = {"prompt": "Hi", "stop": ["STOP"], "max_tokens": 50}
    assert talk.front.post("/v1/completions", body).json()["choices"][0]["text"] == "<think>"
    chunks = talk.front.events("/v1/completions", body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "<think>"


def test_a_stop_string_that_is_decided_at_the_end_is_named(talk: Talk) -> None:
    """A thought may be closed again until then."""
    talk.say("<think>hm</think>It STOP")
    body = {"messages": [{"role": "user", "content": "Hi"}], "stop_sequences": ["STOP"], "think": True}
    num_tokens = len(talk.front.tokenizer.encode("<think>hm</think>It STOP").ids)
    answer = talk.front.post("/v1/messages", body | {"max_tokens": num_tokens}).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "STOP")
    assert [block.get("text", block.get("thinking")) for block in answer["content"]] == ["hm", "It "]


@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
def test_replies_are_told_apart_at_every_byte(talk: Talk, dialect: str) -> None:
    """Each token is one byte; markers are tokens. The same test with published tokenizers: `tests/real`."""
    tokenizer = talk.front.tokenizer
    call = CALL.replace("STOP", "日 </x> 🙂")
    reply = f"<think>\nhm 日\n</think>\n\nFünf 🙂\n{call}"
    talk.say_ids(in_bytes(tokenizer, tokenizer.encode(reply).ids))
    for streams in (False, True):
        said = say_in(talk.front, dialect, streams=streams, **stop_in(dialect, "never"))
        assert said == Said("hm 日", "Fünf 🙂", (("look", {"at": "日 </x> 🙂"}),))
