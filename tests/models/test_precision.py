"""`--kv auto`: as few bits as the logits stand, in as many layers as can do with them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from agentcache.api.start_progress import StartProgress
from agentcache.kv.packing import BITS, BY_CHANNEL, LayerBits, Precision
from agentcache.models import loader
from agentcache.models.attachment import Everywhere, Hosted, host
from agentcache.models.builtin.embedded import embedded_model_path
from agentcache.models.loader import read_model, sample_ids
from agentcache.models.precision import MAX_DIVERGENCE, MOST_PASSES, Measured, Measurements, PrecisionSearch
from agentcache.models.precision import find_precision as search
from agentcache.models.precision_runs import (
    SEALED_READ_FROM,
    PrecisionRuns,
    _change,
    _familiar,
    divergences_of,
    in_float32,
    is_float32,
    worse_part_divergence,
)
from agentcache.models.proof import Proof
from agentcache.models.step import CurrentStep
from benchmarks.quality.precision import add_key_biases, add_outliers
from tests.conftest import ModelFolder
from tests.examples import examples
from tests.marks import slow
from tests.models.test_attachment import load

FOUR, SIXTEEN = LayerBits(4, 4), LayerBits(16, 16)
LEVELS = [BY_CHANNEL, LayerBits(8, 4), LayerBits(8, 8), SIXTEEN]


@pytest.mark.parametrize("name", ["qwen2", "gpt_oss", "deepseek_v2", slow("gemma3_text")])
@pytest.mark.parametrize("bits", list(BITS.values()), ids=str)
def test_all_are_proved_to_be_what_the_model_reads(model_folder: ModelFolder, name: str, bits: LayerBits) -> None:
    """`host` compares the paged cache with mlx-lm's own attention on rounded keys and values."""
    hosted = host(*load(model_folder(name)), choose=Everywhere(bits))
    # Latents have no values, and are quantised per token.
    expected = FOUR if bits.by_channel and name == "deepseek_v2" else bits
    assert {packing.bits for packing in hosted.inspection.packings} == {expected}
    assert set(hosted.inspection.precision.layers) == {expected}


def test_layers_in_different_bits_are_proved_together(model_folder: ModelFolder) -> None:
    bits = [*(BITS[name] for name in ("4", "16", "3", "k8v4", "2.5", "8", "4t")), LayerBits(4, 8)]

    def in_turn(model: nn.Module, inspection: object) -> Precision:
        return Precision(tuple(bits[index % len(bits)] for index in range(len(model.layers))))

    for name in ("gemma3_text", "deepseek_v2"):
        hosted = host(*load(model_folder(name)), choose=in_turn)
        assert len(set(hosted.inspection.packings)) >= 2


SHARES = {LEVELS[0]: 1.0, LEVELS[1]: 0.1, LEVELS[2]: 0.01, LEVELS[3]: 0.0}
Divergence = Callable[[Sequence[LayerBits]], float]


@dataclass
class Model:
    """What a search asks of a model, without one.

    Args:
        harms: of each layer with keys by channel, as `errors` tells them.
    """

    divergence_of: Divergence
    harms: Sequence[float]
    tried: list[list[LayerBits]] = field(default_factory=list)

    @property
    def num_layers(self) -> int:
        return len(self.harms)

    def size(self, layer: int, bits: LayerBits) -> float:
        return bits.keys + bits.values

    def divergence(self, layers: Sequence[LayerBits]) -> float:
        self.tried.append(list(layers))
        return self.divergence_of(layers)

    def errors(self, bits: LayerBits) -> list[float]:
        return [SHARES[bits] * harm for harm in self.harms]


def find_precision(divergence: Divergence, num_layers: int, limit: float) -> Precision:
    """The search, of a model whose layers look alike."""
    model: Measurements = Model(divergence, [1.0] * num_layers)
    return search(model, limit)


