"""What tests do to the engine says by its name why it failed."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import pytest

from agentcache.errors import InternalError
from tests.serving import inside
from tests.serving.conversation import greedy, make_ids, open_llm


@pytest.mark.slow
def test_an_engine_that_is_held_for_too_few_messages_says_so(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_llm(model, tmp_path) as llm:
        inside.hold_until(llm, 2, seconds=60.0)
        inside.hold_until(llm, 0)  # the second, or what follows
        assert len(llm.generate(make_ids(9), greedy(1)).token_ids) == 1
    said = r"hold_until: \d of 5 messages came within 0\.3 s"
    with open_llm(model, tmp_path) as llm:
        inside.hold_until(llm, 5, seconds=0.3)
        with suppress(InternalError):  # of a request that came meanwhile
            llm.generate(make_ids(9), greedy(1))
    assert re.search(said, caplog.text)
