"""The laboratory of KV formats: grammar, rounding and the rule of open blocks, each beside a plain definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from agentcache.compat import scaled_dot_product_attention
from agentcache.errors import ConfigError
from agentcache.kv.packing import BITS
from agentcache.models import interception, loader
from agentcache.models.loader import read_model
from benchmarks import quality_benchmark
from benchmarks.__main__ import app
from benchmarks.quality.emulated import EmulatedCache, make_caches, reading_open_blocks
from benchmarks.quality.format_bench import FORMATS, QUICK_FORMATS, FormatBench, measure_formats
from benchmarks.quality.formats import UNQUANTISED, Format, Side, by_channel, hadamard, levels, parse_formats
from benchmarks.quality.plan import QualityPlan
from tests.conftest import ModelFolder
from tests.marks import slow
from tests.models import zoo
from tests.models.driver import Driver, chunks_of, random_ids
from tests.models.model_files import MODEL_FILES

BLOCK = 256
OPEN = Side(8)


def noise(*shape: int, seed: int = 0) -> mx.array:
    """Keys or values with a large channel and a constant."""
    channels = shape[-1]
    return mx.random.normal(shape, key=mx.random.key(seed)) * mx.where(mx.arange(channels) == 5, 20, 1) + 3


def by_token_sides(kind: str) -> st.SearchStrategy[str]:
    bits = st.sampled_from((2, 3, 4, 5, 6, 8, 16))
    return st.builds("{}{}{}{}".format, st.just(kind), bits, st.sampled_from(("", "g32")), st.sampled_from(LETTERS))


LETTERS = ("", "m", "r", "mr")
CHANNEL_SIDES = st.builds(
    "k{}c{}{}".format, st.sampled_from((2, 3, 4, 5)), st.sampled_from((32, 64, 128, 256)), st.sampled_from(LETTERS)
)


@given(
    st.one_of(by_token_sides("k"), CHANNEL_SIDES, st.just("k4c64n"), st.just("k4c32nmr")),
    by_token_sides("v"),
    st.sampled_from(("", " sink", " open", " sink open")),
)
def test_formats_are_written_as_they_are_read(keys: str, values: str, modifiers: str) -> None:
    text = f"{keys} {values}{modifiers}"
    assert str(Format.parse(text)) == text
    assert Format.parse(text).bits_a_value() > 2


def test_all_formats_of_the_laboratory_are_in_the_grammar() -> None:
    assert [str(each) for each in parse_formats(FORMATS)] == list(dict.fromkeys(FORMATS)) == list(FORMATS)
    assert set(QUICK_FORMATS) < set(FORMATS) and len(QUICK_FORMATS) == 12
    assert Format.parse("k4c64 v4g32 sink open") == Format(Side(4, tokens=64), Side(4, 32), sink=True, opens=True)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "'nothing' is no format of keys"),
        ("k4", "'nothing' is no format of values, such as v4"),
        ("v4 k4", "'v4' is no format of keys"),
        ("k4 v4 closed", "behind keys and values there may be sink and open"),
        ("k4 v4 open open", "behind keys and values there may be sink and open"),
        ("k7 v4", "there are 2, 3, 4, 5, 6, 8 or 16 bits"),
        ("k4g16 v4", "groups have 64, 32 values"),
        ("k4c48 v4", "groups by channel have 32, 64, 128, 256 tokens"),
        ("k8c64 v4", "by channel there are 2, 3, 4, 5 bits"),
        ("k3c64n v4", "normal codes have 4 bits"),
        ("k4n v4", "normal codes are kept by channel"),
        ("k4 v4c64", "only keys are kept by channel"),
        ("k4g32c64 v4", "only keys are kept by channel"),
    ],
)
def test_other_formats_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Format.parse(text)


def defined_by_channel(x: np.ndarray, tokens: int, bits: int) -> np.ndarray:
    """Group by group and channel by channel, in float32; scale and bias as float16 stores them."""
    out = np.empty_like(x)
    top = np.float32(2**bits - 1)
    for begin in range(0, x.shape[0], tokens):
        for channel in range(x.shape[1]):
            group = x[begin : begin + tokens, channel]
            low, high = group.min(), group.max()
            scale = np.float32(np.float16(max((high - low) / top, np.float32(1e-7))))
            bias = np.float32(np.float16(low))
            codes = np.clip(np.rint((group - bias) / scale), 0, top)
            out[begin : begin + tokens, channel] = bias + scale * codes
    return out


@pytest.mark.parametrize("bits", [2, 3, 4, 5])
@pytest.mark.parametrize("tokens", [32, 64, 128, 256])
@pytest.mark.parametrize("count", [BLOCK, 100, 1])
def test_rounding_by_channel_is_as_defined(bits: int, tokens: int, count: int) -> None:
    x = mx.concatenate([noise(2, 1, count, 31), mx.full((2, 1, count, 1), 7.0)], axis=-1)
    rounded = np.array(by_channel(x, tokens, levels(bits)))
    for row in range(2):
        np.testing.assert_allclose(rounded[row, 0], defined_by_channel(np.array(x[row, 0]), tokens, bits), rtol=1e-6)


def test_normal_codes_are_the_nearest_of_sixteen_quantiles() -> None:
    """Dense in the middle of a group's range; its ends are codes."""
    places = np.array(levels(4, normal=True))
    assert len(places) == 16 and places[0] == 0 and places[-1] == 1
    np.testing.assert_allclose(places, 1 - places[::-1], atol=1e-12)
    gaps = np.diff(places)
    assert gaps.argmin() == 7 and gaps[0] > 3 * gaps[7]
    x = np.array(noise(64, 8), np.float32)
    rounded = np.array(by_channel(mx.array(x)[None], 64, tuple(places)))[0]
    low, high = x.min(axis=0), x.max(axis=0)
    scale, bias = (np.float32(np.float16(each)) for each in ((high - low) / 15, low))
    codes = bias + scale * 15 * places[:, None, None]
    nearest = np.abs(codes - x).argmin(axis=0)
    np.testing.assert_allclose(rounded, np.take_along_axis(codes, nearest[None], axis=0)[0], rtol=1e-5, atol=1e-5)


