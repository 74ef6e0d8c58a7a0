"""The laboratory sees what it should see: a spoilt weight, a coarse cache, and that `auto` repairs it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from typer.testing import CliRunner

from agentcache.bench.plots import can_plot
from agentcache.errors import ConfigError
from agentcache.kv.packing import BY_CHANNEL, LayerBits
from agentcache.llm import LLM
from agentcache.models.builtin.embedded import embedded_model_path
from benchmarks import quality_benchmark
from benchmarks.__main__ import app
from benchmarks.quality.emulated import EmulatedCache
from benchmarks.quality.formats import UNQUANTISED, Format
from benchmarks.quality.plan import QualityPlan, ResultTable
from benchmarks.quality.precision import Bench, add_outliers, write_outlier_copy
from benchmarks.quality.restore import COLD, DAMAGED, EVICTED, HOT, WARM, measure_restore
from benchmarks.quality.texts import Mean, Reading, joined, measure_texts, name_files, read_formats
from benchmarks.quality_benchmark import OF_THE_EMBEDDED_MODEL
from tests.conftest import ModelFolder

SMALLEST = QualityPlan(scale=0.01, tokens=160)
FOUR = LayerBits(4, 4)


def test_a_table_for_people_and_programs() -> None:
    table = ResultTable(
        "t", "Title", {"a": "A", "b": "B"}, [{"a": "x|y", "b": 0.5, "more": 1}, {"a": "z"}], {"b": ".1%"}, ["note"]
    )
    assert table.as_markdown() == "### Title\n\n| A | B |\n| --- | --: |\n| x/y | 50.0% |\n| z | – |\n\n- note\n"
    assert table.as_rich().row_count == 2
    assert QualityPlan(scale=0.25).scaled(6) == 2 and SMALLEST.scaled(6) == 1


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("rotated", [False, True])
def test_emulated_formats_give_back_about_what_they_got(rotated: bool, centred: bool) -> None:
    """Sixteen bits nearly all of it; a rotation spreads one large channel's harm, centring takes a constant out."""
    noise = mx.random.normal((1, 2, 40, 64), key=mx.random.key(0))
    keys = noise + 20 * (mx.arange(64) == 5)

    def error(bits: int) -> float:
        cache = EmulatedCache(Format.parse(f"k{bits}{'m' * centred}{'r' * rotated} v{bits}"))
        first, _ = cache.update_and_fetch(keys[:, :, :30], noise[:, :, :30])
        back, _ = cache.update_and_fetch(keys[:, :, 30:], noise[:, :, 30:])
        assert back.shape == keys.shape and mx.array_equal(back[:, :, :30], first).item() and cache.offset == 40
        return float(mx.sqrt(mx.square(back - keys).mean()).item())

    assert error(16) < min(0.01, error(8)) and error(8) < error(4) < error(3)
    assert (
        error(4) < {(False, False): 0.5, (True, False): 0.4, (False, True): 0.15, (True, True): 0.15}[rotated, centred]
    )


def test_bits_a_value() -> None:
    assert [Format.parse(each).bits_a_value() for each in ("k4 v4", "k4g32 v4g32", "k8 v4")] == [4.5, 5, 6.5]
    assert [Format.parse(each).bits_a_value() for each in ("k4c64 v4", "k3c32 v3g32", "k4m v4")] == [4.5, 4, 4.53125]
    assert (Format.parse("k16 v16").bits_a_value(), UNQUANTISED.bits_a_value()) == (16, 32)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_sees_a_spoilt_weight_and_a_coarse_cache(tmp_path: Path) -> None:
    bench = Bench(embedded_model_path(tmp_path), SMALLEST)
    four, sixteen = [Format.of(FOUR)] * 8, [Format.of(LayerBits(16, 16))] * 8
    best = bench.answers(sixteen)
    assert best.recall > 0.9
    served = bench.answers(four)
    assert served.perplexity < 1.01 * best.perplexity and served.recall > best.recall - 0.05

    add_outliers(bench.model)
    same = bench.answers(sixteen)
    assert abs(same.perplexity / best.perplexity - 1) < 0.01
    broken = bench.answers(four)
    assert broken.perplexity > 1.5 * same.perplexity and broken.recall < 0.5
    precision, _ = bench.choose()
    repaired = bench.answers([Format.of(bits) for bits in precision.layers])
    assert set(precision.layers) == {BY_CHANNEL}
    assert repaired.perplexity < 1.01 * same.perplexity and repaired.recall > same.recall - 0.05

    weight = bench.model.layers[3].mlp.down_proj
    weight.weight = -weight.weight
    assert bench.answers(sixteen).perplexity > 1.05 * same.perplexity


