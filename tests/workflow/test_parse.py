"""Workflow scripts are read strictly, and every mistake is named with its place."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from agentcache.errors import ConfigError
from agentcache.workflow.parse import parse_script, read_script, shipped_scripts
from agentcache.workflow.script import Script, steps_of
from agentcache.workflow.tools import LookupTable, ToolCall

GOOD: dict[str, Any] = {
    "workflow": {"name": "talk", "title": "A talk"},
    "agents": [
        {"id": "ann", "name": "Ann", "system": "You are Ann.", "max_tokens": 5},
        {"id": "bob", "name": "Bob"},
        {"id": "cy", "adapter": "poet"},
    ],
    "phases": [
        {"name": "one", "turns": [{"speaker": "ann", "prompt": "Greet."}]},
        {"name": "two", "turns": [{"speaker": "bob", "prompt": "Answer.", "sees": "all", "max_tokens": 7}]},
    ],
}


def test_a_good_script() -> None:
    script = parse_script(GOOD)
    assert (script.name, script.title, script.temperature) == ("talk", "A talk", 0.0)
    assert [agent.name for agent in script.agents] == ["Ann", "Bob", "cy"]
    assert script.agent("ann").max_tokens == 5
    assert [agent.adapter for agent in script.agents] == [None, None, "poet"]
    assert script.phases[1].turns[0].sees == ("ann", "cy")
    assert script.phases[0].turns[0].sees == ()
    assert [(step.phase_number, step.turn_number) for step in steps_of(script)] == [(1, 1), (2, 1)]


def test_title_defaults_to_the_name() -> None:
    assert parse_script(GOOD | {"workflow": {"name": "talk"}}).title == "talk"


def changed(path: str, value: Any, script: dict[str, Any] = GOOD) -> dict[str, Any]:
    """A script with one entry set; `path` like phases/0/turns/0/speaker."""
    data: Any = copy.deepcopy(script)
    *way, last = path.split("/")
    place = data
    for key in way:
        place = place[int(key)] if isinstance(place, list) else place[key]
    place[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("phasess", [], 'the script: unknown key "phasess" (did you mean "phases"?)'),
        ("workflow/titel", "x", '[workflow]: unknown key "titel" (did you mean "title"?)'),
        ("workflow/name", "a b", '[workflow]: key "name" is "a b"; allowed are'),
        ("workflow/temperature", -1, 'key "temperature" is -1.0; it must lie between 0 and 2'),
        ("workflow/max_tokens", 0, '[workflow]: key "max_tokens" is 0; it must be 1 or more'),
        ("agents", [], "the script has no agents"),
        ("agents/1/id", "ANN", 'the agents\' ids (upper and lower case count as the same): "ann" is there twice'),
        ("agents/1/name", "Ann", 'the agents\' names: "Ann" is there twice'),
        ("agents/1/id", "../bob", 'agent 2 ("../bob"): key "id" is "../bob"; allowed are'),
        ("agents/0/sistem", "x", 'agent 1 ("ann"): unknown key "sistem" (did you mean "system"?)'),
        ("agents/0/max_tokens", True, 'agent 1 ("ann"): key "max_tokens" must be a whole number, not'),
        ("agents/0", "ann", "must be a list"),
        ("phases", [], "the script has no phases"),
        ("phases/0/turns", [], 'phase 1 ("one") has no turns'),
        ("phases/1/name", "one", 'the phases\' names: "one" is there twice'),
        (
            "phases/0/turns/0/speaker",
            "anne",
            'turn 1: key "speaker" names the unknown agent "anne" (did you mean "ann"?)',
        ),
        ("phases/0/turns/0/prompt", "  ", 'phase 1 ("one"), turn 1: key "prompt" is empty'),
        ("phases/0/turns/0/promt", "x", 'phase 1 ("one"), turn 1: unknown key "promt" (did you mean "prompt"?)'),
        ("phases/0/turns/0/sees", ["dora"], 'key "sees" names the unknown agent "dora"'),
        ("phases/0/turns/0/sees", [["bob"]], 'key "sees" names the unknown agent'),
        ("phases/0/turns/0/sees", "bob", 'key "sees" must be a list of agent ids or "all", not "bob"'),
        ("phases/0/turns/0/sees", ["ann"], 'names the speaker itself, "ann"'),
        ("phases/0/turns/0/sees", ["bob", "bob"], '"bob" is there twice'),
        ("phases/0/turns/0/sees", 3, 'key "sees" must be a list or a string, not a whole number'),
    ],
)
def test_mistakes_are_named_with_their_place(path: str, value: Any, message: str) -> None:
    data = changed(path, value) if path != "agents/0" else changed("agents", "ann")
    with pytest.raises(ConfigError) as caught:
        parse_script(data)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("path", "key"),
    [("workflow", "name"), ("agents/0", "id"), ("phases/0/turns/0", "speaker"), ("phases/0/turns/0", "prompt")],
)
def test_missing_keys(path: str, key: str) -> None:
    data: Any = copy.deepcopy(GOOD)
    place = data
    for part in path.split("/"):
        place = place[int(part)] if isinstance(place, list) else place[part]
    del place[key]
    with pytest.raises(ConfigError, match=f'key "{key}" is missing'):
        parse_script(data)


def test_a_file_with_a_mistake_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("[workflow\n")
    with pytest.raises(ConfigError, match="broken.toml"):
        read_script(path)


def test_a_missing_file_lists_what_is_shipped(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="prisoners_dilemma"):
        read_script(tmp_path / "nothing.toml")


FACTS: dict[str, Any] = {
    "workflow": {"name": "hunt", "title": "Who was at the {place}?", "seed": 3},
    "draw": {"places": {"from": ["mill", "tower", "quay", "north pier"], "as": ["place", "other"]}},
    "when": [{"then": {"rumour": "the {place}, not the {other}"}}],
    "tools": [
        {"name": "lookup", "description": "Near the {place}.", "key": "where", "entries": {"{place}": "{other} {{1}}"}}
    ],
    "agents": [{"id": "ann", "system": "You sit at the {place}."}, {"id": "bob"}],
    "phases": [
        {
            "name": "one",
            "turns": [
                {
                    "speaker": "ann",
                    "prompt": "They say {rumour}.",
                    "expect": ["{place}", "yes"],
                    "reject": ["{other}"],
                    "tools": ["lookup"],
                    "max_calls": 4,
                    "expect_call": {"name": "lookup", "arguments": {"where": "{place}"}},
                },
                {"speaker": "bob", "prompt": "Go."},
            ],
        }
    ],
}


def test_values_are_filled_into_every_text() -> None:
    script = parse_script(FACTS)
    place, other = script.values["place"], script.values["other"]
    turn = script.phases[0].turns[0]
    assert (script.seed, script.title) == (3, f"Who was at the {place}?")
    assert script.agent("ann").system == f"You sit at the {place}."
    assert turn.prompt == f"They say the {place}, not the {other}."
    assert (turn.expect, turn.reject, turn.max_calls) == ((place, "yes"), (other,), 4)
    assert turn.expect_calls == (ToolCall("lookup", {"where": place}),)
    assert script.tools == (LookupTable("lookup", f"Near the {place}.", {place: f"{other} {{1}}"}, key="where"),)


def test_another_seed_draws_other_facts_and_the_same_seed_the_same() -> None:
    assert parse_script(FACTS) == parse_script(FACTS, 3)
    drawn = {parse_script(FACTS, seed).values["place"] for seed in range(20)}
    assert drawn == {"mill", "tower", "quay", "north pier"}


def test_an_agent_is_told_of_the_tools_of_all_its_turns() -> None:
    script = parse_script(FACTS)
    assert script.tools_of("ann") == script.tools
    assert script.tools_of("bob") == ()


def with_facts(path: str, value: Any) -> dict[str, Any]:
    return changed(path, value, FACTS)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("workflow/seed", "x", '[workflow]: key "seed" must be a whole number'),
        ("workflow/title", "{plaice}", 'key "title" asks for {plaice}, an unknown value (did you mean "place"?)'),
        ("phases/0/turns/1/prompt", "{ }", 'turn 2: key "prompt" asks for { }, an unknown value'),
        ("phases/0/turns/1/prompt", "a } b", 'holds a lone "}"; write }} for a brace'),
        ("phases/0/turns/0/expect", ["{x}"], 'turn 1: key "expect" asks for {x}'),
        ("phases/0/turns/0/expect", ["a", " "], 'turn 1: key "expect" holds an empty string'),
        ("phases/0/turns/0/expect", [1], 'key "expect": each of the list must be a string'),
        ("phases/0/turns/0/expect", [], 'key "reject" needs "expect"'),
        ("phases/0/turns/0/tools", ["lockup"], 'unknown tool "lockup" (did you mean "lookup"?); tools are lookup'),
        ("phases/0/turns/0/tools", [], 'key "max_calls" needs "tools"'),
        ("phases/0/turns/0/max_calls", 0, 'key "max_calls" is 0; it must be 1 or more'),
        ("phases/0/turns/0/expect_call/name", "x", 'key "expect_call" names the unknown tool "x"'),
        ("phases/0/turns/0/expect_call/arguments/where", 3, 'arguments: key "where" must be a string'),
        ("phases/0/turns/1/expect_call", [], 'turn 2: key "expect_call" needs "tools"'),
        ("tools/0/entries", {"{place}": "{other} {x}"}, 'tool 1 ("lookup"): key "entries" asks for {x}'),
        ("tools/0/name", "a b", 'tool 1 ("a b"): key "name" is "a b"; allowed are'),
        ("draw/places/as", ["place", "other", "more"], 'the value "more" is used nowhere'),
    ],
)
def test_mistakes_with_facts_are_named_with_their_place(path: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_script(with_facts(path, value))
    assert message in str(caught.value)


def test_a_tool_that_no_turn_may_call_is_a_mistake() -> None:
    data = copy.deepcopy(FACTS)
    data["tools"].append({"name": "spare", "description": "Idle.", "entries": {}})
    with pytest.raises(ConfigError, match='no turn may call the tool "spare"'):
        parse_script(data)


def test_a_value_that_this_seed_does_not_set_says_so() -> None:
    data = with_facts("when", [{"if": {"place": "nowhere"}, "then": {"rumour": "x"}}])
    with pytest.raises(ConfigError, match="has no value with seed 3"):
        parse_script(data)


@pytest.fixture(scope="module")
def dilemma() -> Script:
    return read_script("prisoners_dilemma")


def test_shipped_scripts_are_valid() -> None:
    assert "prisoners_dilemma" in shipped_scripts()
    for name in shipped_scripts():
        assert steps_of(read_script(name))


def test_the_dilemma_has_five_phases_and_three_agents_that_all_speak_often(dilemma: Script) -> None:
    assert len(dilemma.phases) == 5
    assert len(dilemma.agents) == 3
    speakers = [step.turn.speaker for step in steps_of(dilemma)]
    assert all(speakers.count(agent.id) >= 2 for agent in dilemma.agents)


def test_the_dilemma_has_each_agent_once_in_each_of_the_last_two_phases(dilemma: Script) -> None:
    """So that every turn after a restart between phases is that agent's first."""
    for phase in dilemma.phases[3:]:
        assert sorted(turn.speaker for turn in phase.turns) == ["alice", "bob", "warden"]