def test_the_hadamard_transform_is_mlxs() -> None:
    x = noise(3, 5, 64)
    assert mx.allclose(hadamard(x), mx.hadamard_transform(x), atol=1e-5).item()
    assert mx.allclose(hadamard(hadamard(x)), x, atol=1e-5).item()


def test_heads_that_a_format_does_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="heads of 96 values cannot be rotated"):
        Format.parse("k4r v4").keys.check(96)
    with pytest.raises(ConfigError, match="heads of 80 values have no groups of 32"):
        Format.parse("k4 v4").keys.check(80)
    Format.parse("k4c64 v16").keys.check(80)


def test_a_block_is_centred_on_its_own_mean() -> None:
    """A constant that is another one in each block costs nothing."""
    x = mx.random.normal((1, 1, 2 * BLOCK, 64), key=mx.random.key(0))
    shifted = x + mx.repeat(50 * mx.random.normal((1, 1, 2, 64), key=mx.random.key(1)), BLOCK, axis=2)

    def error(format: str, x: mx.array) -> float:
        back, _ = EmulatedCache(Format.parse(format)).update_and_fetch(x, x)
        return float(mx.sqrt(mx.square(back - x).mean()).item())

    plain = error("k3 v3", x)
    assert error("k3m v3", shifted) < 1.1 * plain < 5 * plain < error("k3 v3", shifted)


def test_a_sink_is_the_first_block_in_eight_bits() -> None:
    x = noise(1, 2, 2 * BLOCK, 64)
    back, _ = EmulatedCache(Format.parse("k2 v2 sink")).update_and_fetch(x, x)
    assert mx.array_equal(back[:, :, :BLOCK], OPEN.round(x[:, :, :BLOCK])).item()
    assert mx.array_equal(back[:, :, BLOCK:], Side(2).round(x[:, :, BLOCK:])).item()


def as_read(format: Format, side: Side, x: mx.array, query: int) -> np.ndarray:
    """Tokens up to `query`, [H, query + 1, D]: earlier blocks sealed from 8 bits, its own in 8 bits."""
    own = query // BLOCK * BLOCK
    parts = []
    for begin in range(0, own, BLOCK):
        block = OPEN.round(x[:, begin : begin + BLOCK])
        parts.append(block if format.sink and begin == 0 else side.round(block, side.mean(block)))
    parts.append(OPEN.round(x[:, own : query + 1]))
    return np.concatenate([np.array(part) for part in parts], axis=1)


