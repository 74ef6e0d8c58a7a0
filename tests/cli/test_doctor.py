from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentcache.cli import doctor
from agentcache.store.cache_files import CacheFiles
from agentcache.store.lock import FolderLock
from tests.cli.conftest import Invoke
from tests.kv.damage import flip
from tests.kv.store_cases import make_record, make_transcript, make_turn, open_store


def test_doctor_examines_this_machine(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("doctor", "--json", "--cache-dir", str(tmp_path / "new" / "cache"))
    checks = {check["name"]: check for check in json.loads(result.stdout)}
    assert result.exit_code == 0, checks
    assert {"machine", "versions", "device", "mx ops", "cache folder", "ram budget", "disk budget"} <= set(checks)
    assert "mlx" in checks["versions"]["detail"]
    assert not (tmp_path / "new").exists()


def test_a_check_that_fails_is_exit_code_1(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda config: iter([doctor.Check("device", False, "none")]))
    result = invoke("doctor")
    assert result.exit_code == 1 and result.stdout.startswith("FAIL  device")


def test_ops_that_end_badly_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "OPS_SCRIPT", "raise RuntimeError('no device')")
    assert doctor.check_ops() == doctor.Check("mx ops", False, "RuntimeError: no device")
    monkeypatch.setattr(doctor, "OPS_SCRIPT", "import os; os._exit(3)")
    assert doctor.check_ops() == doctor.Check("mx ops", False, "ended with code 3")


def test_folder_states(tmp_path: Path) -> None:
    assert doctor.check_folder(tmp_path).ok
    lock = FolderLock(CacheFiles(tmp_path))
    assert "in use" in doctor.check_folder(tmp_path).detail
    lock.release()
    assert "in use" not in doctor.check_folder(tmp_path).detail
    (tmp_path / "file").touch()
    assert not doctor.check_folder(tmp_path / "file").ok


def test_quarantined_files_are_counted(tmp_path: Path) -> None:
    (tmp_path / "quarantine").mkdir()
    (tmp_path / "quarantine" / "x").touch()
    assert doctor.check_quarantine(tmp_path).detail.startswith("1 ")


def test_blas() -> None:
    assert "libopenblas" in doctor.describe_blas("/usr/lib/libopenblas.so.0")
    assert "LD_PRELOAD" in doctor.describe_blas("")


def test_every_file_is_verified_on_request(invoke: Invoke, tmp_path: Path) -> None:
    cache_dir = tmp_path / "cache"
    with open_store(cache_dir) as store:
        record = make_record("alice", make_transcript(300))
        store.write_blocks(make_turn(record))
        store.save_agent(record)

    def content() -> tuple[int, list[dict[str, object]]]:
        result = invoke("doctor", "--check", "--json", "--cache-dir", str(cache_dir))
        checks = json.loads(result.stdout)
        return result.exit_code, [check for check in checks if check["name"] in ("content", "bad file")]

    exit_code, [found] = content()
    assert exit_code == 0 and str(found["detail"]).startswith("1 agents, 4 blocks")
    flip(next((cache_dir / "blocks").glob("??/*.safetensors")))
    exit_code, [found, bad] = content()
    assert exit_code == 1 and not found["ok"] and "checksum" in str(bad["detail"])
