"""`.github/workflows`: what runs, on what, and that it may do no more than read."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML, which transformers brings, is not installed")

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.fixture(params=FILES, ids=lambda path: path.name)
def workflow(request: pytest.FixtureRequest) -> dict[Any, Any]:
    loaded: dict[Any, Any] = yaml.safe_load(request.param.read_text())
    return loaded


def steps(workflow: dict[Any, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_there_is_a_workflow() -> None:
    assert [path.name for path in FILES] == ["ci.yml"]


def test_it_may_only_read_and_ends(workflow: dict[Any, Any]) -> None:
    assert workflow["permissions"] == {"contents": "read"}
    assert "pull_request_target" not in workflow[True], "`on`, which YAML 1.1 reads as true"
    for job in workflow["jobs"].values():
        assert "permissions" not in job and 0 < job["timeout-minutes"] <= 60
    for step in steps(workflow):
        assert "secrets." not in str(step)
        if "checkout" in step.get("uses", ""):
            assert step["with"]["persist-credentials"] is False


def test_actions_are_of_github_and_pinned_to_a_major_version(workflow: dict[Any, Any]) -> None:
    used = {step["uses"] for step in steps(workflow) if "uses" in step}
    assert used and all(re.fullmatch(r"actions/[a-z-]+@v\d+", name) for name in used)


def test_it_runs_targets_of_the_makefile_on_every_version_of_python(workflow: dict[Any, Any]) -> None:
    commands = [step["run"] for step in steps(workflow) if step.get("run", "").startswith("make ")]
    called = {target for command in commands for target in command.split()[1:]}
    assert {"lint", "types", "test"} <= called <= TARGETS
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = [each.rpartition(" ")[2] for each in project["classifiers"] if re.search(r"Python :: 3\.\d+$", each)]
    assert workflow["jobs"]["linux"]["strategy"]["matrix"]["python"] == versions
    assert versions[0] == project["requires-python"].removeprefix(">=")
    assert workflow["jobs"]["macos"]["runs-on"].startswith("macos-")
