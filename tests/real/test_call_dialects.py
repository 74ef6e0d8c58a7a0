"""What published chat templates write for calls and thoughts, the server reads as what it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentcache.text.tokenizer import Tokenizer
from tests.real.call_histories import folders, judge

pytestmark = pytest.mark.slow

# What a template writes otherwise than it was told, or in a way that cannot be read again.
AMBIGUOUS = {
    "LFM2.5-8B-A1B.jinja": {"strings"},  # writes quotes in a quoted string as they are
    "NVIDIA-Nemotron-Nano-v2.jinja": {"text", "two calls", "thought, text, call"},  # writes text and calls as two turns
}
PARTS = 8  # of all templates, one after the other, so that none takes long


@pytest.mark.parametrize("part", range(PARTS))
def test_what_published_templates_write_is_read(part: int, tmp_path: Path) -> None:
    wrong: dict[str, dict[str, str]] = {}
    num_shown = 0
    for name, folder in folders(tmp_path, slice(part, None, PARTS)):
        tokenizer = Tokenizer.load(folder)
        verdict = judge(name, tokenizer)
        tokenizer.close()
        print(verdict.line)
        num_shown += len(verdict.shown)
        left = {reply: how for reply, how in verdict.wrong.items() if reply not in AMBIGUOUS.get(name, ())}
        wrong |= {name: left} if left else {}
    assert num_shown > 30 and wrong == {}
