from __future__ import annotations

from pathlib import Path

import pytest

from agentcache.errors import ConfigError
from agentcache.settings import sizes
from agentcache.settings.config import Config, Images
from agentcache.settings.sources import load_config


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def write_config(home: Path, text: str) -> None:
    (home / ".agentcache").mkdir()
    (home / ".agentcache" / "config.toml").write_text(text)


def test_defaults(home: Path) -> None:
    settings = load_config({}, environ={})
    assert (settings.host, settings.port, settings.api_key, settings.model) == ("127.0.0.1", 8000, None, None)
    assert settings.cache_dir == home / ".agentcache" / "cache"
    assert settings.ram_budget is settings.memory_limit is settings.wired_limit is None, "they depend on the model"
    assert settings.memory_pressure
    assert settings.disk_budget is None, "it depends on what the cache folder holds"


def test_flag_beats_environment_beats_file_beats_default(home: Path) -> None:
    write_config(home, 'port = 1\nhost = "file"\nmodel = "file"\n')
    settings = load_config({"port": 3, "host": None}, environ={"AGENTCACHE_PORT": "2", "AGENTCACHE_HOST": "env"})
    assert (settings.port, settings.host, settings.model, settings.max_concurrent_requests) == (3, "env", "file", 16)


def test_config_file_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text("port = 9\n")
    assert load_config({}, environ={"AGENTCACHE_CONFIG": str(tmp_path / "other.toml")}).port == 9
    with pytest.raises(ConfigError, match="does not exist"):
        load_config({}, environ={"AGENTCACHE_CONFIG": str(tmp_path / "missing.toml")})


def test_ram_and_trunk_budget_together_beyond_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "total_ram", lambda: 10**9)
    assert load_config({"ram_budget": "800MB", "trunk_budget": "20%"}, environ={}).trunk_budget == 200 * 10**6
    assert load_config({"ram_budget": "800MB"}, environ={}).trunk_budget is None
    assert load_config({"ram_budget": "800MB", "trunk_budget": 0}, environ={}).trunk_budget == 0
    with pytest.raises(ConfigError, match="trunk_budget = '201MB' is more than the 0.2 GB that ram_budget leaves"):
        load_config({"ram_budget": "800MB", "trunk_budget": "201MB"}, environ={})


@pytest.mark.parametrize(
    ("overrides", "text", "hint"), [({"prot": 1}, "", "port"), ({}, "cachedir = 'x'\n", "cache_dir")]
)
def test_unknown_keys_name_the_nearest(home: Path, overrides: dict[str, object], text: str, hint: str) -> None:
    write_config(home, text)
    with pytest.raises(ConfigError, match=f"did you mean '{hint}'"):
        load_config(overrides, environ={})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("AGENTCACHE_RAMBUDGET", "AGENTCACHE_RAM_BUDGET"),
        ("AGENTCACHE_ULR", "AGENTCACHE_URL"),
    ],
)
def test_an_unknown_variable_is_warned_of_in_one_line(caplog: pytest.LogCaptureFixture, name: str, hint: str) -> None:
    assert load_config({}, environ={name: "1GB", "AGENTCACHE_PORT": "9"}).port == 9
    assert caplog.messages == [f"unknown environment variable {name!r}; did you mean {hint!r}?"]


