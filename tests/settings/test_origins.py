from __future__ import annotations

import pytest

from agentcache.errors import ConfigError
from agentcache.settings.sources import load_config
from agentcache.settings.tables import hosts_of, is_same_origin, parse_origins


@pytest.mark.parametrize(
    ("value", "origins"),
    [
        ([], ()),
        ("https://Ui.example, http://localhost:3000,", ("https://ui.example", "http://localhost:3000")),
        (
            ["https://ui.example:443", "http://a.b:80", "http://a.b:443"],
            ("https://ui.example", "http://a.b", "http://a.b:443"),
        ),
        (("vscode-webview://1abc", "http://[::1]:3000"), ("vscode-webview://1abc", "http://[::1]:3000")),
        ("*", ("*",)),
    ],
)
def test_origins(value: object, origins: tuple[str, ...]) -> None:
    assert parse_origins(value) == origins


@pytest.mark.parametrize(
    "bad",
    [
        "null",
        "ui.example",
        "https://",
        "https://ui.example/",
        "https://u@ui.example",
        "https://*.example",
        "https://a:x",
        "//a",
    ],
)
def test_what_is_no_origin_is_named(bad: str) -> None:
    with pytest.raises(ConfigError, match="cors_origins"):
        parse_origins([bad])
    with pytest.raises(ConfigError, match="cors_origins"):
        load_config({}, environ={"AGENTCACHE_CORS_ORIGINS": f"https://ok.example,{bad}"})


def test_a_number_is_no_list() -> None:
    with pytest.raises(ConfigError, match="cors_origins"):
        load_config({"cors_origins": 3}, environ={})


def test_hosts() -> None:
    assert hosts_of(("*", "https://ui.example:8443", "http://[::1]:1")) == {"ui.example", "::1"}


def test_same_origin() -> None:
    assert is_same_origin("https://a.b", "A.b:443") and is_same_origin("http://a.b:8000", "a.b:8000")
    assert not is_same_origin("http://a.b", "a.b:8000") and not is_same_origin("null", "null")
