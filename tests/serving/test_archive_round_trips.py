"""Agents of every kind of cache, exported and brought in: they go on warm, bit for bit as after a restart."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from agentcache.kv.packing import LayerBits, Precision
from agentcache.llm import LLM, Completion
from agentcache.store.archive import Exported, export_agent
from agentcache.store.model_files import write_precision
from agentcache.store.verify import verify_folder
from tests.adapters_factory import ATTENTION, make_adapter, random_matrices, write_mlx_lm
from tests.conftest import ModelFolder
from tests.marks import slow
from tests.serving.adapter_cases import all_ids, ask, open_adapters
from tests.serving.conversation import make_ids, outcome
from tests.serving.hybrids import EVERY, snapshot_files
from tests.serving.residual_cases import UNLIMITED
from tests.serving.test_hybrid_adapters import targets

NEW = 20
Options = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A kind of agent.

    Args:
        turns: how its conversations are asked for; each has turns of its own.
        adapters: folders by name.
        settings: of every engine.
        prepare: makes a cache folder ready, before an engine opens it.
    """

    model: Path
    turns: Sequence[Options] = ({},)
    adapters: dict[str, Path] = field(default_factory=dict)
    settings: Options = field(default_factory=dict)
    prepare: Callable[[Path], None] = lambda folder: None

    @contextmanager
    def open(self, cache_dir: Path) -> Iterator[LLM]:
        self.prepare(cache_dir)
        with open_adapters(self.model, cache_dir, self.adapters, **self.settings) as llm:
            yield llm

    def first_turns(self, llm: LLM, agent: str) -> list[list[int]]:
        """Two turns of each conversation; what the contexts are then."""
        contexts = []
        for number, options in enumerate(self.turns):
            ids = make_ids(600 - 40 * number, seed=number)
            for turn in range(2):
                ids = all_ids(self.ask(llm, ids, agent, options))
                ids = [*ids, *make_ids(NEW * (1 - turn), seed=100 + number)]
            contexts.append(ids)
        return contexts

    def next_turns(self, llm: LLM, agent: str, contexts: list[list[int]], seed: int) -> list[Completion]:
        prompts = [[*ids, *make_ids(NEW, seed=seed)] for ids in contexts]
        said = [self.ask(llm, ids, agent, options) for ids, options in zip(prompts, self.turns, strict=True)]
        contexts[:] = [all_ids(each) for each in said]
        return said

    def ask(self, llm: LLM, ids: list[int], agent: str, options: Options) -> Completion:
        said = ask(llm, ids, agent=agent, **options)
        assert said.report.saved and said.report.policy == options.get("policy", said.report.policy)
        return said


def check_round_trip(case: Case, root: Path) -> Exported:
    """Under the same name and another one, in a new folder and in one that has some of the blocks."""
    with case.open(root / "here") as llm:
        contexts = case.first_turns(llm, "alice")
        known = len(llm.agent("alice").lineages)
    told = export_agent(root / "here", "alice", root / "file")
    assert (told.lineages, told.missing_blocks) == (known, 0)
    assert told.blocks == len(list((root / "here").rglob("*.safetensors")))
    restarted = contexts.copy()
    with case.open(Path(shutil.copytree(root / "here", root / "restarted"))) as llm:
        expected = [case.next_turns(llm, "alice", restarted, seed) for seed in (7, 8)]
    for agent, folder in (("alice", "fresh"), ("bob", "shared")):
        mine = contexts.copy()
        with case.open(root / folder) as llm:
            if folder == "shared":
                case.ask(llm, mine[0][:400], "carol", case.turns[0])
            imported = llm.import_agent(agent, root / "file")
            assert (imported.cache_state, len(imported.lineages)) == ("warm", known)
            check_as_restarted(case.next_turns(llm, agent, mine, 7), expected[0])
        with case.open(root / folder) as llm:
            check_as_restarted(case.next_turns(llm, agent, mine, 8), expected[1], hot=True)
        assert verify_folder(root / folder).problems == ()
    return told


def check_as_restarted(said: list[Completion], expected: list[Completion], *, hot: bool = False) -> None:
    """The same bits, and no token more is computed; `hot` if what was restarted has not been restarted again."""
    for mine, theirs in zip(said, expected, strict=True):
        assert outcome(mine) == outcome(theirs)
        assert mine.report.cache_state == "warm" and mine.report.saved and mine.report.lost_tokens == 0
        assert mine.report.computed_tokens <= max(theirs.report.computed_tokens, NEW + 2 if hot else 0)


@pytest.mark.parametrize("architecture", ["llama", slow("gemma3_text"), slow("deepseek_v2"), slow("gpt_oss")])
def test_attention(architecture: str, model_folder: ModelFolder, ram_path: Path) -> None:
    options = {"num_hidden_layers": 2} if architecture == "llama" else {}
    check_round_trip(Case(model_folder(architecture, **options)), ram_path)


@pytest.mark.parametrize("file", ["qwen3_5", slow("lfm2"), slow("mamba2"), slow("falcon_h1"), slow("kimi_linear")])
def test_recurrent_layers(file: str, hybrid: Callable[[str], Path], ram_path: Path) -> None:
    case = Case(hybrid(file), settings={"snapshot_tokens": EVERY})
    check_round_trip(case, ram_path)
    assert len(snapshot_files(ram_path / "here")) > 0
    assert len(snapshot_files(ram_path / "fresh")) > 0


