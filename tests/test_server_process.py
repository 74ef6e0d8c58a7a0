"""Server processes: up inside the `with`, gone outside, whatever happened."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from agentcache.server_process import ServerNotStarted, ServerProcess, ending_on_signals

FAKE = (sys.executable, str(Path(__file__).parent / "fake_server.py"))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def server_in(folder: Path, command: tuple[str, ...] = FAKE, ready_seconds: float = 30.0) -> ServerProcess:
    return ServerProcess(folder / "cache", folder / "log", command=command, ready_seconds=ready_seconds)


def test_up_inside_and_gone_outside(tmp_path: Path) -> None:
    with server_in(tmp_path) as server:
        assert server.client.healthy()
        pid = server.pid
    assert not alive(pid)


def test_gone_after_an_exception_inside(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), server_in(tmp_path) as server:
        pid = server.pid
        raise KeyboardInterrupt
    assert not alive(pid)


def test_kill_is_sigkill(tmp_path: Path) -> None:
    with server_in(tmp_path) as server:
        pid = server.pid
        server.kill()
        assert not alive(pid)
        assert server._process is not None
        assert server._process.returncode == -signal.SIGKILL


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentcache.server_process.STOP_SECONDS", 0.2)
    program = (
        "import signal, runpy; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"runpy.run_path({FAKE[1]!r}, run_name='__main__')"
    )
    with server_in(tmp_path, (sys.executable, "-c", program)) as server:
        pid = server.pid
    assert not alive(pid)


def test_a_server_that_ends_at_once_shows_its_log(tmp_path: Path) -> None:
    program = "import sys; print('the model is not there', file=sys.stderr); sys.exit(3)"
    with pytest.raises(ServerNotStarted, match=r"code 3(.|\n)*the model is not there"):
        server_in(tmp_path, (sys.executable, "-c", program)).__enter__()


def test_a_server_that_is_never_ready_is_given_up_and_killed(tmp_path: Path) -> None:
    server = server_in(tmp_path, (sys.executable, "-c", "import time; time.sleep(60)"), ready_seconds=0.3)
    with pytest.raises(ServerNotStarted, match="not ready after"):
        server.__enter__()
    assert not alive(server.pid)


def test_the_users_settings_do_not_reach_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTCACHE_API_KEY", "secret")
    program = (
        "import os, sys; print(sorted((k, v) for k, v in os.environ.items() if k.startswith('AGENTCACHE_'))); "
        "import agentcache; sys.exit(3)"
    )
    with pytest.raises(ServerNotStarted) as caught:
        server_in(tmp_path, (sys.executable, "-c", program)).__enter__()
    assert f"[('AGENTCACHE_CONFIG', '{os.devnull}')]" in str(caught.value)
    assert "ModuleNotFoundError" not in str(caught.value)


def test_sigterm_ends_in_order(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught, ending_on_signals(), server_in(tmp_path) as server:
        pid = server.pid
        os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.code == 128 + signal.SIGTERM
    assert not alive(pid)
    assert signal.getsignal(signal.SIGTERM) is before
