"""Workflow scripts are read strictly, and every mistake is named with its place."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from agentcache.errors import ConfigError
from agentcache.workflow.script import Script, parse_script, read_script, shipped_scripts, steps_of

GOOD: dict[str, Any] = {
    "workflow": {"name": "talk", "title": "A talk"},
    "agents": [
        {"id": "ann", "name": "Ann", "system": "You are Ann.", "max_tokens": 5},
        {"id": "bob", "name": "Bob"},
        {"id": "cy"},
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
    assert script.phases[1].turns[0].sees == ("ann", "cy")
    assert script.phases[0].turns[0].sees == ()
    assert [(step.phase_number, step.turn_number) for step in steps_of(script)] == [(1, 1), (2, 1)]


def test_title_defaults_to_the_name() -> None:
    assert parse_script(GOOD | {"workflow": {"name": "talk"}}).title == "talk"


def changed(path: str, value: Any) -> dict[str, Any]:
    """GOOD with one entry set; `path` like phases/0/turns/0/speaker."""
    data: Any = copy.deepcopy(GOOD)
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
