from __future__ import annotations

import errno
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from safetensors.numpy import load_file

from agentcache.cli import doctor
from agentcache.cli.doctor import examine_model
from agentcache.kv.packing import BY_CHANNEL
from agentcache.settings.config import Config
from agentcache.settings.sources import load_config
from agentcache.store.cache_files import CacheFiles
from agentcache.store.writing import FolderLock
from agentcache.system import machine
from tests.cli.conftest import Invoke
from tests.conftest import ModelFolder
from tests.serving.hybrids import write_hybrid
from tests.store.damage import agents_folder, flip
from tests.store.store_cases import make_record, make_transcript, make_turn, open_store
from tests.store.unreadable import make_newer, unreadable


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what takes processes of its own: what is said of operations and kernels has tests of its own."""
    monkeypatch.setattr(doctor, "check_ops", lambda: doctor.Check("mx ops", True, "untried"))
    monkeypatch.setattr(doctor, "check_kernels", lambda config: doctor.Check("kernels", True, "untried"))


@pytest.mark.slow
def test_doctor_examines_this_machine(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("doctor", "--json", "--cache-dir", str(tmp_path / "new" / "cache"))
    checks = {check["name"]: check for check in json.loads(result.stdout)}
    assert result.exit_code == 0, checks
    assert {
        "machine",
        "versions",
        "device",
        "mx ops",
        "cache folder",
        "disk budget",
        "model",
        "cache",
        "memory",
        "kernels",
    } <= set(checks)
    [kind] = checks["kernels"]["data"]
    assert (kind["kind"], kind["heads"], kind["layers"]) == ("full", "4/2 x 64", 8)
    assert kind["by"] == "kernel" or kind["why"] == "this device compiles no kernels"
    assert checks["kernels"]["detail"].startswith(f"full: {kind['by']}")
    assert "keys and values in 4 bits" in checks["model"]["detail"]
    assert "mlx" in checks["versions"]["detail"]
    assert not (tmp_path / "new").exists()


def test_its_help_says_the_default_format(invoke: Invoke) -> None:
    text = " ".join(invoke("doctor", "--help").stdout.replace("│", " ").split())
    assert "Format of cached keys and values (auto)." in text


def test_a_check_that_fails_is_exit_code_1(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda config, model: iter([doctor.Check("device", False, "none")]))
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


@pytest.mark.usefixtures("untried")
def test_agents_that_cannot_be_read_are_named(invoke: Invoke, tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for name in ("alice", "bob"):
            store.save_agent(make_record(name, make_transcript(5)))
    make_newer(agents_folder(tmp_path) / "alice.json")
    checks = {check.name: check for check in doctor.check_readable(tmp_path)}
    assert not checks["agents"].ok and "newer release" in checks["agents"].detail
    with unreadable({agents_folder(tmp_path) / "bob.1.log": errno.EACCES}):
        reasons = [check.detail for check in doctor.check_readable(tmp_path)]
    assert len(reasons) == 2 and "bob.1.log cannot be read: Permission denied" in reasons[1]
    assert [check.ok for check in doctor.check_readable(tmp_path / "none")] == [True]


def test_quarantined_files_are_counted(tmp_path: Path) -> None:
    (tmp_path / "quarantine").mkdir()
    (tmp_path / "quarantine" / "x").touch()
    assert doctor.check_quarantine(tmp_path).detail.startswith("1 ")


def test_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "fast_blas", lambda: "/usr/lib/libopenblas.so.0")
    assert machine.describe_blas() == "preloaded: /usr/lib/libopenblas.so.0"
    monkeypatch.setattr(machine, "fast_blas", lambda: "")
    monkeypatch.setattr(machine, "installed_openblas", lambda: "/usr/lib/libopenblas.so.0")
    assert "LD_PRELOAD=/usr/lib/libopenblas.so.0" in machine.describe_blas()
    monkeypatch.setattr(machine, "installed_openblas", lambda: "")
    assert "apt-get install" in machine.describe_blas()


@pytest.mark.usefixtures("untried")
@pytest.mark.slow
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


@contextmanager
def answering(answers: dict[str, Any]) -> Iterator[str]:
    """A server that says these."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(answers[self.path]).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def findings(result: Result) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in json.loads(result.stdout)}


@pytest.mark.usefixtures("untried")
def test_what_is_served_of_a_model(invoke: Invoke, tmp_path: Path, model_folder: ModelFolder) -> None:
    folder = model_folder("gemma3_text")
    result = invoke("doctor", "--json", "--model", str(folder), "--cache-dir", str(tmp_path / "cache"))
    found = findings(result)
    assert result.exit_code == 0 and found["model"]["data"]["kv_bits"] == 4
    groups = found["cache"]["data"]
    assert {group["kind"] for group in groups} == {"full", "window"}
    assert all(group["bytes_per_block"] == 256 * group["bytes_per_token"] > 0 for group in groups)
    weights = sum(array.nbytes for array in load_file(folder / "model.safetensors").values())
    memory = found["memory"]["data"]
    assert memory["weights"] == weights
    assert memory["weights"] + memory["ram_budget"] + memory["temporaries"] <= memory["limit"]
    assert memory["agents_of_8k"] > 0 and memory["longest_agent_tokens"] == found["model"]["data"]["max_model_len"]
    text = invoke("doctor", "--model", str(folder), "--cache-dir", str(tmp_path / "cache")).stdout
    assert "a token" in text and "window of" in text and "of 8,192 in RAM at once" in text