def costs(harms: Sequence[float]):  # type: ignore[no-untyped-def]
    """A model whose layers do so much harm by channel each, a tenth with keys in 8, a hundredth in 8."""

    def divergence(layers: Sequence[LayerBits]) -> float:
        return sum(harm * SHARES[bits] for harm, bits in zip(harms, layers, strict=True))

    return divergence


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.floats(0, 2), min_size=1, max_size=40), st.floats(1e-4, 1))
def test_the_limit_holds_whatever_layers_do(harms: list[float], limit: float) -> None:
    found = find_precision(costs(harms), len(harms), limit)
    assert found.divergence is not None and found.divergence <= limit
    assert len(found.layers) == len(harms) and found.divergence == costs(harms)(found.layers)


def test_a_layer_that_does_harm_is_raised_and_no_other() -> None:
    harms = [0.001, 0.001, 0.9, 0.001]
    found = search(Model(costs(harms), harms), 0.02)
    assert found.layers == (BY_CHANNEL, BY_CHANNEL, LEVELS[2], BY_CHANNEL)


def test_values_are_lowered_before_keys() -> None:
    """By channel everywhere and keys in 8 are both too coarse; no layer stands 4 bits."""
    harms = [0.003 + 0.001 * (index % 7) for index in range(30)]
    found = search(Model(costs(harms), harms), 0.01)
    assert set(found.layers) == {LEVELS[1], LEVELS[2]}
    lowered = [harm for harm, bits in zip(harms, found.layers, strict=True) if bits == LEVELS[1]]
    kept = [harm for harm, bits in zip(harms, found.layers, strict=True) if bits == LEVELS[2]]
    assert max(lowered) <= min(kept) and found.divergence is not None and found.divergence > 0.007


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.floats(0, 2), min_size=1, max_size=40), st.floats(1e-4, 1))
def test_no_format_for_all_layers_is_smaller(harms: list[float], limit: float) -> None:
    found = search(Model(costs(harms), harms), limit)
    sizes = [
        sum(bits.keys + bits.values for bits in layers)
        for layers in (found.layers, *([b] * len(harms) for b in LEVELS))
    ]
    within = [size for size, bits in zip(sizes[1:], LEVELS, strict=True) if costs(harms)([bits] * len(harms)) <= limit]
    assert sizes[0] <= min(within)


HARMS = st.lists(st.tuples(*[st.floats(0, 2)] * 3), min_size=1, max_size=40)  # of each layer, in all but 16 bits


class Table(Model):
    """A model whose layers do the harms of a table, in sum `together` times those."""

    def __init__(self, harms: Sequence[Sequence[float]], together: float = 1.0) -> None:
        super().__init__(self._sum, [0.0] * len(harms))
        self.of = {bits: [row[level] for row in harms] for level, bits in enumerate(LEVELS[:-1])}
        self.of[SIXTEEN] = [0.0] * len(harms)
        self.together = together
        self.measured: set[object] = set()

    def _sum(self, layers: Sequence[LayerBits]) -> float:
        self.measured.add(tuple(layers))
        return self.together * sum(self.of[bits][index] for index, bits in enumerate(layers))

    def errors(self, bits: LayerBits) -> list[float]:
        self.measured.add(bits)
        return self.of[bits]


@settings(max_examples=examples(200), deadline=None)
@given(HARMS, st.floats(1e-4, 1))
def test_no_layer_has_a_format_with_a_smaller_and_better_one(harms: list[Sequence[float]], limit: float) -> None:
    """Whichever format does more harm in a layer, also 8 bits more than 4; their sum is the model's."""
    table = Table(harms)
    for index, bits in enumerate(search(table, limit).layers):
        smaller = LEVELS[: LEVELS.index(bits)]
        assert all(table.of[each][index] > table.of[bits][index] for each in smaller if bits != SIXTEEN)