@pytest.mark.slow
def test_a_server_of_the_outlier_copy_keeps_keys_by_channel_by_itself(tmp_path: Path) -> None:
    folder = write_outlier_copy(embedded_model_path(tmp_path), tmp_path / "copy")
    messages = [{"role": "user", "content": "Marc lives in Cairo. Ines likes nuts best. What does Ines like best?"}]
    with LLM(folder, cache_dir=tmp_path / "cache", kv="auto") as llm:
        assert llm.model.kv_precision == "4" and llm.model.kv_divergence is not None
        assert llm.chat(messages).text.strip() == "Ines likes nuts best."
    with LLM(folder, cache_dir=tmp_path / "cache", kv="4t") as llm:
        assert llm.chat(messages).text.strip() != "Ines likes nuts best."


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_restored_words_are_the_same_and_a_spoilt_weight_changes_them(tmp_path: Path) -> None:
    """By the command, which writes tables and pictures."""
    command = ["quality", "--only", "restore", "--scale", "0.01", "--out", str(tmp_path), "--json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "quality.json").read_text())
    assert "| hot | 12 | 0 |" in (tmp_path / "quality.md").read_text()
    assert (tmp_path / "quality_restore.png").exists() == can_plot()

    (table,) = report["tables"]
    assert table["name"] == "restore"
    rows = {row["way"]: row for row in table["rows"]}
    assert [rows[way]["different"] for way in (HOT, WARM, EVICTED)] == [0, 0, 0]
    assert [rows[way]["logprob"] for way in (HOT, WARM, EVICTED)] == [0, 0, 0]
    assert rows[WARM]["restored"] > 0 and rows[EVICTED]["restored"] > 0 == rows[HOT]["restored"]
    assert rows[DAMAGED]["quarantined"] > 0 and rows[DAMAGED]["computed"] > rows[WARM]["computed"]
    assert rows[COLD]["computed"] > 2 * rows[HOT]["computed"]
    assert all(row["right"] > 0.8 for row in rows.values())

    folder = embedded_model_path(tmp_path)
    tensors = mx.load(str(folder / "model.safetensors"))
    name = "model.layers.3.mlp.down_proj.weight"
    mx.eval(tensors)
    mx.save_safetensors(str(folder / "model.safetensors"), {**tensors, name: -tensors[name]}, {"format": "mlx"})
    (spoilt,) = measure_restore(replace(SMALLEST, model=str(folder)), lambda line: None)
    assert all(row["right"] < rows[row["way"]]["right"] for row in spoilt.rows)


def test_a_model_reads_texts_in_the_formats_that_are_asked_for(tmp_path: Path) -> None:
    """Rows come one by one, each text's 16 bits first; finer formats are nearer to them."""
    texts = [tmp_path / "one.txt", tmp_path / "other.md"]
    for index, text in enumerate(texts):
        text.write_text("Marc lives in Cairo. " * (20 + index))
    told: list[str] = []
    plan = QualityPlan(texts=tuple(map(str, texts)), formats=("4t", "4", "auto", "k8v4"), text_tokens=48)
    tables = measure_texts(plan, told.append)
    assert [table.name for table in tables] == ["texts, one.txt", "texts, other.md", "texts, all texts"]
    for table in tables:
        rows = {row["format"]: row for row in table.rows}
        assert list(rows) == ["16", "4t", "4", "auto", "k8v4"]
        assert rows["16"]["change"] == rows["16"]["divergence"] == 0 < rows["k8v4"]["divergence"]
        assert rows["k8v4"]["divergence"] < rows["4t"]["divergence"]
        assert rows["auto"] == rows["4"] | {"format": "auto"}
        assert [rows[name]["bits"] for name in ("16", "k8v4", "4t", "4")] == [16, 6.5, 4.5, 4.5]
        assert rows["16"]["change_error"] == 0 == pytest.approx(rows["16"]["divergence_error"], abs=1e-7)
        assert 0 < rows["4"]["divergence_error"] < rows["4"]["divergence"] and rows["4"]["change_error"] > 0
    assert [line.split()[:3] for line in told[:2]] == [["one.txt", "--kv", "16"], ["one.txt", "--kv", "4t"]]
    assert len(told) == 10


def test_standard_errors_are_of_differences_token_by_token() -> None:
    """Two texts that differ from 16 bits by the same at each token have no error, however much tokens differ."""
    reference, steady = np.array([1.0, 5.0, 0.5, 3.0]), np.array([1.1, 5.1, 0.6, 3.1])
    same = Mean.of(steady - reference)
    assert same.value == pytest.approx(0.1) and same.error == pytest.approx(0, abs=1e-12)
    chance = Mean.of(np.array([1.0, -1.0, 1.0, -1.0]))
    assert chance.value == 0 and chance.error == pytest.approx((4 / 3) ** 0.5 / 2)
    assert Mean.of(np.array([1.0])).error == math.inf
    both = joined([Reading(reference, steady), Reading(steady, reference)])
    assert both.losses.tolist() == [*reference, *steady] and both.divergences.tolist() == [*steady, *reference]


def test_files_of_one_name_are_told_apart() -> None:
    named = name_files(["a/x.txt", "b/x.txt", "c.txt", "c.txt"])
    assert named == {"a/x.txt": Path("a/x.txt"), "b/x.txt": Path("b/x.txt"), "c.txt": Path("c.txt")}


def test_a_text_without_tokens_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ConfigError, match=r"empty\.txt: it has fewer than 2 tokens"):
        measure_texts(QualityPlan(texts=(str(tmp_path / "empty.txt"),), formats=("4",)), lambda line: None)


