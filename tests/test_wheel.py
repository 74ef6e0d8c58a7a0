"""The wheel as a user gets it: built from a copy of the tree, and run where nothing of the tree can be imported."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

import agentcache
from agentcache.server_process import ServerProcess

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
DATA = {
    *(f"agentcache/models/builtin/embedded_model/{name}" for name in ("chat_template.jinja", "model.safetensors")),
    *(f"agentcache/models/builtin/embedded_model/{name}.json" for name in ("config", "tokenizer", "tokenizer_config")),
    "agentcache/server/page.html",
    *(f"agentcache/workflow/scripts/{name}.toml" for name in ("gossip", "mapreduce", "prisoners_dilemma", "react")),
}
# What pip says where setuptools cannot be fetched.
_NO_REGISTRY = ("No matching distribution found", "Could not find a version", "Connection", "Network is unreachable")


def test_every_imported_distribution_is_a_dependency() -> None:
    names = {name.lower().replace("_", "-") for name in _requirements(PROJECT["project"]["dependencies"])}
    names.add("matplotlib")  # of the extra `plots`
    known = packages_distributions()
    imported: dict[str, str] = {}
    for path in (ROOT / "agentcache").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            imported |= {module.partition(".")[0]: path.name for module in modules}
    imported = {top: file for top, file in imported.items() if top not in sys.stdlib_module_names}
    assert imported.pop("agentcache") and len(imported) > 10
    for top, file in imported.items():
        owners = {name.lower().replace("_", "-") for name in known.get(top, [])}
        assert owners & names, f"{file} imports {top} of {owners or 'no distribution'}, which is no dependency"


def _requirements(lines: list[str]) -> Iterator[str]:
    for line in lines:
        yield line.partition(">")[0].partition("[")[0].strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("agentcache", "cli", "metal_kernels", "server", "benchmarks", "training", "tests", "examples"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    built = subprocess.run([*pip, "--wheel-dir", str(out), str(tree)], capture_output=True, text=True, cwd=out)
    if built.returncode and any(words in built.stderr for words in _NO_REGISTRY):
        pytest.skip(f"setuptools cannot be fetched here: {built.stderr[-300:]}")
    assert built.returncode == 0, built.stderr
    [made] = out.iterdir()
    return made


@pytest.mark.slow
def test_the_wheel_holds_the_package_with_its_data_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"agentcache_mlx-{agentcache.__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {
        f"{package.replace('.', '/')}/{path.name}"
        for package in PROJECT["tool"]["setuptools"]["packages"]
        for path in ROOT.joinpath(*package.split(".")).glob("*.py")
    }
    assert len(sources) > 300
    about = {name for name in names if name.startswith(f"agentcache_mlx-{agentcache.__version__}.dist-info/")}
    assert names - about == sources | DATA
    assert any(name.endswith("licenses/LICENSE") for name in about)


@pytest.fixture(scope="module")
def program(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of an environment with the wheel. Dependencies are those of the environment that tests run in."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    site = next((folder / "lib").glob("python3*/site-packages"))
    # Named by a file, a folder is searched for modules, but its own such files are not read: no editable install.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--ignore-installed", str(wheel)], check=True)
    return folder / "bin" / "agentcache"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HOME": str(tmp_path)}


@pytest.mark.slow
def test_the_command_of_the_wheel_answers(program: Path, environment: dict[str, str], tmp_path: Path) -> None:
    def run(*command: str | Path) -> str:
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    where = run(program.parent / "python", "-c", "import agentcache.server as it; print(it.__file__)")
    assert where.startswith(str(program.parent.parent))
    assert run(program, "--version").strip() == agentcache.__version__
    assert "agentcache-embedded is served" in run(program, "doctor")


@pytest.mark.slow
def test_an_agent_of_the_wheel_outlives_a_kill(program: Path, tmp_path: Path) -> None:
    alone = {"PYTHONPATH": "", "HOME": str(tmp_path)}
    told = [{"role": "user", "content": "Remember the number 4711. " * 40}]
    with ServerProcess(
        tmp_path / "cache", tmp_path / "log", command=(str(program), "serve"), environment=alone
    ) as server:
        first = server.client.chat(told, agent="ann", max_tokens=8)
        assert first.report["cache_state"] == "cold"
        server.kill()
        server.start()
        asked = [*told, {"role": "assistant", "content": first.text}, {"role": "user", "content": "Which number?"}]
        second = server.client.chat(asked, agent="ann", max_tokens=8)
        assert second.report["cache_state"] == "warm" and second.report["cached_tokens"]["own"] >= 256