@settings(max_examples=examples(200), deadline=None)
@given(HARMS, st.floats(1e-4, 1), st.floats(0.3, 3))
def test_any_table_is_searched_in_few_passes_to_one_end(
    harms: list[Sequence[float]], limit: float, together: float
) -> None:
    tables = [Table(harms, together) for _ in range(2)]
    found, again = (search(each, limit) for each in tables)
    assert found == again and found.divergence is not None
    assert found.divergence <= limit or set(found.layers) == {SIXTEEN}
    assert 1 + len(tables[0].measured) <= MOST_PASSES


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(1, 30), st.randoms(use_true_random=False), st.floats(1e-4, 1))
def test_of_what_is_measured_nothing_is_smaller_and_better(num_layers: int, random: Random, limit: float) -> None:
    """Whatever the numbers are, also where fewer bits do less harm, and layers more together than alone."""
    measured: dict[tuple[LayerBits, ...], float] = {(SIXTEEN,) * num_layers: 0.0}

    def divergence(layers: Sequence[LayerBits]) -> float:
        return measured.setdefault(tuple(layers), random.choice([0.0, limit / 2, limit, random.random(), math.inf]))

    model = Model(divergence, [random.random() for _ in range(num_layers)])
    errors = {bits: [random.choice([0.0, random.random()]) for _ in range(num_layers)] for bits in LEVELS}
    model.errors = errors.__getitem__  # type: ignore[method-assign]
    found = search(model, limit)
    assert found.divergence == measured[found.layers] <= limit

    def size(layers: Sequence[LayerBits]) -> int:
        return sum(bits.keys + bits.values for bits in layers)

    for layers, harm in measured.items():
        if harm <= limit and layers != found.layers:
            assert (size(layers), harm) >= (size(found.layers), found.divergence)


def test_nothing_is_raised_without_need() -> None:
    tried: list[Sequence[LayerBits]] = []

    def divergence(layers: Sequence[LayerBits]) -> float:
        tried.append(layers)
        return 0.001

    assert find_precision(divergence, 30, 0.01) == Precision((BY_CHANNEL,) * 30, 0.001)
    assert len(tried) == 1


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.floats(0, 2), min_size=1, max_size=96), st.floats(1e-4, 1), st.floats(1, 3))
def test_what_is_measured_is_bounded(harms: list[float], limit: float, together: float) -> None:
    """Deep models are not read once a layer, also where layers do more harm together than each by itself."""
    tried = 0

    def divergence(layers: Sequence[LayerBits]) -> float:
        nonlocal tried
        tried += 1
        return costs(harms)(layers) * (together if layers.count(BY_CHANNEL) > len(layers) // 4 else 1)

    found = find_precision(divergence, len(harms), limit)
    assert found.divergence is not None and found.divergence <= limit and tried <= 15


def test_a_model_that_stands_nothing_is_kept_as_it_is() -> None:
    def divergence(layers: Sequence[LayerBits]) -> float:
        return 0.0 if set(layers) == {SIXTEEN} else math.inf

    assert find_precision(divergence, 96, 0.01) == Precision((SIXTEEN,) * 96, 0.0)


def divergence_of(theirs: mx.array, logits: mx.array) -> float:
    return worse_part_divergence(theirs, logits, np.ones(len(theirs), bool))


def test_what_is_no_number_counts_as_harm() -> None:
    odds, nothing = mx.log(mx.array([[0.5, 0.5, 0.0]])), mx.full((1, 3), math.nan)
    assert divergence_of(odds, odds) == 0  # the third entry is padding
    assert divergence_of(odds, nothing) == divergence_of(nothing, odds) == math.inf


def test_divergence_is_kullback_and_leiblers() -> None:
    one, other = mx.log(mx.array([[0.5, 0.5], [0.9, 0.1]])), mx.log(mx.array([[0.25, 0.75], [0.9, 0.1]]))
    assert divergence_of(one, other) == pytest.approx(0.5 * (0.5 * mx.log(mx.array(4 / 3)).item()), abs=1e-6)
    assert divergence_of(one, one + 3) == pytest.approx(0, abs=1e-6)


PARTS = [slice(SEALED_READ_FROM), slice(SEALED_READ_FROM, None)]


@pytest.mark.parametrize("spoilt", PARTS, ids=["in 8 bits", "sealed"])
def test_neither_part_of_a_text_hides_the_other(spoilt: slice) -> None:
    """By channel, the first two blocks read 8 bits only: their positions must not lower the mean."""
    theirs = mx.log(mx.full((SEALED_READ_FROM + 64, 2), 0.5))
    ours = np.array(theirs)
    ours[spoilt] = np.log([0.25, 0.75])
    harm = 0.5 * math.log(4 / 3)
    every, same = np.ones(len(ours), bool), np.ones(len(ours), bool)
    same[spoilt] = False
    assert worse_part_divergence(theirs, mx.array(ours), every) == pytest.approx(harm, abs=1e-6)
    assert worse_part_divergence(theirs, mx.array(ours), ~same) == pytest.approx(harm, abs=1e-6)
    assert worse_part_divergence(theirs, mx.array(ours), same) == pytest.approx(0, abs=1e-6)
    outputs = np.ones((1, len(ours), 4), np.float32)
    outputs[:, spoilt] = 1.5
    assert _change(mx.ones(outputs.shape), mx.array(outputs)).item() == pytest.approx(0.25)


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Hosted, tuple[int, ...]]:
    read = read_model(str(embedded_model_path(tmp_path_factory.mktemp("embedded"))))
    read.evaluate()
    ids = sample_ids(read.tokenizer)
    read.tokenizer.close()
    return read.model, host(read.model, "qwen3", read.config, check=False), ids


