"""Size of the source and reach of a turn against ceilings: tests/budgets/ceilings.json; `python -m tests.budgets`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.budgets import source
from tests.budgets.ceilings import ADVICE, over, read, traced

if TYPE_CHECKING:
    from tests.budgets.trace import Entered


def test_source_is_within_its_ceilings() -> None:
    grown = over(source.measure(), read())
    assert not grown, "\n".join([*grown, ADVICE])


def test_a_traced_turn_is_within_its_ceilings(tmp_path: Path, without_kernels: None) -> None:
    from tests.budgets import trace  # imports mlx; the static part stays quick without it

    check(trace.measure_turn(tmp_path))


@pytest.mark.slow
def test_a_traced_restart_and_a_residual_turn_are_within_their_ceilings(tmp_path: Path, without_kernels: None) -> None:
    from tests.budgets import trace  # imports mlx; the static part stays quick without it

    trace.measure_turn(tmp_path)
    check(trace.measure_others(tmp_path))


def check(entered: Mapping[str, Entered]) -> None:
    grown = over(traced(entered), read())
    assert not grown, "\n".join([*grown, ADVICE])
    # The tracer sees the event loop's thread, the engine's, the prompt workers' and the writer's.
    assert all(each.modules > 100 for each in entered.values())


MODULE = '''"""First words.

Nobody goes on from here."""

# A comment of five words.
TEXT = """
# code

more code
"""


class Thing:
    """Three more words."""

    def _once(self):
        return "#" + TEXT  # behind code

    def run(self):
        return self._once()
'''


def test_lines_words_and_helpers_of_a_module() -> None:
    module = source.Module("server/thing.py", MODULE)
    assert module.wing == "server"
    assert module.code_lines == 9
    assert module.classes == {"Thing": 2}
    assert module.functions == ["_once", "run"]
    assert source.single_callers([module]) == (100.0, 50.0)
    assert source.Prose.of(module.prose) == source.Prose(words=17, idioms=2)


@pytest.mark.parametrize(
    ("path", "wing"),
    [
        ("agentcache/llm.py", "agentcache"),
        ("agentcache/models/runner.py", "models"),
        ("agentcache/text/replies/calls.py", "text"),
        ("agentcache/training/decoder.py", "training"),
        ("training/roles.py", "tools/training"),
    ],
)
def test_wing_of_a_file(path: str, wing: str) -> None:
    assert source.Module(path, "").wing == wing


def test_a_number_that_grew_is_named_with_its_amount() -> None:
    assert over({"files": 3, "words": 2, "new": 1}, {"files": 1, "words": 2}) == [
        "files: 3 is 2 above its ceiling of 1",
        "new: 1 has no ceiling",
    ]
