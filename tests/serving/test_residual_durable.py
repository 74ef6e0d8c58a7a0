"""Agents that share residually, through the engine: kills, damage, lost files, adapters that are not there, forks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentcache.llm import LLM, Completion
from agentcache.store.verify import verify_folder
from tests.adapters_factory import make_adapter, write_mlx_lm
from tests.serving import inside
from tests.serving.adapter_cases import all_ids, ask, open_adapters
from tests.serving.block_damage import block_files, flip
from tests.serving.conversation import make_ids
from tests.serving.residual_damage import RESIDUAL_DAMAGE, damage_residuals, is_residual, residual_files

TARGETS = ("self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj")
PROMPT, NEW = make_ids(520, seed=1), make_ids(9, seed=2)


@contextmanager
def serving(saved: Saved, cache_dir: Path, names: tuple[str, ...] = ("math", "poet")) -> Iterator[LLM]:
    folders = {name: saved.folders[name] for name in names}
    with open_adapters(saved.model, cache_dir, folders, max_divergence=100.0) as llm:
        yield llm


def talk(llm: LLM, ids: list[int], agent: str = "alice", adapter: str = "math") -> Completion:
    return ask(llm, ids, adapter, policy="residual", agent=agent)


@dataclass(frozen=True)
class Saved:
    """An agent after one turn, and what its next one says where everything is in RAM."""

    model: Path
    folders: dict[str, Path]
    cache_dir: Path
    first: Completion
    second: Completion
    hot_folder: Path

    @property
    def asked(self) -> list[int]:
        """The prompt of the second turn."""
        return [*all_ids(self.first), *NEW]

    def copy(self, folder: Path) -> Path:
        return Path(shutil.copytree(self.cache_dir, folder))

    def check_second(self, llm: LLM) -> Completion:
        second = talk(llm, self.asked)
        assert second.token_ids == self.second.token_ids
        assert (second.report.policy, second.report.saved) == ("residual", True)
        return second


@pytest.fixture(scope="module")
def saved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    root = tmp_path_factory.mktemp("residual")
    folders = {
        name: make_adapter(root / name, model, writer=write_mlx_lm, rank=rank, seed=rank, strength=0.3, targets=TARGETS)
        for name, rank in (("math", 3), ("poet", 5))
    }
    made = Saved(model, folders, root / "cache", None, None, root / "hot")  # type: ignore[arg-type]
    with serving(made, root / "hot") as llm:
        first = talk(llm, PROMPT)
        assert first.report.policy == "residual" and first.report.saved
        shutil.copytree(root / "hot", root / "cache")
        second = talk(llm, [*all_ids(first), *NEW])
        assert second.report.cache_state == "hot" and second.report.computed_tokens <= len(NEW) + 1
        assert ask(llm, PROMPT, "math", policy="exact").token_ids != ask(llm, PROMPT).token_ids, "it acts"
    return Saved(model, folders, root / "cache", first, second, root / "hot")


# -- after a restart --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_restart_computes_what_is_new(saved: Saved, tmp_path: Path) -> None:
    with serving(saved, saved.copy(tmp_path / "cache")) as llm:
        assert llm.agent("alice").cache_state == "warm" and llm.agent("alice").residual_bytes == 0
        second = saved.check_second(llm)
        assert second.report.cache_state == "warm"
        assert second.report.computed_tokens <= len(NEW) + 1 and second.report.base_computed_tokens <= len(NEW) + 1
        info, stats = llm.agent("alice"), llm.stats()
        assert info.cache_state == "hot" and info.ram_bytes > info.residual_bytes > 0
        assert info.disk_bytes > info.residual_disk_bytes > 0
        assert stats.disk_bytes_by["residual"] > 0 and (stats.ram_used["residual"] or 0) >= info.residual_bytes
        assert sum(stats.disk_bytes_by.values()) == stats.disk_bytes


@pytest.mark.slow
def test_all_of_it_comes_into_ram_at_once(saved: Saved, tmp_path: Path) -> None:
    with serving(saved, saved.copy(tmp_path / "cache")) as llm:
        assert llm.restore("alice").cache_state == "hot"
        assert llm.agent("alice").residual_bytes > 0
        assert saved.check_second(llm).report.cache_state == "hot"


# -- kills ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["ends", pytest.param("all", marks=pytest.mark.slow)])
def test_a_kill_at_any_step_of_a_turn_loses_nothing(part: str, saved: Saved, tmp_path: Path) -> None:
    """What the folder holds at each step is what a process would find that was killed there."""
    steps: list[str] = []
    cache_dir = saved.copy(tmp_path / "cache")

    def note(step: str) -> None:
        shutil.copytree(cache_dir, tmp_path / str(len(steps)))
        steps.append(step)

    with serving(saved, cache_dir) as llm:
        undo = inside.set_fault(inside.engine_of(llm), note)
        second = saved.check_second(llm)
        undo()
    assert {step.partition("-")[0] for step in steps} >= {"block", "log", "manifest"}
    chosen = range(len(steps)) if part == "all" else (0, len(steps) // 2, len(steps) - 1)
    for number in chosen:
        with serving(saved, tmp_path / str(number)) as llm:
            tokens = llm.agent("alice").tokens
            assert tokens in (len(all_ids(saved.first)), len(all_ids(second)))
            if tokens == len(all_ids(second)):  # it is durable: nothing of it is computed again
                more = talk(llm, [*all_ids(second), 17])
                assert more.report.computed_tokens <= 2 and more.report.base_computed_tokens <= 2
            else:
                again = saved.check_second(llm)
                assert again.report.computed_tokens <= len(NEW) + 1
            assert llm.stats().quarantined == 0
        assert verify_folder(tmp_path / str(number)).problems == ()
        shutil.rmtree(tmp_path / str(number))


# -- files that are wrong or lost -------------------------------------------------------------------------------------

QUICK = ("truncated", "swapped", "NaN residuals")


@pytest.mark.parametrize(
    "how", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in RESIDUAL_DAMAGE]
)
def test_a_wrong_file_of_residuals(how: str, saved: Saved, tmp_path: Path) -> None:
    cache_dir = saved.copy(tmp_path / "cache")
    damage_residuals(cache_dir, RESIDUAL_DAMAGE[how])
    with serving(saved, cache_dir) as llm:
        second = saved.check_second(llm)
        assert llm.stats().quarantined > 0
        assert second.report.base_computed_tokens <= len(NEW) + 1, "base is whole"
        assert second.report.computed_tokens > len(NEW) + 1
    assert verify_folder(cache_dir).problems == ()


@pytest.mark.slow
def test_every_file_of_residuals_is_wrong_in_turn(saved: Saved, tmp_path: Path) -> None:
    for number in range(len(residual_files(saved.cache_dir))):
        cache_dir = saved.copy(tmp_path / str(number))
        flip(residual_files(cache_dir)[number], -1)
        with serving(saved, cache_dir) as llm:
            saved.check_second(llm)
            assert llm.stats().quarantined == 1


@pytest.mark.slow
def test_a_lost_file_of_base_is_a_partial_hit(saved: Saved, tmp_path: Path) -> None:
    """Residuals behind it stay of use: base computes its tokens once more, the adapter none of them."""
    cache_dir = saved.copy(tmp_path / "cache")
    base = [path for path in block_files(cache_dir) if not is_residual(path)]
    base[2].unlink()  # of the second block
    with serving(saved, cache_dir) as llm:
        second = saved.check_second(llm)
        n = len(saved.asked)
        assert second.report.base_computed_tokens == n - 256
        assert second.report.computed_tokens == n - 256  # from where both are there
        assert llm.stats().quarantined == 0
        third = talk(llm, [*all_ids(second), 17])
        assert third.report.computed_tokens <= 2 and third.report.base_computed_tokens <= 2


# -- adapters ---------------------------------------------------------------------------------------------------------


def test_without_the_adapter_agent_and_files_stay(saved: Saved, tmp_path: Path) -> None:
    cache_dir = saved.copy(tmp_path / "cache")
    before = {path: path.read_bytes() for path in residual_files(cache_dir)}
    with serving(saved, cache_dir, ("poet",)) as llm:
        info = llm.agent("alice")
        assert info.cache_state == "warm"
        assert info.residual_disk_bytes > 0 and info.residual_bytes == 0
        ask(llm, PROMPT, agent="bob")
    assert {path: path.read_bytes() for path in residual_files(cache_dir)} == before
    with serving(saved, cache_dir) as llm:
        second = saved.check_second(llm)
        assert second.report.computed_tokens <= len(NEW) + 1


def test_an_adapter_that_goes_and_comes_back(saved: Saved, tmp_path: Path) -> None:
    with serving(saved, saved.copy(tmp_path / "cache")) as llm:
        llm.unload_adapter("math")
        assert llm.agent("alice").residual_disk_bytes > 0
        llm.load_adapter("math", saved.folders["math"])
        second = saved.check_second(llm)
        assert second.report.computed_tokens <= len(NEW) + 1


def test_a_fork_to_another_adapter_shares_base(saved: Saved, tmp_path: Path) -> None:
    with serving(saved, saved.copy(tmp_path / "cache")) as llm:
        before = llm.stats().disk_bytes_by
        forked = llm.fork("alice", "bob", adapter="poet", policy="residual")
        assert (forked.adapter, forked.policy, forked.residual_disk_bytes) == ("poet", "residual", 0)
        assert llm.fork("alice", "carl").residual_disk_bytes > 0
        assert llm.stats().disk_bytes_by["base"] == before["base"]
        said = talk(llm, saved.asked, "bob", "poet")
        assert said.report.base_computed_tokens <= len(NEW) + 1
        assert said.report.computed_tokens == len(saved.asked), "its own residuals are all new"
        assert llm.agent("bob").residual_disk_bytes > 0


@pytest.mark.parametrize(("kind", "base", "residual"), [("base", True, False), ("residual", False, True)])
def test_evictions_of_one_kind(kind: str, base: bool, residual: bool, saved: Saved, tmp_path: Path) -> None:
    with serving(saved, saved.copy(tmp_path / "cache")) as llm:
        llm.restore("alice")
        hot = llm.agent("alice")
        left = llm.evict("alice", kind=kind)
        assert (left.residual_bytes == 0, left.ram_bytes == left.residual_bytes) == (residual, base)
        assert left.disk_bytes == hot.disk_bytes and left.cache_state == "warm"
        evicted = llm.stats().evicted_blocks
        assert (evicted["base"] > 0, evicted["residual"] > 0) == (base, residual)
        second = saved.check_second(llm)
        assert second.report.cache_state == "warm" and second.report.computed_tokens <= len(NEW) + 1
