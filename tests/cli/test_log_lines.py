from __future__ import annotations

import logging
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.cli.log_lines import MOST_CHARACTERS, LineFormatter

FORGED = "x\n2026-01-01 00:00:00 ERROR agentcache: all agents deleted"


def written(message: str, error: BaseException | None = None) -> str:
    information = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord("agentcache.server", logging.INFO, "", 0, "%s", (message,), information)
    return LineFormatter("%(levelname)s %(name)s: %(message)s").format(record)


@given(st.text())
def test_a_message_is_one_line(text: str) -> None:
    line = written(text)
    assert len(line.splitlines()) == 1 and line.isprintable()


@pytest.mark.parametrize("text", ["plain é 🙂", "a b"])
def test_ordinary_text_is_as_it_was(text: str) -> None:
    assert written(text) == f"INFO agentcache.server: {text}"


def test_megabytes_are_cut() -> None:
    assert len(written("x" * (8 << 20))) < 2 * MOST_CHARACTERS


def test_a_traceback_is_indented_and_ends_with_what_failed() -> None:
    try:
        raise ValueError(FORGED + "y" * 100_000)
    except ValueError:
        lines = written("failed", sys.exc_info()[1]).split("\n")
    assert lines[0] == "INFO agentcache.server: failed" and lines[-1].endswith("yyy")
    assert all(line.startswith("  ") for line in lines[1:])
    assert sum(map(len, lines)) < 20_000
