"""Lines in front that change with every turn: reported, and told behind the history where that is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ModelFolder
from tests.marks import slow
from tests.reply_formats import TOOLS
from tests.serving.front import open_front
from tests.serving.scripted import scripted
from tests.serving.talk import NAMES, SYSTEM, Talk, answering, calling, num_new_tokens, result


@pytest.fixture(params=NAMES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(family: str, model_folder: ModelFolder) -> Path:
    return model_folder("mistral", family, num_hidden_layers=2)


@pytest.fixture
def stable(model: Path, tmp_path: Path) -> Iterator[Talk]:
    with scripted() as script, open_front(model, tmp_path / "stable", stable_prefix=True) as front:
        yield Talk(front, script)


@pytest.fixture
def plain(model: Path, tmp_path: Path) -> Iterator[Talk]:
    with scripted() as script, open_front(model, tmp_path / "plain") as front:
        yield Talk(front, script)


def line(number: int) -> str:
    return f"The time is now 20:{number:02} on day {number % 3}."


def system_at(number: int) -> dict[str, Any]:
    text = f"Say what is there.\n{line(number)}\n" + SYSTEM["content"]
    return {"role": "system", "content": text}


def num_tokens(talk: Talk, text: str) -> int:
    return len(talk.front.tokenizer.encode(text).ids)


def notice_tokens(talk: Talk, number: int) -> int:
    """Of the line, with the words that say what it is."""
    return num_tokens(talk, f"[Now in the instructions above:\n{line(number)}]\n\n")


@pytest.mark.parametrize(
    ("family", "num_turns"),
    [("deepseek", 4), slow("harmony", 4), slow("qwen3", 4), *(slow(family, 20) for family in NAMES)],
    indirect=["family"],
)
def test_turns_with_tools_compute_what_they_add_and_the_line(stable: Talk, family: str, num_turns: int) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Look around."}]
    new_tokens = 0
    for number in range(num_turns):
        message = stable.chat(calling(family, number), [system_at(number), *messages])
        report = stable.reports[-1]
        assert report["lineage"] == stable.reports[0]["lineage"]
        if number:
            assert report["volatile"] == {"lines": [line(number)], "moved": True}
            assert report["computed_tokens"] <= new_tokens + notice_tokens(stable, number)
            if family != "deepseek":  # whose template leaves out at once what was thought
                assert report["match"] == "EXTEND"
        messages += [message, result(message, number)]
        new_tokens = num_new_tokens(stable, family, messages)


@pytest.mark.parametrize("family", ["qwen3", slow("deepseek"), slow("harmony")], indirect=True)
def test_the_front_stays_and_the_newest_message_says_what_it_is_now(stable: Talk, family: str) -> None:
    messages: list[dict[str, Any]] = []
    for number in (1, 2, 2, 3, 1):
        messages.append({"role": "user", "content": f"Question {len(messages)}: where are you?"})
        messages.append(stable.chat(answering(family, number), [system_at(number), *messages]))
    text = prompt_of(stable, [system_at(1), *messages, {"role": "user", "content": "Well?"}])
    assert [text.count(line(number)) for number in (1, 2, 3)] == [1, 1, 1], "line 1 in front only, where it stays"
    told = [text.index(line(2)), text.index(line(3)), text.index("(as written)")]
    asked = [text.index(f"Question {number}:") for number in (0, 2, 4, 6, 8)]
    assert text.index(line(1)) < asked[0] < told[0] < asked[1] < asked[2] < told[1] < asked[3] < told[2] < asked[4]


def prompt_of(talk: Talk, messages: list[dict[str, Any]]) -> str:
    """What the model is made to read."""
    body = {"messages": messages, "agent": "a", "max_tokens": 1, "agentcache": {"return_token_ids": True}}
    answer = talk.front.post("/v1/chat/completions", body | {"tools": TOOLS}).json()
    return talk.front.tokenizer.spell(answer["choices"][0]["prompt_token_ids"]).text


@pytest.mark.parametrize("family", ["qwen3", slow("deepseek"), slow("harmony")], indirect=True)
def test_without_it_the_prompt_is_the_clients_and_what_changes_is_reported(plain: Talk, family: str) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Look around."}]
    for number in range(3):
        sent = [system_at(number), *messages]
        message = plain.chat(calling(family, number), sent)
        assert plain.reports[-1]["volatile"] == ({"lines": [line(number)], "moved": False} if number else None)
        messages += [message, result(message, number)]
        if number == 1:
            assert prompt_of(plain, sent) == plain.front.tokenizer.chats.text(sent, TOOLS)