def attention_of_one(
    format: Format, queries: np.ndarray, keys: mx.array, values: mx.array, query: int, scale: float, window: int | None
) -> np.ndarray:
    """Attention of the query at one position, [H_q, D]."""
    k, v = as_read(format, format.keys, keys, query), as_read(format, format.values, values, query)
    repeats = queries.shape[0] // k.shape[0]
    k, v = np.repeat(k, repeats, axis=0), np.repeat(v, repeats, axis=0)
    begin = 0 if window is None else max(0, query + 1 - window)
    scores = np.einsum("hd,htd->ht", queries[:, query], k[:, begin:]) * scale
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("ht,htd->hd", weights / weights.sum(axis=1, keepdims=True), v[:, begin:])


FORMATS_TESTED = ("k4c64 v4 open", "k3c32mr v4g32r sink open", "k4m v2 open")


class Recorder:
    """What each layer's cache gets and computes."""

    def __init__(self, cache: EmulatedCache) -> None:
        self.keys: list[mx.array] = []
        self.values: list[mx.array] = []
        self.queries: list[mx.array] = []
        self.outputs: list[mx.array] = []
        update, attend = cache.update_and_fetch, cache.attend

        def updated(keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
            self.keys.append(keys)
            self.values.append(values)
            return update(keys, values)

        def attended(queries: mx.array, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
            self.scale = scale
            self.queries.append(queries)
            self.outputs.append(attend(queries, scale, mask, sinks))
            return self.outputs[-1]

        cache.update_and_fetch, cache.attend = updated, attended  # type: ignore[method-assign]

    def joined(self) -> list[mx.array]:
        return [mx.concatenate(each, axis=2)[0] for each in (self.queries, self.keys, self.values, self.outputs)]


READINGS = [("llama", None), ("gemma3_text", 32), ("gemma3_text_wide", 512)]
# Each format once and each model once.
FORMATS_READ = [
    (format, *reading) if at == number else slow(format, *reading)
    for at, format in enumerate(FORMATS_TESTED)
    for number, reading in enumerate(READINGS)
]


@pytest.mark.parametrize(("format", "architecture", "window"), FORMATS_READ, ids=str)
def test_open_blocks_are_read_as_a_query_at_a_time(
    format: str, architecture: str, window: int | None, model_folder: ModelFolder
) -> None:
    """On tiny models, in pieces that begin and end within blocks, at their borders, and with one token."""
    read = read_model(str(model_folder(architecture, num_hidden_layers=6 if window else 2)))
    read.tokenizer.close()
    parsed = Format.parse(format)
    windows = [window if window and layer != 5 else None for layer in range(len(read.model.layers))]
    caches = make_caches([parsed] * len(windows), windows)
    recorders = [Recorder(cache) for cache in caches]
    ids = mx.array(np.random.default_rng(0).integers(0, 200, (1, 600)))
    with reading_open_blocks(read.model):
        for piece in mx.split(ids, [100, 101, BLOCK, 590, 591], axis=1):
            mx.eval(read.model(piece, cache=caches))
    for recorder, window_of_layer in [*zip(recorders, windows, strict=True)][:: 5 if window else 1]:
        queries, keys, values, outputs = recorder.joined()
        for query in (0, 99, 100, 255, 256, 300, 511, 512, 590, 599):
            expected = attention_of_one(parsed, np.array(queries), keys, values, query, recorder.scale, window_of_layer)
            np.testing.assert_allclose(np.array(outputs)[:, query], expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("kv", "same"), [("4", "k4c64 v4 sink open"), ("3", "k3c64 v3 sink open"), slow("2.5", "k3c64 v2 sink open")]
)
def test_the_engine_reads_keys_by_channel_as_the_laboratory_does(kv: str, same: str, model_folder: ModelFolder) -> None:
    """But for single values, which fall to the next code."""
    assert str(Format.of(BITS[kv])) == same
    folder = str(model_folder("mistral", num_hidden_layers=2))
    loaded, read = loader.load(folder, kv=kv), read_model(folder)
    read.tokenizer.close()
    ids = random_ids(loaded, 600)
    made = np.array(Driver(loaded).logits(ids, chunks_of(300, 600)))
    errors = {}
    without_sink = same.replace(" sink", "")
    for format in (same, without_sink):
        caches = make_caches([Format.parse(format)] * 2, [None] * 2)
        with reading_open_blocks(read.model):
            expected = np.array(read.model(mx.array(ids)[None], cache=caches)[0])
        errors[format] = np.abs(made - expected).max(axis=1) / np.abs(expected).max()
    assert np.median(errors[same]) < 1e-4 and errors[same].max() < 0.05
    assert np.median(errors[without_sink][256:]) > 1e-3


@pytest.mark.parametrize("format", FORMATS_TESTED)
@pytest.mark.parametrize("window", [slow(None), 300])
def test_chunks_change_nothing(format: str, window: int | None) -> None:
    """Of the same keys and values: a model's own last bits depend on chunks."""
    queries = mx.random.normal((1, 4, 600, 64), key=mx.random.key(0))
    keys, values = noise(1, 2, 600, 64, seed=1), noise(1, 2, 600, 64, seed=2)

    def attended(*cuts: int) -> tuple[mx.array, EmulatedCache]:
        cache = EmulatedCache(Format.parse(format), window)
        parts = []
        for q, k, v in zip(*(mx.split(each, cuts, axis=2) for each in (queries, keys, values)), strict=True):
            mask = cache.make_mask(q.shape[2])
            cache.update_and_fetch(k, v)
            parts.append(cache.attend(q, 0.05, mask, None))
        assert (cache.offset, cache.attended) == (600, 600)
        return mx.concatenate(parts, axis=2), cache

    whole, kept = attended()
    for cuts in ((1, 255, 300, 512), (256,), (255, 256, 257), (100, 511, 513, 599)):
        out, cache = attended(*cuts)
        assert mx.allclose(out, whole, atol=1e-4).item()
        for side, expected in ((cache._keys, kept._keys), (cache._values, kept._values)):
            assert side.sealed is not None and mx.array_equal(side.sealed, expected.sealed).item()
            assert mx.array_equal(side.open_block, expected.open_block).item()


@pytest.mark.parametrize("architecture", ["llama", "mistral_sliding", "gpt_oss"])
def test_unquantised_caches_compute_what_mlx_lms_do(architecture: str, model_folder: ModelFolder) -> None:
    bench = FormatBench.load(model_folder(architecture), {"one": "abcdefg " * 300}, 300, 1)
    ids = mx.array(bench.windows("one"))
    assert mx.allclose(bench.model(ids), bench.model(ids, cache=bench.caches(UNQUANTISED)), atol=1e-4).item()


def test_attention_is_put_back(model_folder: ModelFolder) -> None:
    import mlx_lm.models.qwen2 as file

    read = read_model(str(model_folder("qwen2")))
    read.tokenizer.close()
    with reading_open_blocks(read.model):
        assert file.scaled_dot_product_attention not in (scaled_dot_product_attention, interception.attention)
    assert file.scaled_dot_product_attention is interception.attention  # as after `host`


def test_models_with_other_caches_are_refused(model_folder: ModelFolder) -> None:
    with pytest.raises(ConfigError, match="keep keys and values of their own"):
        FormatBench.load(model_folder("deepseek_v2"), {"one": "abc " * 20}, 32, 1)


def test_models_that_compute_attention_themselves_are_refused(model_folder: ModelFolder) -> None:
    bench = FormatBench(zoo.build("gemma2", MODEL_FILES["gemma2"].config), {"one": np.arange(1, 33)}, 32, 1)
    assert len(list(bench.read("one", parse_formats(["k4c64 v4"])))) == 2
    with pytest.raises(ConfigError, match="computes attention by itself"):
        list(bench.read("one", parse_formats(["k4c64 v4 open"])))


def plan_of(folder: Path, files: Sequence[Path], **changes: Any) -> QualityPlan:
    plan = QualityPlan(("formats",), str(folder), texts=tuple(map(str, files)), scale=0.01, window=300)
    return replace(plan, **changes)


def test_a_table_of_formats(model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Own texts and those of --text; finer formats are nearer to nothing quantised; answers on demand."""
    text = tmp_path / "other.txt"
    text.write_text("Marc lives in Cairo. " * 30)
    told: list[str] = []
    formats = ("k16 v16", "k8 v8", "k4c64 v4 open", "k2 v2")
    plan = plan_of(model_folder("llama"), [text], kv_formats=formats, answers=True)
    table, answers = measure_formats(plan, told.append)
    rows = {row["format"]: row for row in table.rows}
    assert list(rows) == list(formats)
    assert list(table.columns) == [
        "format", "bits", "change", "change_error", "least", "most", "divergence", "divergence_error", "same"
    ]  # fmt: skip
    assert all(set(table.columns) == set(row) for row in table.rows)
    divergences = [row["divergence"] for row in table.rows]
    assert 0 <= divergences[0] < divergences[1] < divergences[2] < divergences[3]
    assert rows["k16 v16"]["same"] > rows["k2 v2"]["same"]
    assert all(row["least"] <= row["change"] <= row["most"] and row["change_error"] > 0 for row in table.rows)
    assert "serving (300 tokens), engine (300 tokens), other.txt (300 tokens)" in table.notes[0]
    assert len(told) == 3 * 5 + 4
    assert [row["format"] for row in answers.rows] == list(formats) and answers.rows[0]["equal"] <= 1


def test_windows_are_batched_within_a_bound(model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = FormatBench.load(model_folder("llama"), {"one": "abcdefg " * 100}, 64, 3)
    together = list(bench.read("one", parse_formats(["k4c32 v4 open"])))
    monkeypatch.setattr("benchmarks.quality.format_bench._LOGITS_AT_ONCE", 1)
    alone = list(bench.read("one", parse_formats(["k4c32 v4 open"])))
    assert (len(together), len(alone)) == (2, 6)
    joined = np.concatenate([reading.losses for _, reading in alone[1::2]])
    np.testing.assert_allclose(together[1][1].losses, joined, atol=0.01)  # a last bit may change an 8-bit code
    joined = np.concatenate([reading.losses for _, reading in alone[::2]])
    np.testing.assert_allclose(together[0][1].losses, joined, rtol=1e-4)


def test_equal_continuations_are_counted(model_folder: ModelFolder) -> None:
    """A continuation token by token is that of all tokens read at once."""
    bench = FormatBench.load(model_folder("llama"), {"one": "abcdefg " * 200, "two": "Marc lives. " * 9}, 64, 1)
    format = Format.parse("k4c64 v4 open")
    prompts = bench.prompts(8)
    assert sum(len(each) for each in prompts.values()) == 8 and max(prompts) == 900
    shortest = prompts[min(prompts)]
    said = bench.answer(shortest, format)
    with reading_open_blocks(bench.model):
        ids = mx.concatenate([shortest, mx.array(said)], axis=1)
        logits = bench.model(ids[:, :-1], cache=bench.caches(format))
    assert np.array_equal(np.array(mx.argmax(logits[:, shortest.shape[1] - 1 :], axis=-1)), said)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--quick"], {"kv_formats": (), "window_tokens": 1024, "answers": False}),
        (
            ["--formats", "k4c64 v4 open, k8 v8", "--answers"],
            {"kv_formats": ("k4c64 v4 open", "k8 v8"), "answers": True},
        ),
        (["--tokens", "512"], {"window_tokens": 512, "formats": QualityPlan().formats}),
        ([], {"window_tokens": 2048}),
    ],
)
def test_options(options: list[str], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[QualityPlan] = []
    monkeypatch.setattr(quality_benchmark, "measure_quality", lambda plan, tell: asked.append(plan))
    CliRunner().invoke(app, ["quality", "--only", "formats", *options])
    assert {name: getattr(asked[0], name) for name in expected} == expected


def test_formats_of_two_parts_are_refused() -> None:
    with pytest.raises(ConfigError, match="--formats is of texts or of formats"):
        CliRunner().invoke(app, ["quality", "--only", "texts,formats", "--formats", "4"], catch_exceptions=False)


@pytest.mark.slow
def test_quick_mode_of_the_embedded_model(tmp_path: Path) -> None:
    command = ["quality", "--only", "formats", "--quick", "--tokens", "272", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    markdown = (tmp_path / "quality.md").read_text()
    assert "| format | bits a value | perplexity | ± | least of a text | most | divergence | ± | same next token |" in (
        markdown
    )
    assert all(f"| {format} |" in markdown for format in QUICK_FORMATS)
