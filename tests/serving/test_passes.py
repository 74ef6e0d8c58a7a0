"""The list of passes that computes a request, and what its current one says."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from agentcache.adapters.activation import AdapterUse
from agentcache.api.policy import Policy
from agentcache.blocks.block_tables import BlockTables, OriginPath
from agentcache.blocks.hidden_states import HiddenStateKey
from agentcache.blocks.origin_paths import lay_out
from agentcache.blocks.pool import Holds
from agentcache.blocks.search import CachedHiddenStates
from agentcache.engine.batch import BatchRow
from agentcache.engine.running_request import RunningRequest
from agentcache.plans.exact import exact_passes
from agentcache.plans.plan import Pass
from agentcache.plans.residual import ResidualKV, residual_passes
from tests.serving.simulation import make_generation, take_plan

LORA = AdapterUse("poet", "lora", Policy.EXACT, 0, frozenset([1]))
ACTIVATED = AdapterUse("poet", "lora", Policy.ACTIVATED, 700, frozenset([1]))
DECODER = AdapterUse("novelist", "decoder", Policy.PREFILL_SHARE, 999, frozenset([0, 1]), is_decoder=True)
RESIDUAL = AdapterUse("poet", "lora", Policy.RESIDUAL, 0, frozenset([1]))
UNUSED = AdapterUse("novelist", "decoder", Policy.PREFILL_SHARE, None, frozenset(), is_decoder=True)
AHEAD = CachedHiddenStates(1, (HiddenStateKey("b", 6), HiddenStateKey("c", 6)))


def sequence_of(num_tokens: int) -> BlockTables:
    return BlockTables("root", None, array("I", [1] * num_tokens), [], [])


@pytest.mark.parametrize(
    ("use", "ahead", "expected"),
    [
        (None, None, [(None, None, 0)]),
        (LORA, None, [(LORA, None, 0)]),
        (LORA, AHEAD, [(LORA, 768, 6), (LORA, None, 0)]),
        (ACTIVATED, None, [(ACTIVATED, None, 0)]),
        (DECODER, None, [(None, 999, 0), (DECODER, None, 0)]),
        (UNUSED, None, [(None, None, 0)]),
    ],
)
def test_the_passes_of_a_request(
    use: AdapterUse | None, ahead: CachedHiddenStates | None, expected: list[tuple[AdapterUse | None, int | None, int]]
) -> None:
    sequence = sequence_of(256)
    passes = exact_passes(use, sequence, ahead)
    assert [(each.computes, each.end, each.cut) for each in passes] == expected
    assert {each.writes for each in passes} == {sequence}
    assert [each.model for each in passes] == [
        "decoder" if computes is DECODER else None for computes, _, _ in expected
    ]


def compute(generation: RunningRequest, num_tokens: int) -> None:
    """As the engine does: launch, then settle."""
    generation.progress.in_flight += num_tokens
    generation.current.writes.token_ids.extend([1] * num_tokens)
    generation.progress.in_flight -= num_tokens
    generation.open_plan.drop_passes()


def test_one_pass_after_the_other() -> None:
    generation = make_generation(1000, wanted=2, adapter=DECODER)
    take_plan(generation, sequence_of(256))
    base, decoder = generation.open_plan.passes
    assert generation.current is base and generation.num_to_prefill == 999 - 256
    assert not BatchRow.of(generation, generation.num_to_launch, 743).is_complete
    generation.progress.in_flight = 743
    assert generation.current is base and generation.num_to_prefill == 0, "what is under way is not done"
    generation.progress.in_flight = 0
    compute(generation, 743)
    assert generation.current is decoder and generation.num_to_prefill == generation.num_to_launch == 1
    assert BatchRow.of(generation, generation.num_to_launch, 1).is_complete
    compute(generation, 1)
    assert generation.current is decoder, "which goes on for as long as it generates"


def test_passes_over_the_same_tokens_write_different_sequences() -> None:
    """Base over what base lacks, then an adapter from further in front: one more list."""
    generation = make_generation(1000, wanted=2)
    shared, own = sequence_of(600), sequence_of(100)
    take_plan(generation, shared)
    generation.open_plan.passes = [Pass(None, 1000, shared), Pass(LORA, None, own)]
    assert (generation.num_computed, generation.num_to_prefill) == (600, 400)
    assert not BatchRow.of(generation, generation.num_to_launch, 400).is_complete, (
        "no token is chosen from base's logits"
    )
    compute(generation, 400)
    assert generation.current.computes is LORA
    assert (generation.num_computed, generation.num_to_prefill, generation.can_prefill) == (100, 900, True)
    assert BatchRow.of(generation, generation.num_to_launch, 900).is_complete
    compute(generation, 900)
    assert (shared.num_tokens, own.num_tokens) == (1000, 1000)


def residual_kv_of(base: int, residuals: int, known: int, window: int | None = None) -> ResidualKV:
    cache: Any = SimpleNamespace(spec=SimpleNamespace(groups=[SimpleNamespace(window=window)]))
    none: Any = None
    return ResidualKV(cache, none, sequence_of(residuals), sequence_of(base), paired_from=known)


@pytest.mark.parametrize(("base", "residuals"), [(0, 0), (600, 100), (999, 0), (256, 256)])
def test_the_passes_of_a_residual_request(base: int, residuals: int) -> None:
    generation = make_generation(1000, wanted=3, adapter=RESIDUAL)
    residual_kv = residual_kv_of(base, residuals, 1000)
    take_plan(generation, residual_kv.base, residual_kv)
    assert generation.current.computes is None and generation.num_to_prefill == 1000 - base
    assert not BatchRow.of(generation, generation.num_to_launch, 1000 - base).is_complete, "base answers nobody"
    compute(generation, 1000 - base)
    assert generation.current.computes is RESIDUAL and generation.num_to_prefill == 1000 - residuals
    assert not residual_kv.is_paired(999) and residual_kv.is_paired(1000), "what is generated, both compute in one step"
    assert BatchRow.of(generation, generation.num_to_launch, 1000 - residuals).is_complete


def test_base_is_not_far_ahead_where_windows_are_read() -> None:
    residual_kv = residual_kv_of(300, 100, 5000, window=512)
    passes = residual_passes(RESIDUAL, residual_kv, at_once=2000)
    assert [(each.computes, each.end) for each in passes] == [
        (None, 2048),
        (RESIDUAL, 2048),
        (None, 4096),
        (RESIDUAL, 4096),
        (None, 5000),
        (RESIDUAL, None),
    ]
    without = residual_kv_of(300, 100, 5000)
    assert len(residual_passes(RESIDUAL, without)) == 2
    open_blocks = residual_kv_of(300, 100, 5000)
    open_blocks.base.paths = [OriginPath(lay_out(None, 2, holds=(Holds.FULL, Holds.OPEN))[0], [])]
    assert [each.end for each in residual_passes(RESIDUAL, open_blocks, at_once=2000)] == [each.end for each in passes]


def test_nobody_decodes_on_what_base_alone_computes() -> None:
    """After a preemption: tokens that have been generated are known, and base computes them first."""
    generation = make_generation(10, wanted=8, adapter=RESIDUAL)
    generation.token_ids += [5, 6]
    residual_kv = residual_kv_of(8, 8, 12)
    take_plan(generation, residual_kv.base, residual_kv)
    generation.progress.in_flight = 4
    assert generation.num_to_launch == 0 and not generation.can_decode, "no token is about to be chosen"
    generation.progress.in_flight = 0
    compute(generation, 4)
    generation.progress.in_flight = 4
    assert generation.can_decode


def test_a_pass_that_the_cache_has_done_is_not_at_work() -> None:
    generation = make_generation(1000, wanted=2, adapter=DECODER)
    take_plan(generation, sequence_of(999))
    assert generation.current.computes is DECODER


def test_without_a_place_nothing_is_computed() -> None:
    generation = make_generation(10)
    assert generation.num_computed == 0
    take_plan(generation, sequence_of(4))
    generation.progress.in_flight = 2
    generation.open_plan.tables = ()  # they are in no cache
    generation.open_plan.abandon()
    generation.progress.reset()
    assert generation.plan is not None and not generation.plan.passes
    assert (generation.num_computed, generation.progress.in_flight) == (0, 0)
