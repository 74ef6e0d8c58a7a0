"""The adapters benchmark on real processes of both servers, small: what is computed, by whom, and its report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from agentcache.api.policy import Policy
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.models.adapters import read_adapter
from agentcache.models.loader import load
from agentcache.text.tokenizer import Tokenizer
from benchmarks.adapters.made import POLICIES, PassageSource, make_adapters
from benchmarks.adapters.measure import (
    ADAPTERS,
    AdaptersPlan,
    AdaptersResult,
    build_report,
    measure_adapters,
    peer_wins,
)
from benchmarks.adapters.mixed import MixedPlan
from benchmarks.adapters.pipeline import BASE_ONLY, CHAIN, PipelinePlan
from benchmarks.adapters.switch import COLD, EXACT_TURNS, HOT, TRUNK, Cost, SwitchPlan
from benchmarks.compare import OURS, PEER
from tests.conftest import ModelFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # a whole benchmark, once for all tests

SWITCH = SwitchPlan(context=1100, turn_tokens=10, answer_tokens=3, rounds=1)
LAYERS, HIDDEN, FLOAT32 = 4, 128, 4  # of the model; the last in bytes
PIPELINE = PipelinePlan(context=300, turn_tokens=6, answer_tokens=5)


@pytest.fixture(scope="module")
def model(model_folder: ModelFolder) -> Path:
    return model_folder("qwen3_tied")


@pytest.fixture(scope="module")
def plan(model: Path) -> AdaptersPlan:
    return AdaptersPlan(SWITCH, PIPELINE, MixedPlan(context=40, new_tokens=64, rounds=1), model=str(model))


@pytest.fixture(scope="module")
def result(plan: AdaptersPlan) -> AdaptersResult:
    return measure_adapters(plan, lambda line: None)


def costs(result: AdaptersResult, server: str) -> dict[str, Cost]:
    return {sample.turn: sample.cost for sample in result.switches if sample.server == server}


@pytest.fixture(scope="module")
def ours(result: AdaptersResult) -> dict[str, Cost]:
    return costs(result, OURS)


@pytest.fixture(scope="module")
def report(plan: AdaptersPlan, result: AdaptersResult) -> dict[str, Any]:
    return build_report(plan, result)


def test_a_switch_computes_what_its_policy_cannot_share(ours: dict[str, Cost]) -> None:
    new = SWITCH.turn_tokens + SWITCH.answer_tokens
    assert ours[COLD].computed_tokens == ours[COLD].prompt_tokens == SWITCH.context
    exact = ours["exact, switch"]
    assert exact.computed_tokens == exact.prompt_tokens > SWITCH.context
    for turn in (HOT, "exact, next turn", "prefill-share, switch", "back to base"):
        assert ours[turn].computed_tokens <= new
    assert ours["activated, switch"].computed_tokens <= new + 12  # with the invocation
    for name in ("ram_bytes", "disk_bytes"):
        assert 0 < getattr(ours["activated, switch"], name) < getattr(exact, name) < getattr(ours[COLD], name)


def test_a_trunk_spares_a_switch_the_layers_below_the_adapter(result: AdaptersResult, ours: dict[str, Cost]) -> None:
    trunk = costs(result, TRUNK)
    assert list(trunk) == [COLD, *(turn.name for turn in EXACT_TURNS)]
    whole = SWITCH.context // BLOCK_SIZE * BLOCK_SIZE
    spared = {turn: layer_tokens_spared(cost) for turn, cost in trunk.items() if layer_tokens_spared(cost)}
    assert spared == {"exact, switch": whole * LAYERS // 2}
    assert {turn: cost.trunk_bytes for turn, cost in trunk.items() if cost.trunk_bytes} == {
        COLD: whole * HIDDEN * FLOAT32
    }
    for cost in ours.values():
        assert layer_tokens_spared(cost) == cost.trunk_bytes == 0
    assert trunk["exact, switch"].computed_tokens == ours["exact, switch"].computed_tokens


def layer_tokens_spared(cost: Cost) -> int:
    """By how much the turn's prompt and answer, but for the token said last, took less than all layers."""
    assert cost.computed_layer_tokens is not None
    return (cost.computed_tokens + SWITCH.answer_tokens - 1) * LAYERS - cost.computed_layer_tokens


def test_the_other_server_reads_everything_again_for_an_adapter(result: AdaptersResult) -> None:
    theirs = costs(result, PEER)
    assert theirs["exact, switch"].computed_tokens > SWITCH.context > theirs[HOT].computed_tokens
    assert theirs[COLD].prompt_tokens == SWITCH.context


