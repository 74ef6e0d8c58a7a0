"""Rows that share base's keys and values: where they are exact, how far off elsewhere, and beside others in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from agentcache.blocks.pool import BlockTable
from agentcache.errors import BrokenInvariant
from agentcache.kv.reads import Reads
from agentcache.models.adapters import AdapterWeights, RowAdapter
from agentcache.models.loader import LoadedModel
from agentcache.models.residual.rows import ResidualRow, ResidualRows
from agentcache.models.step import StepInputs, StepOutputs
from tests.device_marks import same_steps
from tests.models.driver import Driver, Row
from tests.models.lora_driver import difference
from tests.models.residual.driver import AnyRow, ResidualDriver, ResidualKV
from tests.models.residual.oracle import KEYS_AND_VALUES, adapter, small_model

ATTENTION = ("self_attn.q_proj", *KEYS_AND_VALUES, "self_attn.o_proj")
EVERYTHING = (*ATTENTION, "mlp.gate_proj", "mlp.down_proj")
IDS = np.random.default_rng(5).integers(0, 90, 330)


def exact(loaded: LoadedModel, weights: AdapterWeights | None, ids: np.ndarray = IDS) -> mx.array:
    return Driver(loaded).logits(ids, [len(ids)], adapter=None if weights is None else RowAdapter(weights))


def shared(loaded: LoadedModel, weights: AdapterWeights, ids: np.ndarray = IDS) -> mx.array:
    driver = ResidualDriver(loaded)
    return driver.read(driver.residual_kv(driver.row(), weights), ids, 110)


def full_reuse(loaded: LoadedModel, weights: AdapterWeights, other: AdapterWeights | None) -> mx.array:
    """The adapter on keys and values that another one, or base, has computed: the baseline that must lose."""
    driver = Driver(loaded)
    theirs, own = driver.row(), driver.row()
    user = None if other is None else RowAdapter(other)
    driver.logits(IDS, [len(IDS)], theirs, user)
    driver._reserve(own, len(IDS))
    step = StepInputs(
        mx.array(IDS.astype(np.int32))[None],
        [0],
        reads=driver.runner.reads([theirs.tables], [0], len(IDS)),
        writes=driver.runner.writes([own.tables], [0], len(IDS)),
        adapters=[RowAdapter(weights)],
        all_logits=True,
        states=[None],
    )
    logits = driver.runner.forward(step).logits[0]
    mx.eval(logits)
    return logits


@pytest.mark.parametrize("model", ["qwen2", "qwen3", "gemma3_text"])
def test_an_adapter_of_the_last_layer_only_is_exact_at_8_bits(model: str, tmp_path: Path) -> None:
    loaded = small_model(model, kv_bits=8, num_hidden_layers=3)
    weights = adapter(loaded, tmp_path, 5, targets=EVERYTHING, layers=[2], strength=1.0)
    wanted, base, actual = exact(loaded, weights), exact(loaded, None), shared(loaded, weights)
    best = mx.sort(wanted, axis=-1)[:, -2:]
    same = actual.argmax(axis=-1) == wanted.argmax(axis=-1)
    assert mx.all(same | (best[:, 1] - best[:, 0] < 0.05)).item()  # of logits up to 5; what 8 bits leave is 0.01
    assert difference(actual, wanted) < 0.01
    assert difference(wanted, base) > 0.2


@pytest.mark.parametrize(
    ("model", "kv_bits"),
    [
        pytest.param(model, bits, marks=same_steps if (model, bits) == ("qwen2", 8) else ())
        for model in ("qwen2", "qwen3", "phi3")
        for bits in (4, 8)
    ],
)
def test_an_adapter_that_adds_nothing_is_base(model: str, kv_bits: int, tmp_path: Path) -> None:
    loaded = small_model(model, kv_bits=kv_bits)
    weights = adapter(loaded, tmp_path, 3, targets=(*KEYS_AND_VALUES, "self_attn.qkv_proj"), strength=0.0)
    assert difference(shared(loaded, weights), exact(loaded, None)) < 1e-5


@pytest.mark.parametrize(
    ("model", "seeds"),
    [("qwen3", 2), *(pytest.param(name, 4, marks=pytest.mark.slow) for name in ("llama", "qwen3", "gemma3_text"))],
)
def test_the_error_falls_with_the_adapter_and_is_less_than_that_of_full_reuse(
    model: str, seeds: int, tmp_path: Path
) -> None:
    loaded = small_model(model, kv_bits=8, num_hidden_layers=3)
    errors: dict[float, list[float]] = {0.05: [], 0.2: []}
    other = adapter(loaded, tmp_path / "other", 4, targets=EVERYTHING, strength=0.2, seed=99)
    for strength, found in errors.items():
        for seed in range(seeds):
            weights = adapter(
                loaded, tmp_path / f"{strength}.{seed}", 4, targets=EVERYTHING, strength=strength, seed=seed
            )
            wanted = exact(loaded, weights)
            found.append(difference(shared(loaded, weights), wanted))
            assert found[-1] < difference(full_reuse(loaded, weights, None), wanted)
            assert found[-1] < difference(full_reuse(loaded, weights, other), wanted)
    assert np.mean(errors[0.05]) / np.mean(errors[0.2]) <= 0.4


@pytest.fixture
def crowd(tmp_path: Path) -> tuple[LoadedModel, list[AdapterWeights]]:
    """Rank 4 everywhere, rank 16 in the upper layer, values only, keys only."""
    loaded = small_model("gemma3_text")
    recipes: list[dict[str, Any]] = [
        {"rank": 4, "targets": EVERYTHING},
        {"rank": 16, "targets": ATTENTION, "layers": [1]},
        {"rank": 3, "targets": ["self_attn.q_proj", "self_attn.v_proj"]},
        {"rank": 2, "targets": ["self_attn.k_proj"]},
    ]
    return loaded, [adapter(loaded, tmp_path / str(i), seed=i, **recipe) for i, recipe in enumerate(recipes)]


def start(driver: ResidualDriver, weights: list[AdapterWeights]) -> list[AnyRow]:
    """Rows of all policies and many lengths, each read; residual ones have their companions behind them."""
    rows: list[AnyRow] = []
    for seed, length in enumerate((40, 5, 290, 256, 17, 33, 60)):
        ids = np.random.default_rng(seed).integers(0, 90, length)
        row = driver.row()
        if seed < len(weights):
            residual_kv = driver.residual_kv(row, weights[seed])
            driver.read(residual_kv, ids, 100)
            rows.append(residual_kv)
            continue
        user = (None, RowAdapter(weights[0]), RowAdapter(weights[1], 9))[seed - len(weights)]
        driver.logits(ids, [length], row, user)
        rows.append(row if user is None else (row, user))
    return rows


def decode(driver: ResidualDriver, rows: Sequence[AnyRow], steps: int = 6) -> mx.array:
    """Logits [steps, rows, vocabulary]: greedy, of rows and, behind them, the companions of residual ones."""
    tokens, found = [7] * len(rows), []
    for _ in range(steps):
        residual_kvs = [place for place, row in enumerate(rows) if isinstance(row, ResidualKV)]
        companions = [row.base for row in rows if isinstance(row, ResidualKV)]
        ids = np.array([*tokens, *(tokens[place] for place in residual_kvs)])[:, None]
        logits = driver.mixed([*rows, *companions], ids).logits[: len(rows), 0]
        found.append(logits)
        tokens = logits.argmax(axis=-1).tolist()
    return mx.stack(found)


@pytest.mark.slow
def test_rows_of_all_kinds_are_in_a_batch_what_they_are_alone(
    crowd: tuple[LoadedModel, list[AdapterWeights]],
) -> None:
    loaded, weights = crowd
    driver = ResidualDriver(loaded)
    together = decode(driver, start(driver, weights))
    for place in range(together.shape[1]):
        alone = ResidualDriver(loaded)
        row = start(alone, weights)[place]
        assert difference(together[:, place], decode(alone, [row])[:, 0]) < 2e-3, place


def contents(driver: Driver, row: Row, num_tokens: int) -> list[bytes]:
    return [
        bytes(driver.runner.base.snapshot(group, block_id, min(256, num_tokens - 256 * position)))
        for group, table in enumerate(row.tables)
        for position, block_id in enumerate(table.block_ids)
    ]


def test_base_blocks_are_the_same_bytes_whoever_reads_them(crowd: tuple[LoadedModel, list[AdapterWeights]]) -> None:
    loaded, weights = crowd
    plain, driver = Driver(loaded), ResidualDriver(loaded)
    untouched, base = plain.row(), driver.row()
    plain.logits(IDS, [110] * 3, untouched)
    rows = [driver.residual_kv(base, each) for each in weights]
    driver.read(rows[0], IDS, 110)
    for row in rows[1:]:
        for begin in range(0, len(IDS), 110):
            driver.mixed([row], IDS[None, begin : begin + 110])
    assert contents(driver, base, len(IDS)) == contents(plain, untouched, len(IDS))


def test_companions_write_what_base_rows_write(crowd: tuple[LoadedModel, list[AdapterWeights]]) -> None:
    """Whatever the adapter's rows beside them are: the next turn's base is what base itself would have cached."""
    loaded, weights = crowd
    driver, plain = ResidualDriver(loaded), ResidualDriver(loaded)
    residual_kv, other = driver.residual_kv(driver.row(), weights[0]), plain.row()
    driver.read(residual_kv, IDS[:300], 100)
    plain.logits(IDS[:300], [100] * 3, other)
    for token in IDS[300:]:
        driver.mixed([residual_kv, residual_kv.base], np.full((2, 1), token))
        plain.mixed([other, plain.row()], np.full((2, 1), token))  # as many rows, since products differ by their shapes
    assert contents(driver, residual_kv.base, len(IDS)) == contents(plain, other, len(IDS))


def test_what_passes_float16_saturates_and_is_counted(tmp_path: Path) -> None:
    loaded = small_model("llama")
    weights = adapter(loaded, tmp_path, 2, strength=0.01)
    for pair in weights.matrices.values():
        pair.a[:, 0] = pair.a[:, 0] * 1e8
    driver = ResidualDriver(loaded)
    row = driver.residual_kv(driver.row(), weights)
    logits = driver.read(row, IDS[:40])
    counted = row.cache.arenas.saturated.item()
    assert 0 < counted <= 40 * 2 * 2  # one component of two, keys and values, of two layers
    assert mx.isfinite(logits).all().item()
    (arena,) = {id(arena): arena for arena in [row.cache.arenas]}.values()
    _, tensor = arena.tensor("residual.layers.0.key_a.@")
    assert mx.abs(tensor.array).max().item() == 65504


def test_residuals_that_are_not_there_are_never_read(tmp_path: Path) -> None:
    loaded = small_model("llama")
    driver = ResidualDriver(loaded)
    row = driver.residual_kv(driver.row(), adapter(loaded, tmp_path, 2))
    driver.read(row, IDS)
    row.tables[0].block_ids = row.tables[0].block_ids[1:]
    row.tables[0].first_block = 1
    with pytest.raises(BrokenInvariant, match="lacks residuals"):
        driver.mixed([row, row.base], np.array([[1], [1]]))


def test_what_others_have_left_in_the_slots_does_not_matter(tmp_path: Path) -> None:
    """Places behind a row's end are read, masked: the largest numbers that there can be must not show."""
    loaded = small_model("qwen3")
    weights = adapter(loaded, tmp_path, 3)
    clean = shared(loaded, weights)
    driver = ResidualDriver(loaded)
    row = driver.residual_kv(driver.row(), weights)
    for pool in row.cache.pools:
        pool.grow(2)
    row.cache.arenas.fit()
    for group, spec in enumerate(row.cache.arenas.spec.groups):
        largest = np.full(spec.bytes_per_block // 2, 65504, np.float16).view(np.uint8)
        row.cache.arenas.put_blocks(group, [0, 1], [largest, largest])
    assert mx.array_equal(driver.read(row, IDS, 110), clean)


def operations(driver: ResidualDriver, rows: Sequence[AnyRow], folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """What a decode step has the device do, and how often."""
    counted = []
    forward = driver.runner.forward

    def counting(step: StepInputs) -> StepOutputs:
        outputs = forward(step)
        graph = folder / "step.dot"
        mx.export_to_dot(str(graph), outputs.logits, *(tensor.array for tensor in driver.runner._tensors()))
        counted.append(graph.read_text().count("shape=rectangle"))
        return outputs

    with monkeypatch.context() as patch:
        patch.setattr(driver.runner, "forward", counting)
        driver.mixed(rows, np.ones((len(rows), 1), int))
    return counted[0]


@pytest.mark.usefixtures("without_kernels")
def test_a_step_without_residual_rows_does_nothing_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many adapters have residuals."""
    loaded = small_model("qwen3")
    plain, driver = ResidualDriver(loaded), ResidualDriver(loaded)
    weights = [adapter(loaded, tmp_path / str(seed), 3, seed=seed) for seed in range(2)]
    for seed in weights:
        driver.read(driver.residual_kv(driver.row(), seed), IDS[:40])
    rows = []
    for each in (plain, driver):
        rows.append([each.row(), each.row()])
        for row in rows[-1]:
            each.logits(IDS[:40], [40], row)
    wanted = operations(plain, rows[0], tmp_path, monkeypatch)
    assert operations(driver, rows[1], tmp_path, monkeypatch) == wanted > 100
    residual_kv = driver.residual_kv(driver.row(), weights[0])
    driver.read(residual_kv, IDS[:40])
    assert operations(driver, [residual_kv, residual_kv.base], tmp_path, monkeypatch) > 1.2 * wanted, "it counts"


def rows_alone(rows: list[ResidualRow], batch_size: int = 3) -> ResidualRows:
    forms: Any = None  # nothing of a model is asked for
    return ResidualRows(rows, forms, batch_size, num_tokens=1)


def row_alone(place: int, table: BlockTable, length: int, arenas: Any = None, *, is_read: bool = True) -> ResidualRow:
    weights: Any = None
    return ResidualRow(place, weights, arenas, [table], length, is_read=is_read)


def test_rows_come_back_to_their_places() -> None:
    reads = Reads([BlockTable([slot]) for slot in range(3)], [5, 6, 7], 1, None)
    plain, plain_reads, order = rows_alone([])._plan(0, (0,), reads)
    assert plain_reads is not None and plain.tolist() == [1, 2] and plain_reads.rows == reads.rows[1:]
    computed = ["row 1", "row 2", "row 0"]  # plain rows first
    assert [computed[index] for index in order.tolist()] == ["row 0", "row 1", "row 2"]


def test_residuals_of_a_window_are_those_of_the_same_tokens() -> None:
    base, residuals = BlockTable([0, 1, 2, 3]), BlockTable([7, 8], first_block=2)
    reads = Reads([base], [900], 1, 300)
    ids, _ = rows_alone([row_alone(0, residuals, 900)], 1)._residual_ids(0, 0, reads)
    assert reads.rows[0].base == 512 and list(ids) == [7, 8]


def test_a_reader_is_measured_where_its_own_residuals_lie() -> None:
    written: list[int] = []
    tokens = SimpleNamespace(assign=lambda index, new: written.append(index[0]))
    arenas = SimpleNamespace(measures={0: SimpleNamespace(tokens=tokens)}, measured=0)
    writer, reader = (
        row_alone(place, BlockTable([slot]), 9, arenas, is_read=place > 0) for place, slot in ((0, 3), (1, 5))
    )
    rows_alone([writer, reader], 2).keep_measures(mx.zeros((1, 1, 4)))
    assert written == [5]