@pytest.mark.slow
def test_the_embedded_model_does_with_keys_by_channel(embedded: tuple[nn.Module, Hosted, tuple[int, ...]]) -> None:
    model, hosted, ids = embedded
    found = Measured(ids)(model, hosted.inspection)
    assert set(found.layers) == {BY_CHANNEL} and found.divergence is not None
    assert 0 < found.divergence < MAX_DIVERGENCE


@pytest.mark.slow
def test_the_sample_fills_blocks_and_counts_where_the_model_knows_the_language(
    embedded: tuple[nn.Module, Hosted, tuple[int, ...]],
) -> None:
    """Keys by channel are only in full blocks. The embedded model knows facts, but neither prose nor code."""
    model, hosted, text = embedded
    assert len(text) > SEALED_READ_FROM + 64
    runs = PrecisionRuns(model, hosted.inspection, text, CurrentStep())
    runs.compute_reference()
    reference, layers = runs._reference, [BY_CHANNEL] * len(hosted.inspection.layers)
    assert reference is not None and reference.counted[0] and reference.counted[SEALED_READ_FROM:].any()
    found, counted = divergences_of(reference.logprobs, runs.logprobs(text, layers)), reference.counted
    means = [found[part][counted[part]].mean() for part in PARTS]
    assert runs.divergence(layers) == pytest.approx(max(means), rel=1e-3)
    assert runs.divergence(layers) > 5 * runs.divergence([LayerBits(8, 8)] * len(layers)), "no block was full"


def test_stretches_that_a_model_does_not_know_do_not_count() -> None:
    """Unless it knows none. No number is nothing that it knows."""
    known, unknown, nothing = mx.full((64, 2), math.log(0.5)), mx.full((64, 2), -9.0), mx.full((64, 2), math.nan)

    def counted(*parts: mx.array) -> list[bool]:
        logprobs = mx.concatenate([*parts, parts[0][:9]])
        logprobs = mx.concatenate([logprobs, mx.full((len(logprobs), 14), -9.0)], axis=1)
        places = _familiar([0] * len(logprobs), logprobs)
        assert len(places) == len(logprobs)
        return [bool(each) for each in places[::64]]

    assert counted(known, unknown, known) == [True, False, True, True]
    assert counted(unknown, known) == [False, True, False]
    assert counted(unknown, nothing) == counted(nothing, nothing) == counted(known, known) == [True] * 3


