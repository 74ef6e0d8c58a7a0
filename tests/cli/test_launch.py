"""Coding agents' settings: what is put in, what stays, and how all of it is taken back."""

from __future__ import annotations

import errno
import json
import os
import shlex
import stat
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.responses import Response

from agentcache.api.names import is_name
from agentcache.cli import client_settings
from agentcache.cli import launch as launch_module
from agentcache.cli.client_settings import UnreadableSettings, Value, put_in, take_out, write
from agentcache.cli.coding_agents import PROGRAMS, SMALL_CONTEXT, CodingAgent, Served, folder_session
from tests.cli.conftest import Invoke
from tests.cli.test_doctor_server import serving
from tests.examples import examples

URL = "http://127.0.0.1:8000"
SERVED = Served(URL, "tiny-model", 4096, has_key=False, session="x-project-01234567")
KEYED = replace(SERVED, has_key=True)
HERE = {agent: folder_session(agent, Path.cwd()) for agent in CodingAgent}
FILES = {
    CodingAgent.CLAUDE: ".claude/settings.json",
    CodingAgent.CODEX: ".codex/config.toml",
    CodingAgent.OPENCODE: ".config/opencode/opencode.json",
    CodingAgent.KILO: ".config/kilo/kilo.json",
    CodingAgent.PI: ".pi/agent/models.json",
    CodingAgent.QWEN: ".qwen/settings.json",
    CodingAgent.CLINE: f".agentcache/launch/{HERE[CodingAgent.CLINE]}.json",
    CodingAgent.CONTINUE: f".agentcache/launch/{HERE[CodingAgent.CONTINUE]}.yaml",
    CodingAgent.CRUSH: ".config/crush/crush.json",
}
WITH_FILES = list(FILES)
CODEX = """# mine
model = "gpt-5"  # the best
approval_policy = "never"

[model_providers.other]
name = "Other"

[mcp_servers.docs]
command = "docs"
"""
OWN = {
    CodingAgent.CLAUDE: """{"model": "opus", "env": {"EDITOR": "vi", "ANTHROPIC_BASE_URL": "https://proxy.example"},
        "permissions": {"allow": ["Bash(ls)"], "deny": ["WebFetch", "Task"]}}""",
    CodingAgent.CODEX: CODEX,
    CodingAgent.OPENCODE: '{"$schema": "x", "model": "anthropic/claude", "provider": {"mine": {"npm": "y"}}}',
    CodingAgent.KILO: '{"model": "kilo/x", "permission": {"edit": "deny"}}',
    CodingAgent.PI: '{"providers": {"ollama": {"baseUrl": "z"}}}',
    CodingAgent.QWEN: '{"security": {"auth": {"selectedType": "qwen-oauth"}}, "model": {"generationConfig": {"t": 1}}}',
    CodingAgent.CLINE: '{"version": 1, "lastUsedProvider": "cline", "providers": {"cline": {"settings": {}}}}',
    CodingAgent.CONTINUE: "{}",
    CodingAgent.CRUSH: '{"providers": {"openai": {"api_key": "$OPENAI_API_KEY"}}, "options": {"debug": true}}',
}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CLAUDE_CONFIG_DIR", "CODEX_HOME", "XDG_CONFIG_HOME", "PI_CODING_AGENT_DIR", "QWEN_HOME", "CLINE_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "_served", lambda *options: (SERVED, None))


def parsed(file: Path) -> dict[str, Any]:
    return parsed_text(file.read_text(), file.suffix)


def parsed_text(text: str, suffix: str) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads(text) if suffix == ".toml" else json.loads(text)
    return found


def note_of(home: Path, agent: CodingAgent) -> Path:
    name = f"{HERE[agent]}.note" if PROGRAMS[agent].is_per_folder else agent
    return home / ".agentcache" / "launch" / f"{name}.json"


def own(home: Path, agent: CodingAgent) -> Path:
    file = home / FILES[agent]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(OWN[agent])
    file.chmod(0o640)
    return file


