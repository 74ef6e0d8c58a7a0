"""Where a template leaves out what the model thought, the conversation has two branches: both are found."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ModelFolder
from tests.serving.front import open_front
from tests.serving.scripted import scripted
from tests.serving.talk import SYSTEM, Talk, answering, calling, result


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "harmony"])
def test_both_branches_are_found(family: str, model_folder: ModelFolder, tmp_path: Path) -> None:
    model = model_folder("mistral", family, num_hidden_layers=2)
    with scripted() as script, open_front(model, tmp_path / "cache") as front:
        talk = Talk(front, script)
        messages: list[dict[str, Any]] = [SYSTEM, {"role": "user", "content": "Look around, everywhere." * 8}]
        for number in range(6):
            message = talk.chat(as_template_writes(calling(family, number)), messages)
            messages += [message, result(message, number)]
        with_thoughts = list(messages)
        for number in (6, 7, 8):
            messages.append(talk.chat(answering(family, number), messages))
            messages.append({"role": "user", "content": f"And {number}?"})
        talk.chat(answering(family, 9), messages)
        # The user takes all that back and has the tools' last result answered anew; then what was taken back.
        talk.chat(answering(family, 10), with_thoughts)
        assert talk.reports[-1]["computed_tokens"] <= 40
        talk.chat(answering(family, 11), messages)
        assert talk.reports[-1]["computed_tokens"] <= 40


def as_template_writes(reply: str) -> str:
    return re.sub(r'\{"at":"(.*?)",  "n"', r'{"at": "\1", "n"', reply)
