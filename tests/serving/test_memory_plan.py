"""The plan of memory as an engine keeps to it, from its start to its end."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from safetensors.numpy import load_file

from agentcache.engine import open as opening
from agentcache.errors import AgentCacheError, ConfigError, StoreError
from agentcache.kv.backing import allocated_bytes
from agentcache.models import loader, probe
from agentcache.models.memory import MEMORY, Setter
from agentcache.settings.memory_plan import DeviceMemory
from tests.conftest import ModelFolder
from tests.device_marks import cpu_chunks
from tests.held_memory import held_bytes
from tests.marks import slow
from tests.serving import inside
from tests.serving.by_hand import by_hand
from tests.serving.conversation import greedy, make_ids, open_llm

MB = 10**6


def memory_limit() -> int:
    """MLX's, of what is more than addresses."""
    return mx.get_memory_limit() + allocated_bytes() - mx.get_active_memory()


class Wired:
    """Stands for Metal's wired limit, which this machine may not have."""

    def __init__(self, patch: pytest.MonkeyPatch, total: int = 16 << 30) -> None:
        self.value, self.most = 0, 0
        device = DeviceMemory(total, total * 2 // 3)
        patch.setattr(opening, "device_memory", lambda: device)
        wanted = opening.wanted_limits
        patch.setattr(
            opening,
            "wanted_limits",
            lambda plan: [
                *((setter, limit) for setter, limit in wanted(plan) if setter is MEMORY),
                (Setter("wired", self.set), plan.wired),
            ],
        )

    def set(self, value: int) -> int:
        before, self.value, self.most = self.value, value, max(self.most, value)
        return before


@cpu_chunks
def test_what_is_wired_is_what_is_planned_and_ends_with_the_engine(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wired = Wired(monkeypatch)
    weights = sum(array.nbytes for array in load_file(model / "model.safetensors").values())
    with by_hand(model, tmp_path / "on", ram_budget=64 * MB) as hand:
        use = {each.kind: each for each in hand.engine.stats().ram_accounts}
        assert use["weights"].capacity_bytes == use["weights"].used_bytes == weights
        budgets = 64 * MB + 64 * MB // 8  # of the cache, and of hidden states
        assert wired.value == weights + budgets + use["temporaries"].floor_bytes < 300 * MB
        hand.run(hand.submit(make_ids(300), greedy(2)))
        assert wired.value == wired.most
    assert wired.value == 0
    with by_hand(model, tmp_path / "off", wired_limit=0):
        assert wired.value == 0
    with by_hand(model, tmp_path / "given", wired_limit=99 * MB):
        assert wired.value == 99 * MB
    assert wired.value == 0


def test_nothing_stays_wired_when_the_engine_does_not_start(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wired = Wired(monkeypatch)
    (tmp_path / "file").touch()
    with pytest.raises(StoreError), by_hand(model, tmp_path / "file"):
        pass
    assert wired.most > 0 == wired.value


def test_nothing_stays_wired_when_the_device_has_failed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wired = Wired(monkeypatch)

    class Broken(Exception):
        pass

    def fail() -> None:
        raise Broken

    with pytest.raises(Broken), by_hand(model, tmp_path) as hand:
        monkeypatch.setattr(hand.engine.device, "wait", fail)
        assert wired.value > 0
    assert wired.value == 0


def test_mlx_knows_the_limit_while_the_engine_runs(model: Path, tmp_path: Path) -> None:
    before = memory_limit()
    with open_llm(model, tmp_path, memory_limit=700 * MB) as llm:
        assert memory_limit() == llm.stats().memory_limit == 700 * MB
    assert memory_limit() == before


def test_weights_that_do_not_fit_are_not_read(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[loader.ReadModel] = []
    monkeypatch.setattr(loader.ReadModel, "evaluate", read.append)
    with (
        pytest.raises(ConfigError, match=r"does not fit: .* MB of weights.*--memory-limit"),
        by_hand(model, tmp_path, memory_limit=MB),
    ):
        pass
    assert read == []


def test_a_cache_that_does_not_fit_beside_the_weights(model: Path, tmp_path: Path) -> None:
    wrong = r"ram_budget = 340\.0 MB is more than the .* left of memory_limit = 350\.0 MB"
    with pytest.raises(ConfigError, match=wrong), by_hand(model, tmp_path, memory_limit=350 * MB, ram_budget=340 * MB):
        pass


@cpu_chunks
def test_a_budget_that_is_not_given_is_what_the_model_leaves(model: Path, tmp_path: Path) -> None:
    with by_hand(model, tmp_path, memory_limit=200 * MB, ram_budget=None) as hand:
        use = {each.kind: each for each in hand.engine.stats().ram_accounts}
        parts = use["weights"].capacity_bytes + use["temporaries"].floor_bytes + hand.engine.stats().ram_budget
        assert parts == 200 * MB
        hand.run(hand.submit(make_ids(900), greedy(2)))


@cpu_chunks
@pytest.mark.parametrize("architecture", ["mistral", slow("deepseek_v2"), slow("gemma3"), slow("qwen3_moe")])
def test_measured_steps_and_the_cache_stay_within_the_limit(
    architecture: str, model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_MOST_SECONDS", 1e9)
    model, written = model_folder(architecture), list[str]()
    for _ in range(2):
        before = held_bytes()
        with by_hand(model, tmp_path, memory_limit=200 * MB, ram_budget=None, warm=True) as hand:
            assert inside.footprint(hand.engine).needs is not None
            use = {each.kind: each for each in hand.engine.stats().ram_accounts}
            planned = use["weights"].capacity_bytes + use["temporaries"].floor_bytes + hand.engine.stats().ram_budget
            assert planned <= 200 * MB
            mx.reset_peak_memory()
            hand.run(*(hand.submit(make_ids(400, seed), greedy(2)) for seed in range(2)))
            untouched = mx.get_active_memory() - allocated_bytes()
            assert mx.get_peak_memory() - untouched - before <= planned
        written.append((tmp_path / "steps.json").read_text())
    assert written[0] == written[1], "the second start measures nothing, and has the same plan"


def test_a_file_that_breaks_off_is_no_model(model: Path, tmp_path: Path) -> None:
    """Weights are read after the model has been made: what is wrong with them then is said the same way."""
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in model.iterdir():
        content = file.read_bytes()
        (broken / file.name).write_bytes(content[:-1000] if file.suffix == ".safetensors" else content)
    with pytest.raises(AgentCacheError, match="cannot be loaded"):
        loader.load(str(broken), kv="4t")


def test_the_reserve_is_kept_from_growth(model: Path, tmp_path: Path) -> None:
    with by_hand(model, tmp_path) as hand:
        reserve = inside.reserve(hand.engine)
        inside.set_free_memory(hand.engine, lambda: 2 * reserve)
        assert hand.engine.cache.allocator.headroom() == int(1.8 * reserve) - reserve
