"""Fixtures for the engine's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conftest import ModelFolder

if TYPE_CHECKING:
    from tests.serving.saved import Saved


@pytest.fixture(scope="session")
def model(model_folder: ModelFolder) -> Path:
    """The smallest model with two cache groups, for what does not depend on the architecture."""
    return model_folder("mistral", num_hidden_layers=2)


@pytest.fixture(scope="session")
def qwen3(model_folder: ModelFolder) -> Path:
    """The model of the adapters' tests: eight layers in four cache groups."""
    return model_folder("qwen3")


@pytest.fixture(scope="session")
def folders(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters for it that differ in everything that matters. Shared: copy them before changing them."""
    from tests.serving.adapter_cases import make_folders  # imports mlx; plain-Python tests stay quick without it

    return make_folders(tmp_path_factory.mktemp("adapters"), qwen3)


@pytest.fixture(scope="session")
def saved(model: Path, model_folder: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """An agent after two turns. Its cache folder is shared: copy it before changing it."""
    from tests.serving.saved import save_two_turns  # imports mlx; plain-Python tests stay quick without it

    other = model_folder("mistral", seed=1, num_hidden_layers=2)
    return save_two_turns(model, other, tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="session")
def hybrid(files_known: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a model with recurrent layers by its file's name in mlx-lm, each once."""
    from tests.serving.hybrids import write_hybrid  # imports mlx; plain-Python tests stay quick without it

    made: dict[str, Path] = {}

    def make(file: str) -> Path:
        if file not in made:
            made[file] = write_hybrid(tmp_path_factory.mktemp(file), file)
        return made[file]

    return make


@pytest.fixture(scope="session")
def qwen(hybrid: Callable[[str], Path]) -> Path:
    """The model of most tests with recurrent layers."""
    return hybrid("qwen3_5")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels run in the emulator."""
    from agentcache.kv.backing import Reserved
    from agentcache.metal_kernels.self_test import Verdict  # imports mlx; plain-Python tests stay quick without it
    from agentcache.models import fused
    from agentcache.models.fused import KernelMemo
    from tests.metal_kernels.conftest import KERNELS, emulated
    from tests.metal_kernels.emulator.build import clang
    from tests.metal_kernels.emulator.run import Schedule

    if clang() is None:
        pytest.skip("the kernels' emulator needs clang 18 or newer")
    for kernel in KERNELS:
        plain = emulated(kernel, Schedule(check=False), [], lambda launch: launch)
        monkeypatch.setitem(kernel.__dict__, "metal", plain)
    monkeypatch.setattr(fused, "device", lambda: "metal")
    # The emulator looks at all of what a kernel is given: at the largest size that an arena may have.
    monkeypatch.setattr(Reserved, "make", lambda *_: None)
    monkeypatch.setattr(fused, "try_kernels", lambda shape: Verdict(True))
    monkeypatch.setattr(fused, "memo", KernelMemo())
    memories = (fused.mode, fused.why_none, fused._tried)
    for memory in memories:
        memory.cache_clear()
    fused._by_now.clear()
    yield
    fused._by_now.clear()
    for memory in memories:
        memory.cache_clear()