@pytest.mark.parametrize(("options", "parts"), [(["--text", "x"], ("texts",)), ([], OF_THE_EMBEDDED_MODEL)])
@pytest.mark.parametrize("quick", [["--quick"], []])
def test_which_parts_are_measured(
    options: list[str], parts: tuple[str, ...], quick: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[QualityPlan] = []
    monkeypatch.setattr(quality_benchmark, "measure_quality", lambda plan, tell: asked.append(plan))
    CliRunner().invoke(app, ["quality", *quick, *options])
    assert asked[0].parts == parts


def test_formats_that_there_are_not_are_named() -> None:
    assert read_formats("16, k8v4,auto") == ("16", "k8v4", "auto")
    with pytest.raises(ConfigError, match=r"--formats names 5; there are 2.5, 3, 4, 4t, k8v4, 8, 16, auto"):
        read_formats("4,5")


@pytest.mark.slow
def test_of_a_model_of_ones_own_only_texts_are_measured(model_folder: ModelFolder, tmp_path: Path) -> None:
    command = ["quality", "--model", str(model_folder("qwen2", num_hidden_layers=2)), "--formats", "16,auto"]
    done = CliRunner().invoke(app, [*command, "--tokens", "32", "--out", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "quality.json").read_text())
    assert [table["name"] for table in report["tables"]] == ["texts, prose", "texts, code", "texts, all texts"]
