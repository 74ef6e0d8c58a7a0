"""What published chat templates write for calls and thoughts, the server reads as what it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentcache.models.text.tokenizer import Tokenizer
from tests.real.call_histories import Verdict, folders, judge

pytestmark = pytest.mark.slow

# What a template writes otherwise than it was told, or in a way that cannot be read again.
AMBIGUOUS = {
    "LFM2.5-8B-A1B.jinja": {"strings"},  # writes quotes in a quoted string as they are
    "NVIDIA-Nemotron-Nano-v2.jinja": {"text", "two calls", "thought, text, call"},  # writes text and calls as two turns
}
NOT_READ = {"MiniMax-M3.jinja", "muse-glimmer.jinja", "meetkai-functionary-medium-v3.2.jinja"}


def test_what_every_published_template_writes_is_read(tmp_path: Path) -> None:
    verdicts: list[Verdict] = []
    for name, folder in folders(tmp_path):
        tokenizer = Tokenizer.load(folder)
        verdicts.append(judge(name, tokenizer))
        tokenizer.close()
        print(verdicts[-1].line)
    assert len(verdicts) > 60 and sum(bool(verdict.shown) for verdict in verdicts) > 50
    wrong = {each.template: set(each.wrong) - AMBIGUOUS.get(each.template, set()) for each in verdicts}
    assert {name: replies for name, replies in wrong.items() if replies and name not in NOT_READ} == {}