def kept(before: Any, after: Any, changed: list[tuple[str, ...]], at: tuple[str, ...] = ()) -> bool:
    """Whether all of `before` is in `after`, but for what stands at the paths `changed`."""
    if at in changed:
        return True
    if isinstance(before, dict):
        return isinstance(after, dict) and all(
            kept(value, after.get(name), changed, (*at, name)) for name, value in before.items()
        )
    return bool(before == after)


@pytest.mark.parametrize("agent", WITH_FILES)
@pytest.mark.usefixtures("served")
def test_there_and_back(agent: CodingAgent, home: Path, invoke: Invoke) -> None:
    file = own(home, agent)
    before = parsed(file)
    done = invoke("launch", agent)
    assert done.exit_code == 0, done.stderr
    values = PROGRAMS[agent].values(SERVED)
    after = parsed(file)
    for value in values:
        found: Any = after
        for key in value.path:
            found = found[key]
        assert set(found) >= set(value.value) if value.adds else found == value.value
    assert kept(before, after, [value.path for value in values])
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert set(file.parent.iterdir()) - {note_of(home, agent)} == {file}
    assert invoke("launch", agent, "--undo").exit_code == 0
    assert parsed(file) == before
    if agent is CodingAgent.CODEX:
        assert file.read_text() == CODEX  # comments too
    assert invoke("launch", agent, "--undo").stdout == f"nothing to undo for {agent}\n"


@pytest.mark.parametrize("agent", WITH_FILES)
@pytest.mark.usefixtures("served")
def test_settings_that_were_not_there(agent: CodingAgent, home: Path, invoke: Invoke) -> None:
    file = home / FILES[agent]
    assert invoke("launch", agent).exit_code == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    once = file.read_bytes()
    again = invoke("launch", agent)
    assert again.exit_code == 0 and "stays as it is" in again.stdout and file.read_bytes() == once
    assert invoke("launch", agent, "--undo").exit_code == 0
    assert not file.exists()


@pytest.mark.parametrize("agent", WITH_FILES)
@pytest.mark.usefixtures("served")
def test_a_dry_run_only_shows(agent: CodingAgent, home: Path, invoke: Invoke) -> None:
    file = own(home, agent)
    shown = invoke("launch", agent, "--dry-run")
    assert shown.exit_code == 0 and file.read_text() == OWN[agent]
    assert f"--- {file}" in shown.stdout and any(
        line.startswith("+") and URL in line for line in shown.stdout.split("\n")
    )
    assert not note_of(home, agent).exists()
    invoke("launch", agent)
    assert note_of(home, agent).exists()
    written = file.read_text()
    undone = invoke("launch", agent, "--undo", "--dry-run")
    assert any(line.startswith("-") and URL in line for line in undone.stdout.split("\n"))
    assert file.read_text() == written


@pytest.mark.parametrize("agent", WITH_FILES)
@pytest.mark.parametrize("text", ["{", "// a comment\n{}", "[1]", "\x00", "a = = 1", '"x"'])
@pytest.mark.usefixtures("served")
def test_what_cannot_be_parsed_is_not_touched(agent: CodingAgent, text: str, home: Path, invoke: Invoke) -> None:
    file = own(home, agent)
    if agent is CodingAgent.CODEX and text.startswith(("[1]", "//")):
        text = "= 1"  # that was good TOML, or so it began
    file.write_text(text)
    for options in (["--dry-run"], []):
        refused = invoke("launch", agent, *options)
        assert refused.exit_code == 1 and str(file) in refused.stderr and URL in refused.stderr
        assert file.read_text() == text
    assert list(file.parent.iterdir()) == [file]
    agreed = invoke("launch", agent, input="y\n")
    assert agreed.exit_code == 0 and (file.parent / f"{file.name}.bak").read_text() == text
    assert URL in file.read_text()


