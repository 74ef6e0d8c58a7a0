"""Words that are expected of an answer."""

from __future__ import annotations

import pytest

from agentcache.workflow.script import Turn
from agentcache.workflow.tools import ToolCall
from agentcache.workflow.transcript import Check, check_turn, says


@pytest.mark.parametrize(
    ("answer", "words", "found"),
    [
        ("It is at the Harbour.", "harbour", True),
        ("He will stay\n  silent, he says.", "stay silent", True),
        ("the harbours", "harbour", False),
        ("a mill-house", "mill", True),
        ("windmill", "mill", False),
        ("It cost 10.50!", "10.50", True),
        ("Über die Brücke", "über die", True),
        ("It is at the\tnorth\n pier", "north  pier", True),
        ("(x+y)", "x+y", True),
        ("", "x", False),
    ],
)
def test_whole_words_in_any_case_and_any_white_space(answer: str, words: str, found: bool) -> None:
    assert says(answer, words) is found


def test_each_word_is_a_point() -> None:
    turn = Turn("ann", "Where?", expect=("mill", "tower"))
    assert check_turn(turn, "At the mill.", []) == (Check("mill", True), Check("tower", False))
    assert check_turn(Turn("ann", "Where?"), "At the mill.", []) == ()


def test_a_rejected_word_costs_every_word() -> None:
    turn = Turn("ann", "Where?", expect=("mill",), reject=("tower", "quay"))
    assert check_turn(turn, "At the mill.", []) == (Check("mill", True),)
    assert check_turn(turn, "At the mill or the quay.", []) == (Check("mill", False),)


def test_expected_calls_are_points_of_their_own() -> None:
    wanted = ToolCall("lookup", {"key": "Cedar"})
    turn = Turn("ann", "Where?", expect=("mill",), reject=("quay",), tools=("lookup",), expect_calls=(wanted,))
    point = '{"name": "lookup", "arguments": {"key": "Cedar"}}'
    assert check_turn(turn, "The quay.", [None, wanted]) == (Check("mill", False), Check(point, True))
    assert check_turn(turn, "The mill.", [ToolCall("lookup", {"key": "Swan"})])[1] == Check(point, False)
