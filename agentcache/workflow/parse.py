"""Reads workflow scripts strictly from TOML.

`scripts/` shows all but agents' `max_tokens` and `adapter`, turns' `max_tokens` and `sees = "all"`, tools' `key`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentcache.errors import ConfigError
from agentcache.workflow.reader import (
    Kind,
    check_id,
    check_known,
    check_unique,
    place_of,
    read_count,
    read_strings,
    read_table,
    read_words,
)
from agentcache.workflow.script import (
    DEFAULT_MAX_CALLS,
    DEFAULT_MAX_TOKENS,
    DEFAULT_SEED,
    Agent,
    Phase,
    Script,
    Turn,
    steps_of,
)
from agentcache.workflow.tools import LookupTable, ToolCall
from agentcache.workflow.values import Filler, read_values

SHIPPED = Path(__file__).parent / "scripts"
_TURN_OPTIONS: dict[str, Kind] = {
    "sees": (list, str),
    "max_tokens": int,
    "expect": list,
    "reject": list,
    "tools": list,
    "max_calls": int,
    "expect_call": (dict, list),
}


def read_script(path: Path | str, seed: int | None = None) -> Script:
    """Read a script from a file, or a shipped one by name; `seed` overrides its. Raises ConfigError with the path."""
    found = _find(Path(path))
    try:
        return parse_script(tomllib.loads(found.read_text(encoding="utf-8")), seed)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, ConfigError) as error:
        raise ConfigError(f"{found}: {error}") from error


def shipped_scripts() -> list[str]:
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def _find(path: Path) -> Path:
    if path.is_file():
        return path
    shipped = SHIPPED / f"{path.name}.toml"
    if len(path.parts) == 1 and shipped.exists():
        return shipped
    raise ConfigError(f"{path}: no such script; shipped with agentcache: {', '.join(shipped_scripts())}")


@dataclass(frozen=True)
class _Known:
    filler: Filler
    agents: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()

    def text(self, values: Mapping[str, Any], key: str, where: str) -> str:
        return self.filler.fill(values.get(key, ""), f'{where}: key "{key}"').strip()

    def words(self, values: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
        at = f'{where}: key "{key}"'
        return tuple(self.filler.fill(word, at) for word in read_words(values.get(key, []), at))


def parse_script(data: Mapping[str, Any], seed: int | None = None) -> Script:
    """Build a script from parsed TOML. Raises ConfigError with the place."""
    top = read_table(
        data,
        "the script",
        required={"workflow": dict, "agents": list, "phases": list},
        optional={"draw": dict, "when": list, "tools": list},
    )
    about = _read_about(top["workflow"])
    seed = about.get("seed", DEFAULT_SEED) if seed is None else seed
    known = _Known(read_values(top.get("draw", {}), top.get("when", []), seed))
    agents = tuple(_agent(entry, number, known) for number, entry in enumerate(top["agents"], 1))
    _check_agents(agents)
    tools = tuple(_tool(entry, number, known) for number, entry in enumerate(top.get("tools", []), 1))
    check_unique([tool.name for tool in tools], "the tools' names")
    known = replace(known, agents=tuple(agent.id for agent in agents), tools=tuple(tool.name for tool in tools))
    script = Script(
        name=about["name"],
        title=known.text(about, "title", "[workflow]") or about["name"],
        agents=agents,
        phases=tuple(_phase(entry, number, known) for number, entry in enumerate(top["phases"], 1)),
        max_tokens=read_count(about, "max_tokens", "[workflow]") or DEFAULT_MAX_TOKENS,
        temperature=_temperature(about),
        tools=tools,
        seed=known.filler.seed,
        values=known.filler.values,
    )
    _check_whole(script, known)
    return script


def _read_about(entry: Any) -> dict[str, Any]:
    optional = {"title": str, "max_tokens": int, "temperature": float, "seed": int}
    about = read_table(entry, "[workflow]", required={"name": str}, optional=optional)
    check_id(about["name"], '[workflow]: key "name"')
    return about


def _temperature(about: Mapping[str, Any]) -> float:
    value = float(about.get("temperature", 0.0))
    if not 0 <= value <= 2:
        raise ConfigError(f'[workflow]: key "temperature" is {value}; it must lie between 0 and 2')
    return value


def _agent(entry: Any, number: int, known: _Known) -> Agent:
    where = place_of("agent", number, entry, "id")
    optional: dict[str, Kind] = {"name": str, "system": str, "max_tokens": int, "adapter": str}
    values = read_table(entry, where, required={"id": str}, optional=optional)
    check_id(values["id"], f'{where}: key "id"')
    system = known.text(values, "system", where) or None
    max_tokens = read_count(values, "max_tokens", where)
    return Agent(values["id"], values.get("name", values["id"]), system, max_tokens, values.get("adapter"))


def _tool(entry: Any, number: int, known: _Known) -> LookupTable:
    where = place_of("tool", number, entry, "name")
    values = read_table(
        entry, where, required={"name": str, "description": str, "entries": dict}, optional={"key": str}
    )
    check_id(values["name"], f'{where}: key "name"')
    at = f'{where}: key "entries"'
    filled = [
        (known.filler.fill(key, at), known.filler.fill(value, at))
        for key, value in read_strings(values["entries"], at).items()
    ]
    check_unique([key for key, _ in filled], at)
    return LookupTable(values["name"], known.text(values, "description", where), dict(filled), values.get("key", "key"))


def _phase(entry: Any, number: int, known: _Known) -> Phase:
    where = place_of("phase", number, entry, "name")
    values = read_table(entry, where, required={"name": str, "turns": list})
    if not values["turns"]:
        raise ConfigError(f"{where} has no turns")
    turns = (_turn(turn, f"{where}, turn {index}", known) for index, turn in enumerate(values["turns"], 1))
    return Phase(values["name"], tuple(turns))


def _turn(entry: Any, where: str, known: _Known) -> Turn:
    values = read_table(entry, where, required={"speaker": str, "prompt": str}, optional=_TURN_OPTIONS)
    turn = Turn(
        speaker=check_known(values["speaker"], known.agents, "agent", f'{where}: key "speaker"'),
        prompt=known.text(values, "prompt", where),
        sees=_sees(values.get("sees", []), values["speaker"], known, f'{where}: key "sees"'),
        max_tokens=read_count(values, "max_tokens", where),
        expect=known.words(values, "expect", where),
        reject=known.words(values, "reject", where),
        tools=_tool_names(values, known, f'{where}: key "tools"'),
        max_calls=read_count(values, "max_calls", where) or DEFAULT_MAX_CALLS,
        expect_calls=_expected_calls(values.get("expect_call", []), known, f'{where}: key "expect_call"'),
    )
    _check_turn(turn, values, where)
    return turn


def _check_turn(turn: Turn, values: Mapping[str, Any], where: str) -> None:
    if not turn.prompt:
        raise ConfigError(f'{where}: key "prompt" is empty')
    if turn.reject and not turn.expect:
        raise ConfigError(f'{where}: key "reject" needs "expect": what a turn is scored by is what it should say')
    for key in ("max_calls", "expect_call"):
        if key in values and not turn.tools:
            raise ConfigError(f'{where}: key "{key}" needs "tools", which the turn does not have')
    for call in turn.expect_calls:
        check_known(call.name, turn.tools, "tool", f'{where}: key "expect_call"')


def _sees(value: list[Any] | str, speaker: str, known: _Known, where: str) -> tuple[str, ...]:
    if value == "all":
        return tuple(agent for agent in known.agents if agent != speaker)
    if isinstance(value, str):
        raise ConfigError(f'{where} must be a list of agent ids or "all", not "{value}"')
    for agent in value:
        check_known(agent, known.agents, "agent", where)
    if speaker in value:
        raise ConfigError(f'{where} names the speaker itself, "{speaker}", which always has its own words')
    check_unique(value, where)
    return tuple(value)


def _tool_names(values: Mapping[str, Any], known: _Known, where: str) -> tuple[str, ...]:
    names = read_words(values.get("tools", []), where)
    return tuple(check_known(name, known.tools, "tool", where) for name in names)


def _expected_calls(value: Any, known: _Known, where: str) -> tuple[ToolCall, ...]:
    return tuple(_expected_call(entry, known, where) for entry in ([value] if isinstance(value, dict) else value))


def _expected_call(entry: Any, known: _Known, where: str) -> ToolCall:
    values = read_table(entry, where, required={"name": str, "arguments": dict})
    arguments = read_strings(values["arguments"], f"{where}: arguments")
    return ToolCall(values["name"], {key: known.filler.fill(text, where) for key, text in arguments.items()})


def _check_agents(agents: tuple[Agent, ...]) -> None:
    if not agents:
        raise ConfigError("the script has no agents")
    # File systems may ignore case.
    check_unique([agent.id.lower() for agent in agents], "the agents' ids (upper and lower case count as the same)")
    check_unique([agent.name for agent in agents], "the agents' names")


def _check_whole(script: Script, known: _Known) -> None:
    if not script.phases:
        raise ConfigError("the script has no phases")
    check_unique([phase.name for phase in script.phases], "the phases' names")
    known.filler.check_all_used()
    called = {tool for step in steps_of(script) for tool in step.turn.tools}
    for tool in script.tools:
        if tool.name not in called:
            raise ConfigError(f'no turn may call the tool "{tool.name}"; name it in a turn\'s "tools"')
