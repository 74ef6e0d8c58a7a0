"""Settings of each coding agent for `agentcache launch`."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from agentcache.cli.client_settings import Value
from agentcache.settings.sources import default_config_file

KEY_VARIABLE = "AGENTCACHE_API_KEY"
SESSION_VARIABLE = "AGENTCACHE_SESSION"
SESSION_HEADER = "X-Session-ID"
SMALL_CONTEXT = 65_536  # tokens; Claude Code's tools take 39,000
_OUTPUT_TOKENS = 4096
_LONGEST_NAME = 30
# Long descriptions; Claude Code works without.
_SPARE_TOOLS = ["Agent", "ListAgents", "ReportFindings", "ScheduleWakeup", "Skill", "Task", "Workflow"]


class CodingAgent(StrEnum):
    CLAUDE = "claude"
    CODEX = "codex"
    OPENCODE = "opencode"
    KILO = "kilo"
    PI = "pi"
    QWEN = "qwen"
    CLINE = "cline"
    CONTINUE = "continue"
    CRUSH = "crush"
    COPILOT = "copilot"
    VIBE = "vibe"
    OPENHANDS = "openhands"


@dataclass(frozen=True)
class Served:
    """The running server; `url` lacks `/v1`. Settings files never contain its key."""

    url: str
    model: str
    context: int
    has_key: bool
    session: str

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def output(self) -> int:
        return min(_OUTPUT_TOKENS, self.context // 4)

    @property
    def headers(self) -> dict[str, str]:
        return {SESSION_HEADER: self.session}


@dataclass(frozen=True)
class Program:
    """A coding agent.

    `command` may contain `{model}` and `{file}`. `file`: its settings; None for variables only.
    `is_per_folder`: `file` is ours, one per folder; only these may name a session.
    """

    command: tuple[str, ...]
    file: Callable[[], Path] | None = None
    values: Callable[[Served], list[Value]] = lambda served: []
    environment: Callable[[Served], dict[str, str]] = lambda served: {}
    key: str = KEY_VARIABLE
    names_session: bool = True
    is_per_folder: bool = False


def folder_session(agent: str, folder: Path) -> str:
    """Session name of an agent in a folder; a valid agent id."""
    path = str(folder.resolve())
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name)[:_LONGEST_NAME] or "root"
    return f"{agent}-{name}-{hashlib.sha256(path.encode('utf-8', 'surrogateescape')).hexdigest()[:8]}"


def _home(variable: str, *default: str) -> Path:
    named = os.environ.get(variable)
    return Path(named).expanduser() if named else Path.home().joinpath(*default)


def _own_file(agent: str, suffix: str) -> Callable[[], Path]:
    return lambda: default_config_file().parent / "launch" / f"{folder_session(agent, Path.cwd())}{suffix}"


def _key(reference: str, served: Served) -> str:
    return reference if served.has_key else "none"


def _claude(served: Served) -> list[Value]:
    """Disables auto mode: in it Anthropic's API judges each tool call."""
    values = {"ANTHROPIC_BASE_URL": served.url, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    if not served.has_key:
        values["ANTHROPIC_AUTH_TOKEN"] = "none"
    return [
        *(Value(("env", name), value) for name, value in values.items()),
        Value(("permissions", "disableAutoMode"), "disable"),
        Value(("permissions", "deny"), _SPARE_TOOLS if served.context <= SMALL_CONTEXT else [], adds=True),
    ]


def _codex(served: Served) -> list[Value]:
    provider = {"name": "agentcache", "base_url": served.base_url, "wire_api": "responses"}
    if served.has_key:
        provider["env_key"] = KEY_VARIABLE
    return [
        Value(("model",), served.model),
        Value(("model_provider",), "agentcache"),
        Value(("model_context_window",), served.context),
        *(Value(("model_providers", "agentcache", name), value) for name, value in provider.items()),
    ]


def _opencode(served: Served) -> list[Value]:
    key = {"apiKey": f"{{env:{KEY_VARIABLE}}}"} if served.has_key else {}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": served.base_url} | key,
        "models": {served.model: {"limit": {"context": served.context, "output": served.output}}},
    }
    return [Value(("provider", "agentcache"), provider), Value(("model",), f"agentcache/{served.model}")]


def _kilo(served: Served) -> list[Value]:
    """Makes Kilo ask before shell commands; without a rule, it allows them all."""
    return [*_opencode(served), Value(("permission", "bash"), "ask", is_default=True)]


def _pi(served: Served) -> list[Value]:
    provider = {
        "baseUrl": served.base_url,
        "api": "openai-completions",
        "apiKey": _key(KEY_VARIABLE, served),
        "compat": {"sendSessionAffinityHeaders": True},
        "models": [{"id": served.model, "contextWindow": served.context, "maxTokens": served.output}],
    }
    return [Value(("providers", "agentcache"), provider)]


def _qwen(served: Served) -> list[Value]:
    """Older versions do not insert the session; this header accepts any value."""
    auth = {"selectedType": "openai", "baseUrl": served.base_url, "apiKey": _key(f"${KEY_VARIABLE}", served)}
    generation = {
        "contextWindowSize": served.context,
        "customHeaders": {"X-Session-Affinity": "${session_id}"},
        "samplingParams": {"max_tokens": served.output},
    }
    return [
        *(Value(("security", "auth", name), value) for name, value in auth.items()),
        Value(("model", "name"), served.model),
        *(Value(("model", "generationConfig", name), value) for name, value in generation.items()),
        Value(("outboundCorrelation", "allowDynamicHeaderValues"), True),
    ]


_CLINE_FILE = _own_file("cline", ".json")


