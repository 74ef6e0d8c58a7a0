"""The agents as the engine knows them: what others see of them, and which lineage is given up first."""

from __future__ import annotations

import time
from dataclasses import replace

from agentcache.agents.table import AgentTable
from tests.kv.store_cases import MODEL, make_record, make_transcript


def test_a_view_is_of_the_moment_it_is_asked_for() -> None:
    table = AgentTable(MODEL)
    before = table.view()
    record = make_record("ann", make_transcript(20))
    table.put(record)
    assert (before.find("ann"), table.view().find("ann")) == (None, record)
    table.remove(record)
    assert table.view().find("ann") is None


def test_the_longest_lineage_and_the_one_used_last_stay() -> None:
    table = AgentTable(MODEL)
    main = make_record("ann", make_transcript(600), last_used=1.0)
    short = make_record("ann", make_transcript(30, seed=1), lineage="b", last_used=time.time() - 2)
    newest = replace(make_record("ann", make_transcript(30, seed=2), lineage="c"), last_used=time.time() - 1)
    for record in (main, short, newest):
        table.put(record)
    assert table.surplus("ann", 2) is short
    table.remove(short)
    assert table.surplus("ann", 2) is None and table.surplus("ann", 1) is main
