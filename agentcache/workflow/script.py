"""Workflow scripts: who the agents are, and who speaks when, read strictly from TOML.

    [workflow]                      [[agents]]                    [[phases]]
    name = "interview"              id = "ann"                    name = "opening"
    title = "A job interview"       name = "Ann"      # optional
    max_tokens = 64   # optional    system = "You are Ann."       [[phases.turns]]
    temperature = 0.0 # optional    max_tokens = 40   # optional  speaker = "ann"
                                                                  prompt = "Greet Bob."
                                                                  sees = ["bob"]    # or "all"; nobody when left out
                                                                  max_tokens = 20   # optional

Every mistake is a `ConfigError` that names the place: an unknown key is an error, with the nearest known key as a hint.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentcache.errors import ConfigError

DEFAULT_MAX_TOKENS = 64
SHIPPED = Path(__file__).parent / "scripts"
_AGENT_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True)
class Agent:
    """One speaker. `id` names it in the script, `name` is what the others read before its words."""

    id: str
    name: str
    system: str | None = None
    max_tokens: int | None = None


@dataclass(frozen=True)
class Turn:
    """One agent's turn. `sees` are the ids of those whose words since the agent's last turn reach it now."""

    speaker: str
    prompt: str
    sees: tuple[str, ...] = ()
    max_tokens: int | None = None


@dataclass(frozen=True)
class Phase:
    name: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Script:
    """A whole workflow, valid by construction when it comes from `read_script` or `parse_script`."""

    name: str
    title: str
    agents: tuple[Agent, ...]
    phases: tuple[Phase, ...]
    max_tokens: int = DEFAULT_MAX_TOKENS
    temperature: float = 0.0

    def agent(self, agent_id: str) -> Agent:
        """The agent of that id; KeyError if there is none."""
        for agent in self.agents:
            if agent.id == agent_id:
                return agent
        raise KeyError(agent_id)


@dataclass(frozen=True)
class Step:
    """A turn and its place in the script, counted from 1."""

    phase_number: int
    turn_number: int
    phase: Phase
    turn: Turn

    def __str__(self) -> str:
        return f'phase {self.phase_number} ("{self.phase.name}"), turn {self.turn_number} ({self.turn.speaker})'


def steps_of(script: Script) -> list[Step]:
    """All turns of a script, in order."""
    return [
        Step(phase_number, turn_number, phase, turn)
        for phase_number, phase in enumerate(script.phases, 1)
        for turn_number, turn in enumerate(phase.turns, 1)
    ]


def read_script(path: Path | str) -> Script:
    """Read a script from a file, or by the name of one that is shipped (`prisoners_dilemma`).

    Raises:
        ConfigError: no such file, no valid TOML, or a script that makes no sense; the message begins with the path.
    """
    found = _find(Path(path))
    try:
        return parse_script(tomllib.loads(found.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, ConfigError) as error:
        raise ConfigError(f"{found}: {error}") from error


def shipped_scripts() -> list[str]:
    """Names of the scripts that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def _find(path: Path) -> Path:
    if path.exists():
        return path
    shipped = SHIPPED / f"{path.name}.toml"
    if len(path.parts) == 1 and shipped.exists():
        return shipped
    raise ConfigError(f"{path}: no such script; shipped with agentcache: {', '.join(shipped_scripts())}")


def parse_script(data: Mapping[str, Any]) -> Script:
    """A script from parsed TOML.

    Raises:
        ConfigError: with the place (agent, phase, turn) and what is wrong there.
    """
    top = _read(data, "the script", required={"workflow": dict, "agents": list, "phases": list})
    about = _read(
        top["workflow"],
        "[workflow]",
        required={"name": str},
        optional={"title": str, "max_tokens": int, "temperature": float},
    )
    _check_id(about["name"], '[workflow]: key "name"')
    agents = tuple(_agent(entry, number) for number, entry in enumerate(top["agents"], 1))
    _check_agents(agents)
    phases = tuple(_phase(entry, number, agents) for number, entry in enumerate(top["phases"], 1))
    _check_phases(phases)
    return Script(
        name=about["name"],
        title=about.get("title", about["name"]),
        agents=agents,
        phases=phases,
        max_tokens=_max_tokens(about, "[workflow]") or DEFAULT_MAX_TOKENS,
        temperature=_temperature(about),
    )


def _agent(entry: Any, number: int) -> Agent:
    where = _place("agent", number, entry, "id")
    values = _read(entry, where, required={"id": str}, optional={"name": str, "system": str, "max_tokens": int})
    _check_id(values["id"], f'{where}: key "id"')
    name = values.get("name", values["id"])
    return Agent(values["id"], name, values.get("system", "").strip() or None, _max_tokens(values, where))


