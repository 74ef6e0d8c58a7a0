from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentcache.api.policy import Policy, parse_policy
from agentcache.errors import ConfigError, InvalidRequest
from agentcache.settings.sources import load_config
from agentcache.settings.tables import AdapterFolder, parse_adapters

POET, LAWYER = AdapterFolder("poet", "/a/poet"), AdapterFolder("lawyer", "/a/lawyer", Policy.PREFILL_SHARE)


@pytest.mark.parametrize(
    "value",
    [
        {"poet": "/a/poet", "lawyer": "/a/lawyer:prefill-share"},
        {"poet": Path("/a/poet"), "lawyer": "/a/lawyer:prefill-share"},
        ["poet=/a/poet", "lawyer=/a/lawyer:prefill-share"],
        ("poet = /a/poet", "lawyer=/a/lawyer:prefill-share"),
        "poet=/a/poet,lawyer=/a/lawyer:prefill-share",
    ],
)
def test_ways_to_write_them(value: Any) -> None:
    assert parse_adapters(value) == (POET, LAWYER)


def test_a_folder_with_a_colon() -> None:
    assert parse_adapters({"x": "/a:b/c"}) == (AdapterFolder("x", "/a:b/c"),)
    assert parse_adapters({"x": "/a:b:exact"}) == (AdapterFolder("x", "/a:b", Policy.EXACT),)


@pytest.mark.parametrize("value", [["poet"], ["=x"], ["poet="], ["poet=/a:full-reuse"], ["a=/x", "a=/y"], {"a": 5}, 5])
def test_what_is_none(value: Any) -> None:
    with pytest.raises(ConfigError, match="adapters"):
        parse_adapters(value)


def test_in_all_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "config.toml"
    file.write_text('[adapters]\npoet = "/a/poet"\nlawyer = "/a/lawyer:prefill-share"\n')
    named = {"AGENTCACHE_CONFIG": str(file)}
    assert load_config({}, environ=named).adapters == (POET, LAWYER)
    assert load_config({}, environ=named | {"AGENTCACHE_ADAPTERS": "poet=/a/poet"}).adapters == (POET,)
    assert load_config({"adapters": ["lawyer=/a/lawyer:prefill-share"]}, environ=named).adapters == (LAWYER,)
    assert load_config({}, environ={}).adapters == ()


def test_policies() -> None:
    assert parse_policy("prefill-share") is Policy.PREFILL_SHARE
    with pytest.raises(InvalidRequest, match="must be one of auto, exact") as caught:
        parse_policy("fast", "agentcache.policy")
    assert caught.value.param == "agentcache.policy"
    assert parse_policy("residual-shared-a") is Policy.RESIDUAL_SHARED_A
    with pytest.raises(InvalidRequest, match="'full-reuse' is not supported"):
        parse_policy("full-reuse")