@pytest.mark.parametrize(("name", "lowest"), [("qwen2", BY_CHANNEL), ("deepseek_v2", FOUR)])
def test_the_smallest_format_is_by_channel_and_of_latents_per_token(
    model_folder: ModelFolder, name: str, lowest: LayerBits
) -> None:
    """Also without a text to measure."""
    model, model_type, config = load(model_folder(name))
    inspection = host(model, model_type, config, check=False).inspection
    measured = Measured(list(range(5, 30)), limit=math.inf)(model, inspection)
    assert set(measured.layers) == {lowest} and measured.divergence is not None
    unmeasured = Measured(())(model, inspection)
    assert set(unmeasured.layers) == {lowest} and unmeasured.divergence is None


@pytest.mark.slow
@pytest.mark.parametrize("spoil", [add_outliers, add_key_biases], ids=["channels", "biases"])
def test_large_channels_of_keys_need_no_more_bits(spoil: Callable[[nn.Module], None], tmp_path: Path) -> None:
    """The copy computes the same results; only quantisation per token makes them worse."""
    read = read_model(str(embedded_model_path(tmp_path)))
    read.evaluate()
    text = sample_ids(read.tokenizer)
    read.tokenizer.close()
    before = read.model(mx.array([text]))
    spoil(read.model)
    after = read.model(mx.array([text]))
    assert (mx.abs(after - before).max() / mx.abs(before).max()).item() < 1e-4
    inspection = host(read.model, "qwen3", read.config, check=False).inspection
    runs = PrecisionRuns(read.model, inspection, text, CurrentStep())
    runs.compute_reference()
    assert runs.divergence([FOUR] * len(inspection.layers)) > 5 * MAX_DIVERGENCE
    found = Measured(text)(read.model, inspection)
    assert set(found.layers) == {BY_CHANNEL}
    assert found.divergence is not None and found.divergence <= MAX_DIVERGENCE / 4
    again = Measured(text, kept=found)(read.model, inspection)
    assert again is found


def test_an_interrupted_search_loses_nothing(model_folder: ModelFolder) -> None:
    """Each number is kept when it is measured; another search begins with the next one."""
    model, model_type, config = load(model_folder("qwen2"))
    inspection = host(model, model_type, config, check=False).inspection
    text = [5 + 7 * index % 90 for index in range(SEALED_READ_FROM + 44)]
    runs, kept = PrecisionRuns(model, inspection, text, CurrentStep()), dict[str, list[float]]()
    runs.compute_reference()
    limit = runs.divergence([BY_CHANNEL] * len(inspection.layers)) / 2

    def search() -> PrecisionSearch:
        return PrecisionSearch(model, inspection, text, known=kept, keep=kept.update, limit=limit)

    whole = search()
    while whole.precision is None:
        whole.advance()
    assert max(bits.keys for bits in whole.precision.layers) > 4
    assert whole.measuring.done > 3 and {"errors in 4", "k8v4", "4"} < kept.keys()
    numbers = dict(kept)
    kept.clear()

    passes, found = 0, None
    while found is None:
        one = search()
        for _ in range(2):  # the reference, and one measurement
            one.advance()
        passes, found = passes + 1, one.precision
    assert found == whole.precision and kept == numbers
    assert passes == whole.measuring.done - 1


@pytest.mark.parametrize("ours", [True, False])
def test_ranks_compare_in_one_dtype(model_folder: ModelFolder, ours: bool) -> None:
    """Rank 0 says whether there is room for weights in float32, whatever this rank has."""
    model, model_type, config = load(model_folder("qwen2"))
    model.set_dtype(mx.bfloat16)
    inspection = host(model, model_type, config, check=False).inspection
    runs = PrecisionRuns(model, inspection, list(range(5, 30)), CurrentStep())
    runs.compute_reference(lambda own: float(ours))
    with runs._device_dtype(runs._reference.is_float32):  # type: ignore[union-attr]
        assert is_float32(model) == ours


