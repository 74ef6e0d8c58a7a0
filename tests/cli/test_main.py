from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentcache import __version__
from agentcache.cli.main import COMMANDS
from tests.cli.conftest import Invoke
from tests.server.fake_engine import FakeEngine
from tests.store.unreadable import NOBODY, as_user, is_root


def test_every_command_is_listed_and_has_help(invoke: Invoke) -> None:
    listed = invoke("--help")
    assert listed.exit_code == 0
    for name in COMMANDS:
        assert name in listed.stdout
        assert invoke(name, "--help").exit_code == 0


def test_version(invoke: Invoke) -> None:
    assert invoke("--version").stdout.strip() == __version__


def test_mlx_without_a_back_end_is_one_sentence(tmp_path: Path) -> None:
    """What `pip install .` leads to on Linux: a package that does not find its library."""
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").touch()
    (tmp_path / "mlx" / "nn.py").write_text("import mlx.core")
    missing = "libmlx.so: cannot open shared object file: No such file or directory"
    (tmp_path / "mlx" / "core.py").write_text(f"raise ImportError({missing!r})")
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths, "HOME": str(tmp_path)}
    said = subprocess.run(
        [sys.executable, "-m", "agentcache", "serve"], env=environment, capture_output=True, text=True, check=False
    )
    assert said.returncode == 1
    assert said.stderr.splitlines() == [
        f"error: MLX is installed without a back end ({missing})",
        "hint: on Linux install agentcache-mlx[cpu] or agentcache-mlx[cuda]",
    ]


def test_a_low_limit_of_open_files_is_one_sentence(tmp_path: Path) -> None:
    """As mlx-lm fails where only root could raise the hard limit."""
    (tmp_path / "mlx_lm").mkdir()
    (tmp_path / "mlx_lm" / "__init__.py").write_text("raise ValueError('not allowed to raise maximum limit')")
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths, "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "agentcache", "serve", "--port", "0"]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert said.returncode == 1
    error, hint = said.stderr.splitlines()
    assert "files at most, and mlx-lm asks for 4096" in error and "ulimit -Hn" in hint


@is_root
@pytest.mark.parametrize("command", [("export", "ada", "/nowhere/file"), ("purge", "--all", "--yes")])
def test_a_cache_folder_of_another_user_is_one_sentence(
    ram_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    ram_path.chmod(0o711)
    folder = ram_path / "cache"
    folder.mkdir(0o700)
    monkeypatch.setenv("AGENTCACHE_CACHE_DIR", str(folder))
    monkeypatch.setenv("HOME", str(ram_path))

    def call() -> None:
        said = invoke(*command)
        assert said.exit_code == 1
        assert said.stderr.startswith("error: ") and "belongs to user 0" in said.stderr
        assert len(said.stderr.splitlines()) == 1

    invoke(*command)  # imports what the other user may not be able to read
    as_user(NOBODY, call)


def test_wrong_calls_exit_with_2(invoke: Invoke) -> None:
    assert invoke("dance").exit_code == 2
    assert invoke("warm").exit_code == 2
    assert invoke("serve", "--port", "many").exit_code == 2


def test_settings_that_make_no_sense_are_one_sentence(invoke: Invoke) -> None:
    result = invoke("serve", "--ram-budget", "lots")
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "error: ram_budget = 'lots' is not a size; write it like 8GB, 512MB, 20%, auto or in bytes"
    ]
    assert result.stdout == ""


def test_an_unknown_variable_is_one_line_on_stderr() -> None:
    """In a process of its own: here pytest has taken over the log."""
    environ = os.environ | {"AGENTCACHE_RAMBUDGET": "1GB", "AGENTCACHE_PORT": "1"}
    command = [sys.executable, "-c", "from agentcache.settings.sources import load_config; load_config()"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
    expected = "unknown environment variable 'AGENTCACHE_RAMBUDGET'; did you mean 'AGENTCACHE_RAM_BUDGET'?\n"
    assert (done.stdout, done.stderr) == ("", expected)


def test_refusals_are_one_sentence(invoke: Invoke, engine: FakeEngine) -> None:
    result = invoke("restore", "nobody")
    assert result.exit_code == 1
    assert result.stderr == "error: The agent 'nobody' is unknown.\n"
    assert result.stdout == ""


@pytest.mark.parametrize("arguments", [("--help",), ("serve", "--help")])
def test_help_imports_no_model_code(arguments: tuple[str, ...]) -> None:
    script = f"""
import sys
from agentcache.cli.main import app
try:
    app({list(arguments)!r})
except SystemExit as end:
    assert not end.code
assert not {{"mlx", "mlx.core", "transformers", "numpy", "uvicorn"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