@pytest.mark.usefixtures("untried")
@pytest.mark.slow
def test_a_model_that_does_not_fit_says_so(invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AGENTCACHE_MEMORY_LIMIT", "20MB")
    result = invoke("doctor", "--json", "--cache-dir", str(tmp_path / "cache"))
    model = findings(result)["model"]
    assert result.exit_code == 1 and not model["ok"]
    assert "does not fit" in model["detail"] and "--memory-limit" in model["detail"]


@pytest.mark.usefixtures("untried")
def test_a_model_that_is_not_served_says_why(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("doctor", "--json", "--model", str(tmp_path), "--cache-dir", str(tmp_path / "cache"))
    assert result.exit_code == 1 and "not a model folder" in findings(result)["model"]["detail"]


def test_a_running_server_is_asked_and_no_second_copy_is_loaded(tmp_path: Path) -> None:
    group = {"name": "state.0", "kind": "state", "window": None, "layers": 0, "bytes_per_token": 0}
    groups = [group | {"bytes_per_snapshot": 2 * 10**6, "bytes_per_block": 2 * 10**6}]
    model = {"id": "org/hybrid", "max_model_len": 4096, "kv_bits": None, "cache_groups": groups}
    accounts = {"weights": {"capacity_bytes": 5 * 10**8}, "state": {"floor_bytes": 3 * 10**7}}
    stats = {"memory_limit": 10**9, "ram_budget": 10**8, "ram_accounts": accounts}
    answers = {"/v1/models": {"data": [model]}, "/v1/cache/stats": stats}
    with answering(answers) as url:
        found = {each.name: each for each in examine_model(Config(cache_dir=tmp_path), url)}
    assert found["cache"].detail == "state (state.0): 2.0 MB a snapshot"
    assert found["memory"].data["agents_of_8k"] == 15, "no more than there is room for states"
    assert found["model"].detail.endswith("no keys and values")


@pytest.mark.parametrize(
    ("kv", "told"),
    [
        ({"kv_bits": 4, "kv_precision": "4", "kv_format": BY_CHANNEL.words}, "in 4 bits, keys by channel"),
        ({"kv_bits": 4, "kv_precision": "4", "kv_format": None}, "in 4 bits"),  # of an earlier server
        ({"kv_bits": 4.5, "kv_precision": None, "kv_format": None}, "in 4.5 bits"),
    ],
)
def test_a_model_is_told_with_its_format(kv: dict[str, Any], told: str) -> None:
    found = doctor._model("m", 4096, kv | {"kv_divergence": 0.0031})
    assert found.detail.endswith(f"keys and values {told}, which moves its logits by 0.0031 nats")
    assert found.data == {"id": "m", "max_model_len": 4096, "kv_divergence": 0.0031, **kv}


@pytest.mark.slow
@pytest.mark.usefixtures("untried")
def test_states_of_agents_have_a_share_of_the_memory(invoke: Invoke, tmp_path: Path) -> None:
    """Of a hybrid as many agents fit as both shares hold, that of keys and values and that of states."""
    (tmp_path / "model").mkdir()
    folder = write_hybrid(tmp_path / "model", "kimi_linear")
    command = ["doctor", "--json", "--model", str(folder), "--cache-dir", str(tmp_path / "cache")]
    found = findings(invoke(*command))
    groups = found["cache"]["data"]
    latents, state = (
        sum(group["bytes_per_block"] for group in groups if group["kind"] == kind) for kind in ("latent", "state")
    )
    assert "latent (" in found["cache"]["detail"] and "a snapshot" in found["cache"]["detail"]
    budget = found["memory"]["data"]["ram_budget"]
    expected = min((budget - int(budget * 0.25)) // (32 * latents), int(budget * 0.25) // state)
    assert found["memory"]["data"]["agents_of_8k"] == expected


@pytest.mark.slow
def test_kernels_of_the_served_model(model_folder: ModelFolder, tmp_path: Path) -> None:
    check = doctor.check_kernels(load_config({"model": str(model_folder("gemma3_text"))}))
    assert check.ok
    kinds = check.data
    assert [(kind["kind"], kind["window"], kind["layers"]) for kind in kinds] == [("window", 32, 7), ("full", None, 1)]
    assert all(kind["by"] == "kernel" or kind["why"] for kind in kinds)
    elsewhere = doctor.check_kernels(load_config({"model": "owner/name"}))
    assert "owner/name is not a folder here" in elsewhere.detail
    (tmp_path / "config.json").write_text("{}")
    assert "nothing could be tried" in doctor.check_kernels(load_config({"model": str(tmp_path)})).detail


@pytest.mark.slow
def test_a_hub_model_that_was_fetched_is_tried(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--owner--name"
    (repository / "snapshots").mkdir(parents=True)
    (repository / "snapshots" / ("0" * 40)).symlink_to(model_folder("llama", num_hidden_layers=2))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    [kind] = doctor.check_kernels(load_config({"model": "owner/name"})).data
    assert kind["layers"] == 2