@pytest.mark.parametrize("quantised", [False, True])
def test_a_search_goes_on_in_the_dtype_of_its_reference(model_folder: ModelFolder, quantised: bool) -> None:
    """Also a search that began within another copy."""
    model, model_type, config = load(model_folder("qwen2"))
    if quantised:
        nn.quantize(model, 32, 8)
    model.set_dtype(mx.bfloat16)
    inspection = host(model, model_type, config, check=False).inspection
    text, layers = list(range(5, 30)), [FOUR] * len(inspection.layers)
    with in_float32(model):
        runs = PrecisionRuns(model, inspection, text, CurrentStep())
        runs.compute_reference()
        inside = runs.divergence(layers)
    assert not is_float32(model)
    assert runs.divergence(layers) == pytest.approx(inside, rel=1e-4)


@pytest.mark.parametrize("room", [True, False])
def test_a_half_precision_model_is_proved_in_float32(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    """On a CPU, which multiplies bfloat16 slowly; it is served as it is. Rank 0 says whether there is room."""
    seen: list[bool] = []
    pieces = Proof.pieces

    def noted(proof: Proof) -> Iterator[None]:
        seen.append(is_float32(proof._model))
        return pieces(proof)

    monkeypatch.setattr(Proof, "pieces", noted)
    monkeypatch.setattr(loader, "host", host)
    read = read_model(str(model_folder("qwen2")))
    read.tokenizer.close()
    read.model.set_dtype(mx.bfloat16)
    loaded = loader.put_on_cache(read, kv="k8v4", agree=lambda own: own if room else 0.0)
    assert seen == [room] and not is_float32(loaded.model)


@pytest.mark.parametrize("name", ["deepseek_v2", slow("gemma3_text"), slow("phi3")])
def test_a_served_model_changes_its_bits_on_another_thread(model_folder: ModelFolder, name: str) -> None:
    """It is not read again, and is what a start with the choice kept loads."""
    folder, results = str(model_folder(name)), list[loader.LoadedModel]()

    def on_a_thread(work: Callable[[], loader.LoadedModel]) -> loader.LoadedModel:
        def run() -> None:
            results.append(work())
            mx.clear_streams()

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return results.pop()

    def served() -> loader.LoadedModel:
        loaded = loader.load(folder, kv="auto", measure_seconds=0)
        while loaded.search is not None and loaded.search.precision is None:
            loaded.search.advance()
        return loaded

    first = on_a_thread(served)
    assert first.search is not None and set(map(str, first.precision.layers)) == {"8"}
    chosen = first.search.precision
    second = on_a_thread(lambda: loader.in_chosen_precision(first, StartProgress()))
    assert second.precision == chosen and second.search is None and second.model is first.model
    kept = loader.load(folder, kv="auto", kept=lambda fingerprint: chosen)
    assert second.spec == kept.spec != first.spec and second.names == kept.names
    for loaded in (second, kept):
        loaded.tokenizer.close()


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_a_model_computes_in_float32(dtype: mx.Dtype, model_folder: ModelFolder) -> None:
    """Whatever the weights are kept in; and the model is as before when the search is over."""
    read = read_model(str(model_folder("qwen2")))
    read.tokenizer.close()
    read.model.set_dtype(dtype)
    nn.quantize(read.model, 32, 8)
    before = dict(tree_flatten(read.model.parameters()))
    kinds = {name: type(module) for name, module in read.model.named_modules()}
    ids = mx.array([list(range(5, 20))])
    expected = read.model(ids)
    with in_float32(read.model):
        inside = read.model(ids)
        mx.eval(inside)
    assert inside.dtype == mx.float32
    if dtype == mx.float32:
        assert mx.abs(inside - expected).max().item() < 1e-3 * mx.abs(expected).max().item()
    after = dict(tree_flatten(read.model.parameters()))
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)
    assert kinds == {name: type(module) for name, module in read.model.named_modules()}
