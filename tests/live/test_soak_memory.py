"""What compares a soak's memory with memory computed anew: the same tokens are alike, others are not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save

from agentcache.models.builtin.embedded import embedded_model_path
from agentcache.server_process import ServerProcess
from agentcache.store.verify import verify_folder
from benchmarks.soak.judge import ALIKE, differences, recompute
from tests.live.servers import serving

pytestmark = pytest.mark.slow

LENGTHS = (40, 300, 700)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedded_model_path(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def soaked(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with an agent of each length, cached in pieces; two agents share what they begin with."""
    folder, rng = tmp_path_factory.mktemp("soaked") / "cache", random.Random(3)
    with serving(model, folder) as server:
        for length in LENGTHS:
            ids = rng.choices(range(300, 1000), k=length)
            for end in (*sorted(rng.sample(range(1, length), 3)), length):
                server.client.cache_prompt(ids[:end], agent=f"agent-{length}")
        server.client.cache_prompt([*ids[:300], *ids[:20]], agent="branch")
    return folder


@pytest.fixture(scope="module")
def quiet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Path]]:
    folder = tmp_path_factory.mktemp("quiet") / "cache"
    with serving(model, folder) as server:
        yield server, folder


def test_memory_of_the_same_tokens_is_alike(soaked: Path, quiet: tuple[ServerProcess, Path]) -> None:
    server, folder = quiet
    assert recompute(soaked, server.client) == len(LENGTHS) + 1
    found = differences(soaked, folder)
    assert len(found) == verify_folder(soaked).blocks > 5
    assert max(found.values()) < ALIKE / 2


def test_a_block_that_is_not_there_differs(soaked: Path, tmp_path: Path) -> None:
    assert set(differences(soaked, tmp_path).values()) == {float("inf")}


def test_memory_of_other_tokens_is_not_alike(soaked: Path, quiet: tuple[ServerProcess, Path], tmp_path: Path) -> None:
    """A whole block in the place of another, and a block whose tokens are one place further."""
    server, folder = quiet
    recompute(soaked, server.client)
    blocks = sorted(folder.glob("blocks/??/*"), key=lambda path: -path.stat().st_size)[:5]
    for name, damage in (("other", lambda path: blocks[blocks.index(path) - 1].read_bytes()), ("shifted", shifted)):
        for path in blocks:
            damaged = tmp_path / name / path.relative_to(folder)
            damaged.parent.mkdir(parents=True, exist_ok=True)
            damaged.write_bytes(damage(path))
        assert min(differences(tmp_path / name, folder).values()) > ALIKE


def shifted(path: Path) -> bytes:
    with safe_open(path, "np") as file:
        metadata = file.metadata()
    return save({name: np.roll(array, 1, axis=1) for name, array in load_file(path).items()}, metadata)