@pytest.mark.usefixtures("served")
def test_a_value_where_a_table_should_be(home: Path, invoke: Invoke) -> None:
    file = own(home, CodingAgent.CLAUDE)
    file.write_text('{"env": "x"}')
    assert invoke("launch", "claude").exit_code == 1
    assert file.read_text() == '{"env": "x"}'


@pytest.mark.usefixtures("served")
def test_what_was_changed_since_stays(home: Path, invoke: Invoke) -> None:
    file = own(home, CodingAgent.CLAUDE)
    invoke("launch", "claude")
    changed = parsed(file)
    changed["env"]["ANTHROPIC_BASE_URL"] = "https://newer.example"
    changed["theme"] = "dark"
    file.write_text(json.dumps(changed))
    undone = invoke("launch", "claude", "--undo")
    assert "env.ANTHROPIC_BASE_URL was changed since, and stays" in undone.stderr
    assert parsed(file) == {
        "model": "opus",
        "env": {"EDITOR": "vi", "ANTHROPIC_BASE_URL": "https://newer.example"},
        "permissions": {"allow": ["Bash(ls)"], "deny": ["WebFetch", "Task"]},
        "theme": "dark",
    }


def test_another_server_later(home: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """Undoing brings back what was there before the first one."""
    file = own(home, CodingAgent.CLAUDE)
    for served in (SERVED, replace(KEYED, url="http://127.0.0.1:9000")):
        monkeypatch.setattr(launch_module, "_served", lambda *options, served=served: (served, None))
        assert invoke("launch", "claude").exit_code == 0
    assert parsed(file)["env"]["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:9000"
    invoke("launch", "claude", "--undo")
    assert parsed(file) == json.loads(OWN[CodingAgent.CLAUDE])


@pytest.mark.parametrize("agent", WITH_FILES)
@pytest.mark.parametrize("served", [(SERVED, KEYED), (KEYED, SERVED)])
def test_values_that_a_later_server_does_not_want(
    agent: CodingAgent,
    served: tuple[Served, Served],
    tmp_path_factory: pytest.TempPathFactory,
    invoke: Invoke,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as `none` for the key, once there is one: the settings are those that the later server alone would get."""
    found = []
    for servers in (served, served[1:]):
        home = tmp_path_factory.mktemp("home")
        monkeypatch.setenv("HOME", str(home))
        file = own(home, agent)
        for each in servers:
            monkeypatch.setattr(launch_module, "_served", lambda *options, each=each: (each, None))
            assert invoke("launch", agent).exit_code == 0
        found.append(parsed(file))
        assert invoke("launch", agent, "--undo").exit_code == 0
        assert parsed(file) == parsed_text(OWN[agent], file.suffix)
    assert found[0] == found[1]


@pytest.mark.usefixtures("served")
def test_the_note_is_private_and_whole(home: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds what was replaced, such as the user's own key."""
    file = own(home, CodingAgent.CLAUDE)
    file.write_text('{"env": {"ANTHROPIC_AUTH_TOKEN": "sk-mine"}}')
    note = home / ".agentcache" / "launch" / "claude.json"
    note.parent.mkdir(parents=True, mode=0o755)
    assert invoke("launch", "claude").exit_code == 0
    assert "sk-mine" in note.read_text() and stat.S_IMODE(note.stat().st_mode) == 0o600
    whole = note.read_text()

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(client_settings, "sync", full)
    other = replace(SERVED, url="http://127.0.0.1:9000")
    monkeypatch.setattr(launch_module, "_served", lambda *options: (other, None))
    assert invoke("launch", "claude").exit_code == 1
    assert note.read_text() == whole
    monkeypatch.undo()
    assert {path.name for path in note.parent.iterdir()} == {note.name}


@pytest.mark.usefixtures("served")
def test_a_link_stays_one(home: Path, invoke: Invoke) -> None:
    file = own(home, CodingAgent.CLAUDE)
    file.rename(home / "dotfile.json")
    file.symlink_to(home / "dotfile.json")
    invoke("launch", "claude")
    assert file.is_symlink() and URL in (home / "dotfile.json").read_text()
    invoke("launch", "claude", "--undo")
    assert parsed(file) == json.loads(OWN[CodingAgent.CLAUDE])


@pytest.mark.parametrize("agent", CodingAgent)
def test_no_key_is_written_to_a_file(agent: CodingAgent) -> None:
    """A variable has it, which a settings file may name."""
    program = PROGRAMS[agent]
    said = json.dumps([*(value.value for value in program.values(KEYED)), program.environment(KEYED)])
    assert program.key.endswith(("_KEY", "_TOKEN")) and "none" not in said
    assert "AGENTCACHE_API_KEY" in said or program.key != "AGENTCACHE_API_KEY"


@pytest.mark.parametrize("agent", CodingAgent)
def test_every_agent_is_told_server_model_and_session(agent: CodingAgent) -> None:
    """A session is named where the agent names none."""
    program = PROGRAMS[agent]
    said = json.dumps([*(value.value for value in program.values(SERVED)), program.environment(SERVED)])
    assert URL in said and (SERVED.model in said or agent is CodingAgent.CLAUDE)
    assert ("X-Session-ID" in said and SERVED.session in said) is not program.names_session


def test_the_session_of_a_folder(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b", "a b/c", "é" * 60, "x" * 90, "..a")]
    for folder in folders:
        folder.mkdir(parents=True)
    names = [folder_session("openhands", folder) for folder in [*folders, Path("/")]]
    assert len(set(names)) == len(names) and all(is_name(name) for name in names), names
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert folder_session("openhands", tmp_path / "link") == names[0] == folder_session("openhands", tmp_path / "a")
    assert folder_session("qwen", tmp_path / "a") != names[0]


@pytest.mark.parametrize("agent", [agent for agent in CodingAgent if not PROGRAMS[agent].names_session])
def test_two_folders_at_once_have_two_sessions(
    agent: CodingAgent, home: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the second launch writes says nothing of sessions to the first one's agent."""
    told, before = [], ""
    for name in ("a", "b", "a"):
        (home / name).mkdir(exist_ok=True)
        monkeypatch.chdir(home / name)
        served = replace(SERVED, session=folder_session(agent, home / name))
        monkeypatch.setattr(launch_module, "_served", lambda *options, served=served: (served, None))
        assert invoke("launch", agent).exit_code == 0
        program = PROGRAMS[agent]
        file = None if program.file is None else program.file()
        settings_text = "" if file is None else file.read_text()
        told.append((program.environment(served), file, settings_text))
        if file is not None and not program.is_per_folder:
            assert settings_text == (before or settings_text), "the file is the same for all folders"
            assert served.session not in settings_text
            before = settings_text
        assert served.session in settings_text + json.dumps(program.environment(served))
    assert told[0] == told[2] != told[1]
    assert invoke("launch", agent, "--undo").exit_code == 0
    if program.is_per_folder:
        assert file is not None and not file.exists() and told[1][1] is not None and told[1][1].exists()


def test_a_small_context_leaves_tools_of_claude_out(
    home: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's own list stays, whatever was added to it since; a larger model later brings the tools back."""
    file = own(home, CodingAgent.CLAUDE)
    monkeypatch.setattr(launch_module, "_served", lambda *options: (SERVED, None))
    invoke("launch", "claude")
    settings = parsed(file)
    assert settings["permissions"]["disableAutoMode"] == "disable"
    assert settings["permissions"]["deny"][:2] == ["WebFetch", "Task"]
    assert {"Agent", "Workflow"} < set(settings["permissions"]["deny"])
    assert settings["permissions"]["deny"].count("Task") == 1
    settings["permissions"]["deny"].append("Read(.env)")
    file.write_text(json.dumps(settings))
    large = replace(SERVED, context=SMALL_CONTEXT + 1)
    monkeypatch.setattr(launch_module, "_served", lambda *options: (large, None))
    invoke("launch", "claude")
    assert parsed(file)["permissions"]["deny"] == ["WebFetch", "Task", "Read(.env)"]
    monkeypatch.setattr(launch_module, "_served", lambda *options: (SERVED, None))
    invoke("launch", "claude")
    assert "Agent" in parsed(file)["permissions"]["deny"]
    assert invoke("launch", "claude", "--undo").exit_code == 0
    undone = parsed(file)
    assert undone["permissions"] == {"allow": ["Bash(ls)"], "deny": ["WebFetch", "Task", "Read(.env)"]}


def test_a_large_context_leaves_no_list(home: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "_served", lambda *options: (replace(SERVED, context=200_000), None))
    invoke("launch", "claude")
    assert parsed(home / FILES[CodingAgent.CLAUDE])["permissions"] == {"disableAutoMode": "disable"}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"bash": "ask"}),
        ({"permission": {"edit": "deny"}}, {"edit": "deny", "bash": "ask"}),
        ({"permission": {"bash": "allow"}}, {"bash": "allow"}),
        ({"permission": {"bash": {"ls": "allow"}}}, {"bash": {"ls": "allow"}}),
        ({"permission": "allow"}, "allow"),
    ],
)
@pytest.mark.usefixtures("served")
def test_kilo_asks_before_commands_unless_the_user_has_said_otherwise(
    before: dict[str, Any], after: Any, home: Path, invoke: Invoke
) -> None:
    file = own(home, CodingAgent.KILO)
    file.write_text(json.dumps(before))
    for _ in range(2):
        assert invoke("launch", "kilo").exit_code == 0
        assert parsed(file)["permission"] == after
    assert invoke("launch", "kilo", "--undo").exit_code == 0
    assert parsed(file) == before


@pytest.mark.usefixtures("served")
def test_what_the_agent_itself_changes_is_no_change(home: Path, invoke: Invoke) -> None:
    """Cline keeps the date of its last use."""
    file = own(home, CodingAgent.CLINE)
    invoke("launch", "cline")
    used = parsed(file)
    used["providers"]["openai-compatible"]["updatedAt"] = "2026-11-26T00:00:00.000Z"
    file.write_text(json.dumps(used))
    assert "stays as it is" in invoke("launch", "cline").stdout or parsed(file) == used
    undone = invoke("launch", "cline", "--undo")
    assert undone.exit_code == 0 and "was changed since" not in undone.stderr
    assert parsed(file) == json.loads(OWN[CodingAgent.CLINE])


@pytest.mark.usefixtures("served")
def test_a_setting_that_is_no_list(home: Path, invoke: Invoke) -> None:
    file = own(home, CodingAgent.CLAUDE)
    file.write_text('{"permissions": {"deny": "x"}}')
    refused = invoke("launch", "claude")
    assert refused.exit_code == 1 and "permissions.deny is no list" in refused.stderr
    assert file.read_text() == '{"permissions": {"deny": "x"}}'


@pytest.mark.usefixtures("served")
def test_agents_that_take_variables_only(home: Path, invoke: Invoke) -> None:
    """Nothing is written, and the line can be pasted into a shell."""
    for agent in sorted(set(CodingAgent) - set(FILES)):
        done = invoke("launch", agent)
        assert done.exit_code == 0 and done.stdout == "", done.stderr
        words = shlex.split(done.stderr.removeprefix("now: "))
        variables = dict(word.split("=", 1) for word in words if "=" in word)
        assert variables == PROGRAMS[agent].environment(SERVED)
        assert invoke("launch", agent, "--undo").stdout == f"nothing to undo for {agent}\n"
    assert list(home.iterdir()) == []


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """What was started, with its variables."""
    found: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execvpe", lambda name, command, variables: found.append((command, variables)))
    return found


@pytest.mark.parametrize("agent", CodingAgent)
def test_an_agent_is_started(
    agent: CodingAgent,
    home: Path,
    invoke: Invoke,
    monkeypatch: pytest.MonkeyPatch,
    started: list[tuple[list[str], dict[str, str]]],
) -> None:
    monkeypatch.setattr(launch_module, "_served", lambda *options: (KEYED, "s3cret"))
    assert invoke("launch", agent, "--start", "--", "-p", "hi there").exit_code == 0
    [(command, variables)] = started
    program = PROGRAMS[agent]
    assert command[0] == program.command[0] and command[-2:] == ["-p", "hi there"]
    assert "{" not in "".join(command)
    assert variables[program.key] == "s3cret" and variables["HOME"] == str(home)
    assert program.environment(KEYED).items() <= variables.items()
    if agent in FILES:
        assert "s3cret" not in (home / FILES[agent]).read_text()


@pytest.mark.usefixtures("served")
def test_an_agent_that_is_not_installed(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    done = invoke("launch", "copilot", "--start")
    assert done.exit_code == 1 and "copilot cannot be started" in done.stderr and "installed" in done.stderr


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("options", [["--", "-p"], ["--start", "--dry-run"], ["--start", "--undo"]])
def test_options_that_do_not_go_together(options: list[str], home: Path, invoke: Invoke) -> None:
    assert invoke("launch", "qwen", *options).exit_code == 2
    assert list(home.iterdir()) == []


def test_a_note_that_is_none(home: Path, invoke: Invoke) -> None:
    note = home / ".agentcache" / "launch" / "claude.json"
    note.parent.mkdir(parents=True)
    for text in ("{", "[]", '{"file": 1}', '{"file": "x", "existed": true, "set": [{}]}'):
        note.write_text(text)
        result = invoke("launch", "claude", "--undo")
        assert result.exit_code == 1 and str(note) in result.stderr


@pytest.mark.parametrize("data", ["[]", '[{"id": "a"}]', '[{"id": "a"}, {"id": "b"}]', "5", '{"data": 5}'])
def test_a_server_of_another_kind_is_named(data: str, home: Path, invoke: Invoke) -> None:
    content = data if data.startswith("{") else f'{{"data": {data}}}'
    with serving(Response(content, media_type="application/json")) as url:
        result = invoke("launch", "claude", "--url", url)
    assert result.exit_code == 1 and f"error: {url} is no agentcache server" in result.stderr
    assert not list(home.glob("**/*.json"))


def test_without_a_server(invoke: Invoke) -> None:
    result = invoke("launch", "codex")
    assert result.exit_code == 1 and "agentcache serve" in result.stderr


TEXT = st.text("ab.\"'é ", min_size=1, max_size=3)
JSON = st.recursive(
    st.booleans() | st.integers(-5, 5) | TEXT, lambda inner: st.dictionaries(TEXT, inner, max_size=3), max_leaves=6
)
PATHS = st.lists(TEXT, min_size=1, max_size=3).map(tuple)


@settings(max_examples=examples(200), deadline=None)
@given(st.dictionaries(TEXT, JSON, max_size=4), st.lists(st.tuples(PATHS, JSON), min_size=1, max_size=3))
@pytest.mark.parametrize("suffix", [".json", ".toml"])
def test_any_settings_come_back(
    suffix: str,
    tmp_path_factory: pytest.TempPathFactory,
    own: dict[str, Any],
    wanted: list[tuple[tuple[str, ...], Any]],
) -> None:
    file = tmp_path_factory.mktemp("any") / f"settings{suffix}"
    file.write_text(tomlkit.dumps(own) if suffix == ".toml" else json.dumps(own))
    paths = [path for path, _ in wanted]
    if any(a != b and a[: len(b)] == b for a in paths for b in paths) or len(set(paths)) < len(paths):
        return  # nobody puts a value into another one
    try:
        change = put_in(file, [Value(path, value) for path, value in wanted], None)
    except UnreadableSettings:
        assert parsed(file) == own
        return
    write(change)
    after = parsed(file)
    for path, value in wanted:
        found: Any = after
        for key in path:
            found = found[key]
        assert found == value
    assert kept(own, after, paths)
    assert change.note is not None
    write(take_out(json.loads(json.dumps(change.note))))
    assert parsed(file) == own