def _cline_environment(served: Served) -> dict[str, str]:
    """Disables the hub, which uses the first folder's settings for all."""
    return {"CLINE_PROVIDER_SETTINGS_PATH": str(_CLINE_FILE()), "CLINE_SESSION_BACKEND_MODE": "local"}


def _cline(served: Served) -> list[Value]:
    """Cline refuses a file without date and source."""
    key = {} if served.has_key else {"apiKey": "none"}
    provider = {
        "settings": {
            "provider": "openai-compatible",
            "model": served.model,
            "baseUrl": served.base_url,
            "headers": served.headers,
        }
        | key,
        "updatedAt": "2026-01-01T00:00:00.000Z",
        "tokenSource": "manual",
    }
    return [
        Value(("version",), 1),
        Value(("lastUsedProvider",), "openai-compatible"),
        Value(("providers", "openai-compatible"), provider, ignores=("updatedAt",)),
    ]


def _continue(served: Served) -> list[Value]:
    model = {
        "name": served.model,
        "provider": "openai",
        "model": served.model,
        "apiBase": served.base_url,
        "apiKey": _key(f"${{{{ secrets.{KEY_VARIABLE} }}}}", served),
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use"],
        "defaultCompletionOptions": {"contextLength": served.context, "maxTokens": served.output},
        "requestOptions": {"headers": served.headers},
    }
    config = {"name": "agentcache", "version": "1.0.0", "schema": "v1", "models": [model]}
    return [Value((name,), value) for name, value in config.items()]


def _crush(served: Served) -> list[Value]:
    model = {"id": served.model, "name": served.model, "context_window": served.context}
    provider = {
        "type": "openai-compat",
        "base_url": served.base_url,
        "api_key": _key(f"${KEY_VARIABLE}", served),
        "extra_headers": {SESSION_HEADER: f"${SESSION_VARIABLE}"},  # not sent if unset
        "models": [model | {"default_max_tokens": served.output}],
    }
    chosen = {"model": served.model, "provider": "agentcache"}
    return [
        Value(("providers", "agentcache"), provider),
        Value(("models", "large"), chosen),
        Value(("models", "small"), chosen),
    ]


def _copilot(served: Served) -> dict[str, str]:
    return {
        "COPILOT_PROVIDER_BASE_URL": served.base_url,
        "COPILOT_MODEL": served.model,
        "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": str(served.context - served.output),
        "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": str(served.output),
        "COPILOT_PROVIDER_HEADERS": "\n".join(f"{name}: {value}" for name, value in served.headers.items()),
        "COPILOT_OFFLINE": "true",
    }


def _vibe(served: Served) -> dict[str, str]:
    key = {"api_key_env_var": KEY_VARIABLE} if served.has_key else {}
    provider = {"name": "agentcache", "api_base": served.base_url, "backend": "generic"} | key
    model = {"name": served.model, "provider": "agentcache", "alias": "agentcache"}
    limits = {"max_context_length": served.context, "max_output_tokens": served.output}
    return {
        "VIBE_PROVIDERS": json.dumps([provider]),
        "VIBE_MODELS": json.dumps([model | limits]),
        "VIBE_ACTIVE_MODEL": "agentcache",
    }


def _openhands(served: Served) -> dict[str, str]:
    key = {} if served.has_key else {"LLM_API_KEY": "none"}
    return {"LLM_BASE_URL": served.base_url, "LLM_MODEL": f"openai/{served.model}"} | key


PROGRAMS = {
    CodingAgent.CLAUDE: Program(
        ("claude",),
        lambda: _home("CLAUDE_CONFIG_DIR", ".claude") / "settings.json",
        _claude,
        key="ANTHROPIC_AUTH_TOKEN",
    ),
    CodingAgent.CODEX: Program(("codex",), lambda: _home("CODEX_HOME", ".codex") / "config.toml", _codex),
    CodingAgent.OPENCODE: Program(
        ("opencode",), lambda: _home("XDG_CONFIG_HOME", ".config") / "opencode" / "opencode.json", _opencode
    ),
    CodingAgent.KILO: Program(("kilo",), lambda: _home("XDG_CONFIG_HOME", ".config") / "kilo" / "kilo.json", _kilo),
    CodingAgent.PI: Program(
        ("pi", "--model", "agentcache/{model}"),
        lambda: _home("PI_CODING_AGENT_DIR", ".pi", "agent") / "models.json",
        _pi,
    ),
    CodingAgent.QWEN: Program(("qwen",), lambda: _home("QWEN_HOME", ".qwen") / "settings.json", _qwen),
    CodingAgent.CLINE: Program(
        ("cline",),
        _CLINE_FILE,
        _cline,
        _cline_environment,
        key="OPENAI_API_KEY",
        names_session=False,
        is_per_folder=True,
    ),
    CodingAgent.CONTINUE: Program(
        ("cn", "--config", "{file}"),
        _own_file("continue", ".yaml"),  # JSON is YAML
        _continue,
        names_session=False,
        is_per_folder=True,
    ),
    CodingAgent.CRUSH: Program(
        ("crush",),
        lambda: _home("XDG_CONFIG_HOME", ".config") / "crush" / "crush.json",
        _crush,
        lambda served: {SESSION_VARIABLE: served.session},
        names_session=False,
    ),
    CodingAgent.COPILOT: Program(
        ("copilot",), environment=_copilot, key="COPILOT_PROVIDER_API_KEY", names_session=False
    ),
    CodingAgent.VIBE: Program(("vibe",), environment=_vibe),
    CodingAgent.OPENHANDS: Program(("openhands", "--override-with-envs"), environment=_openhands, key="LLM_API_KEY"),
}
