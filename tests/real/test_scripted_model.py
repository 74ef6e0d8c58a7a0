"""The scripted model says its scripts through the real server, with published tokenizers and templates."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live.servers import http_of, serving
from tests.real.folders import family_folder
from tests.real.scripted_model import STRIDE, write_scripted_model

pytestmark = pytest.mark.slow

# Longer than a token, in several scripts of Unicode; the last one has what a tokenizer may merge with its neighbours.
SCRIPTS = ("It is 42.", "Fünf Bücher, 日本語, 🙂.", "def f(x):\n    return x  # done\n\n")


# One whole tokenizer of each kind: SentencePiece's letters, and bytes. `test_endings.py` has the others' first merges.
@pytest.mark.parametrize("family", ["gemma3", "deepseek_v3"])
def test_scripts_reach_the_client(family: str, tmp_path: Path) -> None:
    folder = family_folder(tmp_path / "model", family, SCRIPTS)
    with serving(folder, tmp_path / "cache") as server, http_of(server) as http:
        for stride, script in ((3, SCRIPTS[0]), (4, SCRIPTS[1]), (5, SCRIPTS[2])):
            body = {"prompt": [7] * (stride * STRIDE), "max_tokens": 40, "temperature": 0}
            answer = http.post("/v1/completions", json=body).json()
            assert answer["choices"][0]["text"].startswith(script)


def test_a_script_must_fit(tmp_path: Path) -> None:
    for script in ([], [1] * (STRIDE + 1), [9]):
        with pytest.raises(ValueError, match="ids below 9"):
            write_scripted_model(tmp_path, [script], vocab_size=9)