@pytest.mark.slow
def test_recurrent_layers_with_salts_and_forks(hybrid: Callable[[str], Path], ram_path: Path) -> None:
    turns = ({}, {"salt": "a"}, {"salt": "b"})
    assert check_round_trip(Case(hybrid("qwen3_5"), turns), ram_path).lineages == 3


@pytest.mark.slow
def test_several_conversations_with_salts(model: Path, ram_path: Path) -> None:
    assert check_round_trip(Case(model, ({}, {"salt": "a"}, {"salt": "b"})), ram_path).lineages == 3


@pytest.mark.parametrize("kv", [slow("8"), slow("k8v4"), slow("16")])
def test_other_precisions(kv: str, model: Path, ram_path: Path) -> None:
    check_round_trip(Case(model, settings={"kv": kv}), ram_path)


@pytest.mark.slow
def test_groups_in_different_precisions(model: Path, ram_path: Path) -> None:
    with open_adapters(model, ram_path / "look", {}) as llm:
        fingerprint = llm.model.fingerprint

    def prepare(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        write_precision(folder, fingerprint, Precision((LayerBits(16, 16), LayerBits(8, 4)), 0.001))

    check_round_trip(Case(model, settings={"kv": "auto"}, prepare=prepare), ram_path)


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two of their own, and two with the same As."""
    root = tmp_path_factory.mktemp("adapters")
    recipes: dict[str, dict[str, Any]] = {"ann": {"seed": 1}, "bob": {"seed": 2, "rank": 5}}
    recipes |= {name: {"seed": seed, "family": 77} for seed, name in enumerate(("cyd", "dan"), 3)}
    options = {"rank": 3, "strength": 0.3, "targets": ATTENTION}
    return {name: make_adapter(root / name, model, **options | recipe) for name, recipe in recipes.items()}


ANN = {"adapter": "ann"}


@pytest.mark.parametrize(
    "turns",
    [
        slow([ANN | {"policy": "exact"}]),
        slow([ANN | {"policy": "activated", "invocation_start": 300}]),
        slow([ANN | {"policy": "prefill-share"}]),
        slow([ANN | {"policy": "residual"}, {"adapter": "bob", "policy": "residual"}]),
        slow([{"adapter": name, "policy": "residual-shared-a"} for name in ("cyd", "dan")]),
        slow([{}, ANN | {"policy": "exact"}, ANN | {"policy": "residual"}]),
    ],
)
def test_adapters(turns: list[Options], model: Path, adapters: dict[str, Path], ram_path: Path) -> None:
    check_round_trip(Case(model, turns, adapters, {"max_divergence": UNLIMITED}), ram_path)


@pytest.mark.slow
def test_an_adapter_on_recurrent_layers(hybrid: Callable[[str], Path], ram_path: Path) -> None:
    qwen = hybrid("qwen3_5")
    poet = write_mlx_lm(ram_path / "poet", random_matrices(qwen, targets=targets(qwen), strength=1.0))
    turns = [
        {"adapter": "poet", "policy": "exact"},
        {"adapter": "poet", "policy": "activated", "invocation_start": 300},
    ]
    check_round_trip(Case(qwen, turns, {"poet": poet}, {"snapshot_tokens": EVERY}), ram_path)


@pytest.mark.slow
def test_residuals_of_adapters_that_are_not_there_yet(model: Path, adapters: dict[str, Path], ram_path: Path) -> None:
    """They are brought in as they are, and found once the adapter is loaded."""
    case = Case(model, [ANN | {"policy": "residual"}], adapters, {"max_divergence": UNLIMITED})
    with case.open(ram_path / "here") as llm:
        contexts = case.first_turns(llm, "alice")
    export_agent(ram_path / "here", "alice", ram_path / "file")
    with replace(case, adapters={}).open(ram_path / "there") as llm:
        assert llm.import_agent("alice", ram_path / "file").residual_disk_bytes > 0
    with case.open(ram_path / "there") as llm:
        [said] = case.next_turns(llm, "alice", contexts.copy(), 7)
    with case.open(ram_path / "here") as llm:
        check_as_restarted([said], case.next_turns(llm, "alice", contexts.copy(), 7))


@pytest.mark.slow
def test_forks_that_share_blocks(model: Path, ram_path: Path) -> None:
    case = Case(model)
    with case.open(ram_path / "here") as llm:
        contexts = case.first_turns(llm, "alice")
        llm.fork("alice", "bob")
        expected = case.next_turns(llm, "bob", contexts.copy(), 7)
    files = [ram_path / agent for agent in ("alice", "bob")]
    for file in files:
        export_agent(ram_path / "here", file.name, file)
    with case.open(ram_path / "there") as llm:
        for file in files:
            llm.import_agent(file.name, file)
        told = llm.stats().disk_bytes
        llm.delete("bob")
        assert 0 < llm.stats().disk_bytes < told
        check_as_restarted(case.next_turns(llm, "alice", contexts.copy(), 7), expected, hot=True)
