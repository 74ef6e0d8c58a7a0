"""What several ranks do not do is refused by name, before anything is computed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentcache.cli.serve import launch_on, without_hosts
from agentcache.errors import ConfigError, UnsupportedModel
from agentcache.kv.packing import LayerBits, Precision
from agentcache.kv.spec import RecurrentSpec, StateTensor
from agentcache.models.adapter_files import LowRank, ModuleName
from agentcache.models.loader import load, read_model
from agentcache.models.shards import Shards
from agentcache.ranks.executors import Executor, PrecisionOfRank0, join, rank_settings
from agentcache.ranks.folders import own_rank, rank_folder, rank_folders
from agentcache.settings.config import Config
from tests.adapters_factory import random_matrices
from tests.conftest import ModelFolder
from tests.store.store_cases import SPEC


def group(rank: int = 1, size: int = 2) -> Any:
    """Who somebody is, among ranks that nobody speaks to here."""
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


@pytest.mark.parametrize(
    ("field", "value"), [("max_divergence", 0.2), ("trunk_budget", 1 << 20)], ids=["residuals", "trunk"]
)
def test_settings_that_ranks_cannot_keep_are_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        rank_settings(replace(Config(), **{field: value}), Shards(group()))


def test_each_rank_of_each_world_has_a_folder_of_its_own(tmp_path: Path) -> None:
    config = Config(cache_dir=tmp_path)
    worlds = [(0, 2), (1, 2), (0, 4)]
    folders = [rank_settings(config, Shards(group(*each))).cache_dir for each in worlds]
    assert folders == [rank_folder(tmp_path, *each) for each in worlds]
    for folder in (*folders, tmp_path / "blocks", tmp_path / "rank-x-of-2"):
        folder.mkdir()
    assert rank_folders(tmp_path) == sorted(folders)
    assert rank_folders(tmp_path / "nowhere") == []


def test_a_process_that_nobody_launched_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLX_RANK", raising=False)
    assert own_rank() is None
    assert type(join(Config(), lambda function: None, lambda lost: None)) is Executor
    monkeypatch.setenv("MLX_RANK", "1")
    assert own_rank() == 1


def test_a_model_without_shard_is_refused_by_name(model_folder: ModelFolder) -> None:
    with pytest.raises(UnsupportedModel, match="gemma3_text cannot be spread over 2 ranks"):
        Shards(group()).spread(read_model(str(model_folder("gemma3_text"))).model)


def test_heads_that_do_not_divide_are_refused(model_folder: ModelFolder) -> None:
    model = read_model(str(model_folder("llama"))).model  # 4 query heads, 2 of keys and values
    with pytest.raises(UnsupportedModel, match=r"layer 0 has 4 heads .* 3 ranks"):
        Shards(group(0, 3)).spread(model)
    with pytest.raises(UnsupportedModel, match=r"layer 0 has 2 heads \(n_kv_heads\), which 4 ranks"):
        Shards(group(0, 4)).spread(model)


def test_recurrent_state_is_refused() -> None:
    hybrid = replace(SPEC, recurrent=(RecurrentSpec(1, (StateTensor((4, 8), "float32"),)),))
    with pytest.raises(UnsupportedModel, match="tiny keeps recurrent state"):
        Shards(group()).spec(hybrid)


def test_an_adapters_matrices_are_cut_as_their_modules_are(model_folder: ModelFolder) -> None:
    folder = model_folder("llama")
    whole, spread = load(str(folder), kv="4t"), read_model(str(folder)).model
    shards = Shards(group(1, 2))
    shards.spread(spread)
    modules = shards.whole(whole.adapters.modules)
    assert modules.linears == whole.adapters.modules.linears
    for path, inputs, outputs in (("self_attn.q_proj", 1, 2), ("self_attn.o_proj", 2, 1)):
        name = ModuleName(1, path)
        pair = random_matrices(folder, [path])[f"model.layers.1.{path}"]
        module = dict(spread.layers[1].named_modules())[path]
        part = shards.cut(name, LowRank(pair.a, pair.b), module)
        in_dim, out_dim = pair.a.shape[0] // inputs, pair.b.shape[1] // outputs
        assert (part.a == pair.a[-in_dim:]).all() and part.a.shape == (in_dim, 3)
        assert (part.b == pair.b[:, -out_dim:]).all() and part.b.shape == (3, out_dim)


def test_bits_are_as_rank_0_says() -> None:
    """Its setting, what it has kept, and what it has measured: the others take these, also where they have others."""
    heard: list[bytes] = []

    def of_first(own: bytes) -> list[bytes]:
        heard.append(own)
        return [own, b"nothing"]

    def of_second(own: bytes) -> list[bytes]:
        return [heard.pop(0), own]

    first, second = (PrecisionOfRank0(SimpleNamespace(exchange=each)) for each in (of_first, of_second))  # type: ignore[arg-type]
    chosen = Precision((LayerBits(8, 4), LayerBits(4, 4)), 0.001)
    assert first.setting("auto") == second.setting("16") == "auto"
    assert first.kept(chosen) == second.kept(None) == chosen
    assert first.kept(None) is second.kept(chosen) is None
    assert first.divergence(0.004) == second.divergence(0.006) == 0.004
    assert first.divergence(math.inf) == second.divergence(0) == math.inf


def test_hosts_are_for_the_launcher_alone(tmp_path: Path) -> None:
    given = ["serve", "--hosts", "two.json", "--model", "m", "--hosts=three.json", "--port", "1"]
    assert without_hosts(given) == ["serve", "--model", "m", "--port", "1"]
    with pytest.raises(ConfigError, match="no file"):
        launch_on(tmp_path / "none.json", given)
