"""Which adapter acts on which token of a step, against the plain rule: on positions from the start on."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.models.adapter_files import LowRank, ModuleName
from agentcache.models.adapters import Adapter, AdapterRows, AdapterWeights, RowAdapter
from agentcache.models.lora import Stack, Stacks

NAME = ModuleName(0, "mlp.up_proj")


def weights(rank: int) -> AdapterWeights:
    adapter = Adapter("", Path(), "peft", {NAME: rank}, 0, 0, 0, None, 0)
    matrices = {NAME: LowRank(mx.full((4, rank), float(rank)), mx.full((rank, 6), float(-rank)))}
    return AdapterWeights(adapter, matrices)


ALL = [weights(rank) for rank in (3, 1, 2)]
ROWS = st.lists(
    st.tuples(st.none() | st.builds(RowAdapter, st.sampled_from(ALL), st.integers(0, 12)), st.integers(0, 8)),
    min_size=1,
    max_size=5,
)


@given(ROWS, st.integers(1, 5), st.sets(st.sampled_from(ALL)))
def test_masks_and_adapters(
    rows: list[tuple[RowAdapter | None, int]], num_tokens: int, acting: set[AdapterWeights]
) -> None:
    """`acting` are the adapters that have a module in question."""
    users, lengths = [user for user, _ in rows], [length for _, length in rows]
    step = AdapterRows(users, lengths, num_tokens)
    adapted = np.array(
        [[user is not None and length + i >= user.start for i in range(num_tokens)] for user, length in rows]
    )
    used = [
        user.weights if user is not None and tokens.any() else None for user, tokens in zip(users, adapted, strict=True)
    ]
    assert step.shape == (len(rows), num_tokens)
    assert len(step.adapters) == len(set(step.adapters)) and set(step.adapters) == {user for user in used if user}
    expected = adapted & np.array([user in acting for user in used])[:, None]
    mask = step.mask(tuple(user in acting for user in step.adapters))
    if mask is None:
        assert expected.all()
    else:
        np.testing.assert_array_equal(np.array(mask)[..., 0], expected)
    parts = step.parts(tuple(user in acting for user in step.adapters))
    behind = [row for part in parts.rows for row in part.tolist()]
    assert [[used[row] for row in part.tolist()] for part in parts.rows] == [
        [user] * used.count(user) for user in step.adapters if user in acting
    ]
    for row, place in enumerate(parts.indices.tolist()):
        assert place == 0 if used[row] not in acting else behind[place] == row
    slots = tuple(range(7, 7 + len(step.adapters)))
    index = step.index(slots).tolist()
    assert index == [0 if user is None else slots[step.adapters.index(user)] for user in used]


def test_what_is_made_for_a_step_is_made_once() -> None:
    step = AdapterRows([RowAdapter(ALL[0], 1)], [0], 2)
    assert step.mask((True,)) is step.mask((True,))
    assert step.index((3,)) is step.index((3,))
    assert step.parts((True,)) is step.parts((True,))


def test_stacks_are_padded_with_zeros() -> None:
    stack = Stack.of({user: user.matrices[NAME] for user in ALL})
    assert stack.a.shape == (3, 4, 8) and stack.b.shape == (3, 8, 6), "to a rank that CUDA reads in one go"
    for user, slot in stack.indices.items():
        pair, rank = user.matrices[NAME], user.matrices[NAME].rank
        assert mx.array_equal(stack.a[slot, :, :rank], pair.a) and mx.array_equal(stack.b[slot, :rank], pair.b)
        assert not stack.a[slot, :, rank:].any().item() and not stack.b[slot, rank:].any().item()


@given(st.lists(st.sets(st.sampled_from(ALL), min_size=2), max_size=8))
def test_one_set_at_a_time_is_stacked(sets: list[set[AdapterWeights]]) -> None:
    stacks = Stacks()
    for built, adapters in enumerate(sets, 1):
        stacks.cover(adapters)
        assert stacks.built == built
        for other in sets:
            assert stacks.covers(other) == (other <= adapters)
        stack = stacks.get(NAME)
        assert set(stack.indices) == adapters and stacks.get(NAME) is stack
        assert stacks.nbytes == stack.a.nbytes + stack.b.nbytes
    stacks.clear()
    assert stacks.nbytes == 0 and not stacks.covers(ALL)


@pytest.mark.parametrize("start", [-5, 0])
def test_a_start_before_everything_is_the_first_token(start: int) -> None:
    assert AdapterRows([RowAdapter(ALL[0], start)], [3], 2).mask((True,)) is None