def test_chains_compute_what_their_policy_cannot_share(result: AdaptersResult) -> None:
    chains = {pipeline.policy: pipeline for pipeline in result.pipelines}
    assert list(chains) == [BASE_ONLY, *POLICIES]
    new = PIPELINE.turn_tokens + PIPELINE.answer_tokens
    assert all(step.computed_tokens <= new for step in chains[BASE_ONLY].steps[1:])
    exact, activated, shared = (chains[policy] for policy in POLICIES)
    for step in (1, 3):  # each adapter's first
        assert exact.steps[step].computed_tokens == exact.steps[step].prompt_tokens
        assert activated.steps[step].computed_tokens < 50 > shared.steps[step].computed_tokens
    assert exact.computed_after_first > activated.computed_after_first > chains[BASE_ONLY].computed_after_first
    assert all(len(chain.steps) == len(CHAIN) for chain in chains.values())


def test_rows_of_all_kinds_decode_at_once(result: AdaptersResult) -> None:
    mixed = result.mixed
    assert mixed.rows == 4
    assert min(mixed.system, mixed.serial, mixed.base_system) > 0
    assert min(mixed.turns_seconds, mixed.serial_turns_seconds, mixed.peer_turns_seconds) > 0


def test_adapters_are_random_and_fit(model: Path, tmp_path: Path) -> None:
    adapters = make_adapters(tmp_path, model, [5, 6], copies=2)
    modules = load(str(model), kv="4t").adapters.modules
    read = {policy: [read_adapter(each.path, modules).adapter for each in made] for policy, made in adapters.items()}
    assert {adapter.first_layer for adapter in read[Policy.EXACT]} == {2}
    assert {adapter.first_layer for adapter in read[Policy.PREFILL_SHARE]} == {0}
    assert [adapter.invocation_tokens for made in read.values() for adapter in made] == [None] * 2 + [(5, 6)] * 2 + [
        None
    ] * 2
    assert len({adapter.digest for made in read.values() for adapter in made}) == 6
    for array in load_file(adapters[Policy.EXACT][0].path / "adapters.safetensors").values():
        assert np.abs(array).min() > 0


def test_passages_are_exact_and_hold_no_invocation(model: Path) -> None:
    source = PassageSource(Tokenizer.load(model), seed=1)
    passage, invocation = source.take(50), source.invocation()
    assert len(passage.ids) == 50
    assert not set(invocation.ids) <= set(passage.ids)
    assert (passage + invocation).ids[50:] == invocation.ids
    assert Tokenizer.load(model).encode(passage.text).ids == list(passage.ids)


def turn(server: str, name: str, ttft_ms: float) -> dict[str, Any]:
    return {"server": server, "turn": name, "ttft_ms": ttft_ms}


def test_what_the_other_server_is_better_at_is_said() -> None:
    switches = [turn(OURS, HOT, 100), turn(OURS, COLD, 10), turn(PEER, HOT, 50), turn(PEER, COLD, 99)]
    mixed = {"rows": 4, "turns_seconds": 1.0, "peer_turns_seconds": 0.5}
    wins = peer_wins(switches, mixed)
    assert len(wins) == 2 and wins[0].startswith(HOT) and wins[1].startswith("4 requests")


def test_the_report_begins_with_caveats_and_says_where_it_ran(report: dict[str, Any]) -> None:
    assert next(iter(report)) == "caveats"
    assert {"machine", "versions", "commit", "command", "finished"} <= set(report)
    hot = [row for row in report["against_hot_base"] if row["turn"] == HOT]
    assert [(row["server"], row["ttft_ratio"]) for row in hot] == [(OURS, 1), (TRUNK, 1)]
    assert {row["server"] for row in report["switches"]} == {OURS, TRUNK, PEER}


def test_tables_and_files(report: dict[str, Any], tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as file:
        console = Console(width=200, record=True, file=file)
        for table in ADAPTERS.tables:
            console.print(table(report))
        text = console.export_text()
    assert "activated, switch" in text and "prefill-share" in text and "one after the other" in text and TRUNK in text
    data, *plots = ADAPTERS.write(report, tmp_path / "results")
    assert json.loads(data.read_text())["mixed"]["rows"] == 4
    for plot in plots:
        assert plot.read_bytes().startswith(b"\x89PNG")
        assert plot.stat().st_size > 4096
