"""The TTFT benchmark: its flow on a fake server, its report, its options, and one real run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentcache.bench.ttft import Plan, SizeResult, measure
from agentcache.bench.ttft_report import KINDS, TTFT, build_report, cache_table, ttft_table
from agentcache.cli.bench import parse_sizes
from agentcache.errors import ConfigError

ROOT = Path(__file__).parent.parent.parent
FAKE = (sys.executable, str(ROOT / "tests" / "fake_server.py"))
PLAN = Plan((600, 1200, 200_000), repeats=2, command=FAKE)


@pytest.fixture(scope="module")
def results() -> list[SizeResult]:
    return measure(PLAN, lambda line: None)


@pytest.fixture(scope="module")
def report(results: list[SizeResult]) -> dict[str, Any]:
    return build_report(PLAN, results)


@pytest.mark.slow
def test_every_kind_is_sampled_as_often_as_asked(results: list[SizeResult]) -> None:
    for result in results[:2]:
        kinds = [sample.kind for sample in result.samples]
        assert kinds == ["cold"] * 2 + ["warm, evicted"] * 2 + ["warm", "hot"] * 2


@pytest.mark.slow
def test_only_cold_turns_compute_the_context(results: list[SizeResult]) -> None:
    for result in results[:2]:
        for sample in result.samples:
            whole = result.context_tokens + PLAN.turn_tokens
            assert sample.prompt_tokens == whole
            assert sample.computed_tokens == (whole if sample.kind == "cold" else PLAN.turn_tokens)


@pytest.mark.slow
def test_states_are_as_meant_and_only_disk_restores(results: list[SizeResult]) -> None:
    for sample in results[0].samples:
        assert sample.cache_state == sample.kind.partition(",")[0]
        assert (sample.restored_bytes > 0) == sample.kind.startswith("warm")


def test_a_context_the_model_cannot_hold_is_skipped_with_the_reason(results: list[SizeResult]) -> None:
    assert (results[2].skipped, results[2].samples) == ("too long", ())


def test_files_are_those_of_the_context_alone(results: list[SizeResult]) -> None:
    files = results[1].files
    assert files is not None
    assert (files.count, files.data_bytes) == (1, 1200)
    assert files.total_bytes > files.data_bytes
    assert files.read_bytes_per_s > 0


@pytest.mark.slow
def test_the_workload_is_seeded() -> None:
    plan = Plan((300,), repeats=1, command=FAKE)
    runs = [measure(plan, lambda line: None) for _ in range(2)]
    counts = [[(s.kind, s.computed_tokens, s.completion_tokens) for s in run[0].samples] for run in runs]
    assert counts[0] == counts[1]


def test_the_report_begins_with_caveats_and_says_where_it_ran(report: dict[str, Any]) -> None:
    assert next(iter(report)) == "caveats"
    assert report["caveats"][0].startswith("The embedded model is tiny")
    assert {"platform", "cpu", "cores", "memory_bytes", "device", "preloaded"} <= set(report["machine"])
    assert {"python", "mlx", "mlx-lm", "agentcache"} <= set(report["versions"])
    shape = {"model_type": "fake", "num_layers": "0"}
    assert report["model"] == {"name": "embedded", "shape": shape, "kv_format": "1 byte a token"}
    assert len(report["samples"]) == 16
    spread = report["sizes"][0]["warm"]["ttft_ms"]
    assert spread["min"] <= spread["median"] <= spread["max"]


def test_a_turn_weighs_its_prompt_and_its_answer(report: dict[str, Any]) -> None:
    cache = report["sizes"][0]["cache"]
    assert cache["turn_tokens"] == PLAN.turn_tokens + PLAN.new_tokens
    assert cache["turn_kv_bytes"] == cache["turn_tokens"]  # the fake's tokens take a byte
    assert cache["turn_written_bytes"] > 600


@pytest.mark.slow
def test_a_sample_in_another_state_than_meant_is_the_first_caveat() -> None:
    plan = Plan((300,), repeats=1, command=(*FAKE, "--fault", "forget"))
    report = build_report(plan, measure(plan, lambda line: None))
    assert report["caveats"][0].startswith("NOT AS MEANT: warm, evicted at 300 was reported cold; warm at 300")


def test_tables_and_files(report: dict[str, Any], tmp_path: Path) -> None:
    console = Console(width=140, record=True, file=(tmp_path / "out").open("w"))
    console.print(ttft_table(report))
    console.print(cache_table(report))
    text = console.export_text()
    console.file.close()
    for kind in KINDS:
        assert kind in text
    assert "616/16/16" in text
    assert "skipped: too long" in text
    assert "The cache behind it: keys and values in 1 byte a token" in text
    data, plot = TTFT.write(report, tmp_path / "results")
    assert json.loads(data.read_text())["sizes"][0]["context_tokens"] == 600
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert plot.stat().st_size > 1024


def test_sizes() -> None:
    assert parse_sizes("1K, 2k,300") == (1024, 2048, 300)
    for text in ("", "K", "1M", "0", "-1", "1K,1024"):
        with pytest.raises(ConfigError, match="sizes must"):
            parse_sizes(text)


@pytest.mark.slow
def test_the_command_measures_the_real_server(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agentcache", "bench", "ttft", "--sizes", "600", "--repeats", "1"]
    options = ["--json", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, *options], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    size = report["sizes"][0]
    assert not report["caveats"][0].startswith("NOT AS MEANT")
    assert size["cold"]["computed_tokens"] == [616]
    for kind in ("warm", "warm, evicted", "hot"):
        assert size[kind]["computed_tokens"] == [16]
    assert size["warm"]["restored_bytes"][0] > 0
    assert size["cache"]["kv_bytes"] > 0
    assert (tmp_path / "ttft.png").stat().st_size > 1024