def test_known_variables_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    load_config({}, environ={"AGENTCACHE_URL": "http://x", "AGENTCACHE_HOST": "::1", "AGENTCACHE_BACKEND": "cpu"})
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"port": 65536}, "port"),
        ({"port": -1}, "port"),
        ({"port": "many"}, "port"),
        ({"port": True}, "port"),
        ({"ram_budget": 0}, "ram_budget"),
        ({"memory_limit": 0}, "memory_limit"),
        ({"memory_limit": "off"}, "memory_limit"),
        ({"wired_limit": "none"}, "wired_limit"),
        ({"memory_pressure": "low"}, "memory_pressure"),
        ({"disk_budget": "0%"}, "disk_budget"),
        ({"max_concurrent_requests": 0}, "max_concurrent_requests"),
        ({"max_context": -5}, "max_context"),
        ({"prefill_chunk": 0}, "prefill_chunk"),
        ({"max_stall_ms": 0}, "max_stall_ms"),
        ({"max_stall_ms": "soon"}, "max_stall_ms"),
        ({"decode_share": 1}, "decode_share"),
        ({"decode_share": 0.0}, "decode_share"),
        ({"kv": 5}, "kv = '5' is none of auto, 2.5, 3, 4, 4t, k8v4, 8, 16"),
        ({"kv": True}, "kv = '1' is none of"),
        ({"max_body_bytes": "20%"}, "max_body_bytes"),
        ({"trunk_budget": -1}, "trunk_budget"),
        ({"host": ""}, "host"),
        ({"api_key": ""}, "api_key"),
        ({"api_key": "a\nb"}, "api_key"),
        ({"model": 3}, "model"),
        ({"ram_budget": 1.5}, "ram_budget"),
        ({"session_headers": "maybe"}, "session_headers"),
        ({"strict_model_names": 3}, "strict_model_names"),
        ({"images": "show"}, "images"),
        ({"durability": "none"}, "durability = 'none' must be full or barrier or fsync"),
        ({"images": True}, "images"),
        ({"aliases": "small=default"}, "aliases"),
        ({"aliases": ["small"]}, "aliases"),
        ({"aliases": {"small": 3}}, "aliases: small"),
        ({"aliases": {"small": ""}}, "aliases: small"),
        ({"api_key_file": 3}, "api_key_file"),
        ({"default_agent": 3}, "default_agent"),
        ({"default_agent": ["../x"]}, "default_agent: '../x' is no agent id"),
        ({"default_agent": ["=a"]}, "default_agent"),
        ({"default_agent": {"copilot": 3}}, "default_agent"),
        ({"default_agent": ["Copilot=a", "copilot=b"]}, "default_agent: 'copilot' is there twice"),
    ],
)
def test_values_that_make_no_sense_are_named(overrides: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_config(overrides, environ={})


@pytest.mark.parametrize("kv", ["4", "2.5", '"2.5"', '"4t"'])
def test_bits_in_the_file_may_be_numbers(home: Path, kv: str) -> None:
    write_config(home, f"kv = {kv}\n")
    assert load_config({}, environ={}).kv == kv.strip('"')


def test_limits_of_memory_in_the_file(home: Path) -> None:
    write_config(home, 'memory_limit = "100MB"\nwired_limit = "off"\nmemory_pressure = false\n')
    settings = load_config({}, environ={})
    assert (settings.memory_limit, settings.wired_limit, settings.memory_pressure) == (10**8, 0, False)


def test_broken_toml_names_the_file(home: Path) -> None:
    write_config(home, "port = = 1\n")
    with pytest.raises(ConfigError, match=r"config\.toml"):
        load_config({}, environ={})


def test_paths_are_expanded_and_absolute(home: Path) -> None:
    assert load_config({"cache_dir": "~/x"}, environ={}).cache_dir == home / "x"
    assert load_config({"cache_dir": "rel"}, environ={}).cache_dir.is_absolute()


def test_the_key_is_not_printed() -> None:
    assert "secret" not in repr(Config(api_key="secret"))


@pytest.mark.parametrize(("text", "seconds"), [("30", 30.0), ("0.5", 0.5), (2, 2.0), (1.5, 1.5)])
def test_a_time_limit_is_in_seconds(text: str | int | float, seconds: float) -> None:
    assert load_config({"request_timeout": text}, environ={}).request_timeout == seconds


def test_a_time_limit_in_the_file_and_the_environment(home: Path) -> None:
    write_config(home, "request_timeout = 2.5\n")
    assert load_config({}, environ={}).request_timeout == 2.5
    assert load_config({}, environ={"AGENTCACHE_REQUEST_TIMEOUT": "7"}).request_timeout == 7.0


@pytest.mark.parametrize("key", ["header_timeout", "body_timeout", "write_timeout"])
def test_time_limits_of_requests_on_their_way(key: str) -> None:
    assert getattr(load_config({}, environ={f"AGENTCACHE_{key.upper()}": "2.5"}), key) == 2.5
    with pytest.raises(ConfigError, match=key):
        load_config({key: 0}, environ={})


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf", "", True])
def test_bad_time_limits(text: object) -> None:
    with pytest.raises(ConfigError, match="request_timeout"):
        load_config({"request_timeout": text}, environ={})


def test_a_fraction_of_a_port_is_refused(home: Path) -> None:
    write_config(home, "port = 1.5\n")
    with pytest.raises(ConfigError, match="port"):
        load_config({}, environ={})


def test_switches_and_aliases(home: Path) -> None:
    write_config(home, 'session_headers = false\nimages = "placeholder"\n[aliases]\nsmall = "default"\n')
    settings = load_config({"strict_model_names": True}, environ={})
    assert (settings.session_headers, settings.strict_model_names) == (False, True)
    assert (settings.images, settings.aliases) == (Images.PLACEHOLDER, {"small": "default"})
    for text, on in (("on", True), ("TRUE", True), ("1", True), ("off", False), ("false", False), ("0", False)):
        assert load_config({}, environ={"AGENTCACHE_SESSION_HEADERS": text}).session_headers is on


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(" s3cret\n")
    path.chmod(0o600)
    return path


def test_the_key_from_a_file(home: Path, key_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_config(home, f'api_key_file = "{key_file}"\n')
    for settings in (
        load_config({}, environ={}),
        load_config({"api_key_file": key_file}, environ={}),
        load_config({}, environ={"AGENTCACHE_API_KEY_FILE": "~/key"}),
    ):
        assert (settings.api_key, settings.api_key_file) == ("s3cret", key_file)
        assert "s3cret" not in repr(settings)
    assert caplog.messages == []


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_key_that_others_can_read_is_warned_of(key_file: Path, caplog: pytest.LogCaptureFixture, mode: int) -> None:
    key_file.chmod(mode)
    assert load_config({"api_key_file": key_file}, environ={}).api_key == "s3cret"
    [message] = caplog.messages
    assert str(key_file) in message and "other users" in message


@pytest.mark.parametrize(("text", "problem"), [("", "is empty"), (" \n", "is empty"), ("a\nb", "printable")])
def test_files_that_hold_no_key(key_file: Path, text: str, problem: str) -> None:
    key_file.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        load_config({"api_key_file": key_file}, environ={})


def test_a_key_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"api_key_file .*nothing cannot be read"):
        load_config({"api_key_file": tmp_path / "nothing"}, environ={})


def test_a_key_and_a_key_file(key_file: Path) -> None:
    with pytest.raises(ConfigError, match="api_key and api_key_file"):
        load_config({"api_key_file": key_file}, environ={"AGENTCACHE_API_KEY": "other"})


def test_sampling_of_requests_that_say_nothing(home: Path) -> None:
    write_config(home, "temperature = 0.2\ntop_p = 0.5\n")
    found = load_config({"temperature": 0.0, "top_k": 7}).sampling
    assert found.known == {"temperature": 0.0, "top_p": 0.5, "top_k": 7}
    assert Config().sampling.known == {}
    for wrong in ({"temperature": -1.0}, {"top_p": 2.0}, {"temperature": 1e9}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Config(**wrong)  # type: ignore[arg-type]


def test_default_agents_from_each_source(home: Path) -> None:
    assert load_config({}, environ={}).default_agent == {}
    from_flags = load_config({"default_agent": ["notes", "Copilot=pilot"]}, environ={}).default_agent
    assert from_flags == {"*": "notes", "copilot": "pilot"}
    environ = {"AGENTCACHE_DEFAULT_AGENT": "notes, QwenCode = qwen"}
    assert load_config({}, environ=environ).default_agent == {"*": "notes", "qwencode": "qwen"}
    write_config(home, 'default_agent = "notes"\n')
    assert load_config({}, environ={}).default_agent == {"*": "notes"}
    (home / ".agentcache" / "config.toml").write_text('[default_agent]\n"*" = "notes"\nOpenAI = "sdk"\n')
    assert load_config({}, environ={}).default_agent == {"*": "notes", "openai": "sdk"}
