"""Rows and tokens with adapters do not disturb those without, nor each other; the base model stays as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from agentcache.errors import BrokenInvariant
from agentcache.models import loader
from agentcache.models.adapters import AdapterWeights, RowAdapter
from agentcache.models.loader import LoadedModel
from agentcache.models.lora import AdaptedLinear, Stacks
from tests.adapters_factory import ATTENTION, MLP, make_adapter
from tests.conftest import ModelFolder
from tests.marks import slow
from tests.models.driver import Driver, Row, random_ids
from tests.models.lora_driver import VISIBLE, adapted_step, difference, put, run


@pytest.fixture(scope="module")
def loaded(model_folder: ModelFolder) -> LoadedModel:
    """Biases, norms on queries and keys, windows."""
    return loader.load(str(model_folder("gemma3_text")), kv="4t")


@pytest.fixture(scope="module")
def several(
    loaded: LoadedModel, model_folder: ModelFolder, tmp_path_factory: pytest.TempPathFactory
) -> list[AdapterWeights]:
    """Three adapters of different ranks, modules and layers."""
    recipes: list[dict[str, Any]] = [
        {"rank": 3, "targets": ["self_attn.q_proj", "self_attn.v_proj"]},
        {"rank": 8, "targets": [*ATTENTION, *MLP], "layers": [4, 5, 6, 7]},
        {"rank": 5, "targets": ["self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj"], "layers": [1, 6]},
    ]
    folder = tmp_path_factory.mktemp("adapters")
    source = model_folder("gemma3_text")
    return [
        put(loaded, make_adapter(folder / str(seed), source, seed=seed, strength=1.0, **recipe))
        for seed, recipe in enumerate(recipes)
    ]


@pytest.fixture(params=[True, False], ids=["stacked", "in turn"])
def both_ways(request: pytest.FixtureRequest, loaded: LoadedModel, several: list[AdapterWeights]) -> Iterator[None]:
    if request.param:
        loaded.adapters.stacks.cover(several)
    yield
    loaded.adapters.stacks.clear()


def contents(driver: Driver, row: Row, num_tokens: int) -> list[np.ndarray]:
    """What the cache holds of a row's first tokens, in all groups and layers."""
    return [
        driver.runner.base.snapshot(group, table.block_id(position), min(256, num_tokens - position * 256))
        for group, table in enumerate(row.tables)
        for position in range(-(-num_tokens // 256))
    ]


@pytest.mark.parametrize(
    ("start", "which"),
    [
        (start, which) if which == 1 or start == 255 else slow(start, which)
        for start in (1, 20, 255, 256, 279)
        for which in (0, 1, 2)
    ],
)
def test_tokens_before_the_start_are_base_bit_for_bit(
    loaded: LoadedModel, several: list[AdapterWeights], which: int, start: int
) -> None:
    """All of them: keys, values and logits, although modules behind attention are adapted too."""
    ids = random_ids(loaded, 280)
    base, adapted = Driver(loaded), Driver(loaded)
    rows = base.row(), adapted.row()
    plain = base.logits(ids, [280], rows[0])
    actual = adapted.logits(ids, [280], rows[1], RowAdapter(several[which], start))
    assert mx.array_equal(actual[:start], plain[:start])
    for one, other in zip(contents(base, rows[0], start), contents(adapted, rows[1], start), strict=True):
        np.testing.assert_array_equal(one, other)
    assert difference(actual[start:], plain[start:]) > VISIBLE


@pytest.mark.parametrize("chunks", [[60], slow([1] * 60), [7] * 8 + [4], [36, 24], [37, 23], [35, 25]])
def test_a_start_inside_a_chunk_is_one_between_chunks(
    loaded: LoadedModel, several: list[AdapterWeights], chunks: list[int]
) -> None:
    ids = random_ids(loaded, 60)
    driver = Driver(loaded)
    row = driver.row()
    driver.logits(ids[:36], [36], row)
    expected = driver.logits(ids[36:], [24], row, RowAdapter(several[1]))
    actual = Driver(loaded).logits(ids, chunks, adapter=RowAdapter(several[1], 36))
    assert difference(actual[36:], expected) < 0.01  # other chunks flip a 4-bit code now and then
    assert difference(run(loaded, ids, RowAdapter(several[1], 35), chunks)[36:], expected) > 0.02


def test_a_start_behind_everything_is_base(loaded: LoadedModel, several: list[AdapterWeights]) -> None:
    ids = random_ids(loaded, 30)
    assert mx.array_equal(run(loaded, ids, RowAdapter(several[1], 30), [29, 1]), run(loaded, ids, None, [29, 1]))


def decode(driver: Driver, rows: Sequence[Row], adapters: Sequence[RowAdapter | None], last: list[int]) -> Any:
    """Greedy tokens [steps, B] and logprobs [steps, B, vocabulary] of eight steps."""
    tokens, logprobs = [last], []
    for _ in range(8):
        logits = driver.step(rows, np.array(tokens[-1])[:, None], adapters=adapters)[:, -1]
        logprobs.append(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        tokens.append(logits.argmax(axis=-1).tolist())
    return tokens[1:], mx.stack(logprobs)


LENGTHS = (40, 5, 290, 256, 17)


def users_of(several: list[AdapterWeights]) -> list[RowAdapter | None]:
    """Base, plain LoRA of three ranks, and one activated in the middle of its prompt."""
    return [None, *(RowAdapter(weights) for weights in several), RowAdapter(several[1], 9)]


@pytest.mark.usefixtures("both_ways")
def test_rows_of_a_mixed_batch_are_what_they_are_alone(loaded: LoadedModel, several: list[AdapterWeights]) -> None:
    driver, users = Driver(loaded), users_of(several)
    together, alone = [], []
    for seed, (length, user) in enumerate(zip(LENGTHS, users, strict=True)):
        for rows in (together, alone):
            rows.append(driver.row())
            driver.logits(random_ids(loaded, length, seed), [length], rows[-1], user)
    tokens, logprobs = decode(driver, together, users, [11] * len(users))
    texts = set()
    for index, (row, user) in enumerate(zip(alone, users, strict=True)):
        expected_tokens, expected_logprobs = decode(driver, [row], [user], [11])
        assert [step[index] for step in tokens] == [step[0] for step in expected_tokens]
        assert mx.abs(logprobs[:, index] - expected_logprobs[:, 0]).max().item() < 1e-3
        texts.add(tuple(step[index] for step in tokens))
    assert len(texts) == len(users)


@pytest.mark.usefixtures("both_ways")
def test_several_rows_of_several_tokens(loaded: LoadedModel, several: list[AdapterWeights]) -> None:
    """Starts before, inside and behind the step, in one step."""
    driver = Driver(loaded)
    users = [
        RowAdapter(several[0], 3),
        RowAdapter(several[1]),
        None,
        RowAdapter(several[2], 6),
        RowAdapter(several[1], 9),
    ]
    ids = random_ids(loaded, (5, 7))
    logits = driver.step([driver.row() for _ in users], ids, adapters=users)
    for index, user in enumerate(users):
        expected = driver.step([driver.row()], ids[index : index + 1], adapters=[user])[0]
        assert difference(logits[index], expected) < 1e-3
        if user is not None and user.start < 7:
            assert difference(logits[index], driver.step([driver.row()], ids[index : index + 1])[0]) > 1e-2


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("num_adapters", [1, 3])
def test_base_rows_of_a_mixed_batch_are_base_bit_for_bit(
    loaded: LoadedModel, several: list[AdapterWeights], num_adapters: int
) -> None:
    ids = random_ids(loaded, (5, 1))
    users = [*(RowAdapter(weights) for weights in several[:num_adapters]), *[None] * (5 - num_adapters)]
    steps = []
    for adapters in ([], users):
        driver = Driver(loaded)
        rows = [driver.row() for _ in users]
        for seed, row in enumerate(rows):
            driver.logits(random_ids(loaded, 20 + seed, seed), [20 + seed], row)
        steps.append(driver.step(rows, ids, adapters=adapters))
    assert mx.array_equal(steps[0][num_adapters:], steps[1][num_adapters:])
    for index in range(num_adapters):
        assert difference(steps[0][index], steps[1][index]) > VISIBLE


# -- stacks ------------------------------------------------------------------------------------------------------------


def made_bytes(stacks: Stacks) -> int:
    return sum(stack.a.nbytes + stack.b.nbytes for stack in stacks._by_module.values())


def mixed_step(driver: Driver, weights: Sequence[AdapterWeights | None]) -> None:
    users = [RowAdapter(user) if user else None for user in weights]
    driver.step([driver.row() for _ in users], random_ids(driver.loaded, (len(users), 1)), adapters=users)


def test_the_bytes_of_a_set_are_known_before_anything_is_made(
    loaded: LoadedModel, several: list[AdapterWeights]
) -> None:
    stacks, driver = loaded.adapters.stacks, Driver(loaded)
    mixed_step(driver, several)
    assert made_bytes(stacks) == stacks.nbytes == 0, "not asked for"
    for covered in (several, several[:2], several[1:]):
        stacks.cover(covered)
        promised = stacks.nbytes
        mixed_step(driver, [covered[0], None, covered[0]])
        assert made_bytes(stacks) == 0 < promised
        mixed_step(driver, [*covered, None])
        assert made_bytes(stacks) == stacks.nbytes == promised
    mixed_step(driver, several)
    assert made_bytes(stacks) == stacks.nbytes == promised, "one of them is not covered"
    stacks.clear()


def test_no_stack_where_only_one_of_the_adapters_acts(model_folder: ModelFolder, tmp_path: Path) -> None:
    model = model_folder("llama")
    loaded = loader.load(str(model), kv="4t")
    a = put(loaded, make_adapter(tmp_path / "a", model, targets=["self_attn.q_proj"]))
    b = put(loaded, make_adapter(tmp_path / "b", model, targets=["self_attn.v_proj"]))
    loaded.adapters.stacks.cover([a, b])
    mixed_step(Driver(loaded), [a, b])
    assert made_bytes(loaded.adapters.stacks) == loaded.adapters.stacks.nbytes == 0


# -- the model stays as it is ------------------------------------------------------------------------------------------


def parameters(model: nn.Module) -> dict[str, bytes]:
    """Every parameter's bytes, by the name it has without adapters."""
    flat = tree_flatten(model.parameters())
    return {name.replace(".original.", "."): np.array(value).tobytes() for name, value in flat}


@pytest.mark.parametrize("architecture", ["llama_bias", "phi3", "deepseek_v2_q_lora"])
def test_no_parameter_changes(model_folder: ModelFolder, tmp_path: Path, architecture: str) -> None:
    model = model_folder(architecture)
    loaded = loader.load(str(model), kv="4t")
    before, ids = parameters(loaded.model), random_ids(loaded, (2, 6))
    weights = [put(loaded, make_adapter(tmp_path / str(seed), model, seed=seed)) for seed in (0, 1)]
    driver = Driver(loaded)
    rows = [driver.row(), driver.row()]
    driver.step(rows, ids, adapters=[RowAdapter(user) for user in weights])
    assert parameters(loaded.model) == before


def test_weights_come_back_as_they_were(model_folder: ModelFolder, tmp_path: Path) -> None:
    model = model_folder("llama")
    loaded = loader.load(str(model), kv="4t")
    folder, ids = make_adapter(tmp_path, model), random_ids(loaded, 20)
    first = put(loaded, folder)
    before = run(loaded, ids, RowAdapter(first), [20])
    again = put(loaded, folder)
    assert again.adapter == first.adapter and again is not first
    assert mx.array_equal(run(loaded, ids, RowAdapter(again), [20]), before)


def wrapper_of(loaded: LoadedModel) -> AdaptedLinear:
    wrapper = loaded.model.layers[6].self_attn.q_proj
    assert isinstance(wrapper, AdaptedLinear)
    return wrapper


def test_modules_are_wrapped_once(loaded: LoadedModel, several: list[AdapterWeights]) -> None:
    attention = loaded.model.layers[6].self_attn
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        assert isinstance(attention[name], AdaptedLinear) and isinstance(attention[name].original, nn.Linear)
    assert not isinstance(loaded.model.layers[1].mlp.up_proj, AdaptedLinear)


def test_a_wrapper_shows_the_original(loaded: LoadedModel, several: list[AdapterWeights]) -> None:
    wrapper = wrapper_of(loaded)
    assert wrapper.weight is wrapper.original.weight
    with pytest.raises(AttributeError, match="scales"):
        _ = wrapper.scales


def test_without_adapters_nothing_is_added(loaded: LoadedModel, several: list[AdapterWeights]) -> None:
    """Not even to the graph: the very array that the original gives."""
    wrapper = wrapper_of(loaded)
    x = mx.zeros((1, 2, 128))
    y = wrapper.original(x)
    assert wrapper._adapt(x, y) is y
    for row in (
        None,
        RowAdapter(several[0], 2),
        RowAdapter(several[2], 0),
    ):  # the last one is active, not on q of layer 6
        with loaded.current.of(adapted_step([row], 2)):
            assert wrapper._adapt(x, y) is y
    with loaded.current.of(adapted_step([RowAdapter(several[0])], 2)):
        assert wrapper._adapt(x, y) is not y


def test_a_failed_step_leaves_no_adapter_behind(loaded: LoadedModel, several: list[AdapterWeights]) -> None:
    wrapper = wrapper_of(loaded)
    x = mx.zeros((1, 2, 128))
    y = wrapper.original(x)
    with (
        pytest.raises(BrokenInvariant, match="not with the step's tokens"),
        loaded.current.of(adapted_step([RowAdapter(several[0])], 3)),
    ):
        wrapper(x)
    assert wrapper._adapt(x, y) is y


def test_rows_and_adapters_must_be_as_many(loaded: LoadedModel, several: list[AdapterWeights]) -> None:
    driver = Driver(loaded)
    with pytest.raises(ValueError, match="zip"):
        driver.step([driver.row(), driver.row()], random_ids(loaded, (2, 1)), adapters=[RowAdapter(several[0])])