def _phase(entry: Any, number: int, agents: Collection[Agent]) -> Phase:
    where = _place("phase", number, entry, "name")
    values = _read(entry, where, required={"name": str, "turns": list})
    if not values["turns"]:
        raise ConfigError(f"{where} has no turns")
    ids = [agent.id for agent in agents]
    turns = (_turn(turn, f"{where}, turn {index}", ids) for index, turn in enumerate(values["turns"], 1))
    return Phase(values["name"], tuple(turns))


def _turn(entry: Any, where: str, ids: list[str]) -> Turn:
    values = _read(
        entry,
        where,
        required={"speaker": str, "prompt": str},
        optional={"sees": (list, str), "max_tokens": int},
    )
    speaker = _known_agent(values["speaker"], ids, f'{where}: key "speaker"')
    if not values["prompt"].strip():
        raise ConfigError(f'{where}: key "prompt" is empty')
    sees = _sees(values.get("sees", []), speaker, ids, f'{where}: key "sees"')
    return Turn(speaker, values["prompt"].strip(), sees, _max_tokens(values, where))


def _sees(value: list[Any] | str, speaker: str, ids: list[str], where: str) -> tuple[str, ...]:
    if value == "all":
        return tuple(agent for agent in ids if agent != speaker)
    if isinstance(value, str):
        raise ConfigError(f'{where} must be a list of agent ids or "all", not "{value}"')
    for agent in value:
        _known_agent(agent, ids, where)
    if speaker in value:
        raise ConfigError(f'{where} names the speaker itself, "{speaker}", which always has its own words')
    _check_unique(value, where)
    return tuple(value)


def _check_agents(agents: tuple[Agent, ...]) -> None:
    if not agents:
        raise ConfigError("the script has no agents")
    # The server's folders fold case on some systems, so ids must differ by more than case.
    _check_unique([agent.id.lower() for agent in agents], "the agents' ids (upper and lower case count as the same)")
    _check_unique([agent.name for agent in agents], "the agents' names")


def _check_phases(phases: tuple[Phase, ...]) -> None:
    if not phases:
        raise ConfigError("the script has no phases")
    _check_unique([phase.name for phase in phases], "the phases' names")


def _check_unique(values: Iterable[str], where: str) -> None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise ConfigError(f'{where}: "{value}" is there twice')
        seen.add(value)


def _check_id(value: str, where: str) -> None:
    if not _AGENT_ID.fullmatch(value) or value in (".", ".."):
        raise ConfigError(f'{where} is "{value}"; allowed are 1 to 64 of A-Z a-z 0-9 . _ -')


def _known_agent(value: Any, ids: list[str], where: str) -> str:
    if value not in ids:
        raise ConfigError(f'{where} names the unknown agent "{value}"{_hint(value, ids)}; agents are {", ".join(ids)}')
    return str(value)


def _max_tokens(values: Mapping[str, Any], where: str) -> int | None:
    value: int | None = values.get("max_tokens")
    if value is not None and value < 1:
        raise ConfigError(f'{where}: key "max_tokens" is {value}; it must be 1 or more')
    return value


def _temperature(values: Mapping[str, Any]) -> float:
    value = float(values.get("temperature", 0.0))
    if not 0 <= value <= 2:
        raise ConfigError(f'[workflow]: key "temperature" is {value}; it must lie between 0 and 2')
    return value


Kind = type | tuple[type, ...]


def _read(
    table: Any, where: str, *, required: Mapping[str, Kind], optional: Mapping[str, Kind] | None = None
) -> dict[str, Any]:
    """`table` as a dict once its keys are known, complete and of the right types."""
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table, not {_type_name(type(table))}")
    kinds = {**required, **(optional or {})}
    for key, value in table.items():
        if key not in kinds:
            raise ConfigError(f'{where}: unknown key "{key}"{_hint(key, kinds)}')
        _check_kind(value, kinds[key], f'{where}: key "{key}"')
    for key in required:
        if key not in table:
            raise ConfigError(f'{where}: key "{key}" is missing')
    return table


def _check_kind(value: Any, kind: Kind, where: str) -> None:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    accepted = (*kinds, int) if float in kinds else kinds
    if isinstance(value, bool) or not isinstance(value, accepted):
        wanted = " or ".join(_type_name(each) for each in kinds)
        raise ConfigError(f"{where} must be {wanted}, not {_type_name(type(value))}")


def _type_name(kind: type) -> str:
    names = {str: "a string", int: "a whole number", float: "a number", list: "a list", dict: "a table"}
    return names.get(kind, kind.__name__)


def _hint(word: Any, known: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    return f' (did you mean "{nearest[0]}"?)' if nearest else ""


def _place(what: str, number: int, entry: Any, key: str) -> str:
    label = entry.get(key) if isinstance(entry, dict) else None
    return f'{what} {number} ("{label}")' if isinstance(label, str) else f"{what} {number}"
