"""From which token on an adapter acts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.adapters.activation import find_last, refuse_without_adapter, use_adapter
from agentcache.adapters.table import ServedAdapter
from agentcache.api.policy import Policy
from agentcache.api.request import Request, TokenPrompt
from agentcache.api.sampling import SamplingParams
from agentcache.blocks.keys import KVOrigin
from agentcache.errors import InvalidRequest
from agentcache.models.adapters import Adapter

A, B = 11, 12
SOURCE = Adapter("digest", Path("/poet"), "peft", {}, 0, 0, 1, (A, B), 0)
POET = ServedAdapter("poet", SOURCE, Policy.ACTIVATED, frozenset([1, 2]))
REQUEST = Request("r", TokenPrompt([1]))


def start_of(ids: list[int], source: Adapter = SOURCE, policy: Policy = Policy.AUTO, **options: object) -> int | None:
    served = replace(POET, source=source)
    return use_adapter(served, policy, replace(REQUEST, **options), ids).start


@pytest.mark.parametrize(
    ("text", "wanted", "expected"),
    [
        ("ABB", "AB", 0),
        ("AAA", "AA", 1),
        ("ABAAB", "AB", 3),
        ("ABAB", "AB", 2),
        ("xAB", "AB", 1),
        ("ABx", "AB", 0),
        ("ABABA", "ABA", 2),
        ("AxB", "AB", None),
        ("A", "AB", None),
        ("", "A", None),
        ("AB", "AB", 0),
    ],
)
def test_the_last_occurrence(text: str, wanted: str, expected: int | None) -> None:
    assert find_last([*map(ord, text)], [*map(ord, wanted)]) == expected


# Few and repetitive ids, whose bytes also look like each other across the borders of tokens.
IDS = st.sampled_from([0, 1, 256, 1 << 8, 1 << 16, 1 << 24, 0x01010101, 257])


@given(st.lists(IDS, max_size=30), st.lists(IDS, min_size=1, max_size=4))
def test_it_is_where_a_plain_search_finds_it(ids: list[int], wanted: list[int]) -> None:
    places = [i for i in range(len(ids) - len(wanted) + 1) if ids[i : i + len(wanted)] == wanted]
    assert find_last(ids, wanted) == (places[-1] if places else None)


@pytest.mark.parametrize(("shift", "expected"), [(0, 2), (1, 3), (2, 4), (-1, 1), (-5, 0)])
def test_shift(shift: int, expected: int) -> None:
    assert start_of([1, 2, A, B], replace(SOURCE, activation_shift=shift)) == expected


def test_an_explicit_start_overrides() -> None:
    assert start_of([A, B, 1, 2], invocation_start=3) == 3
    assert start_of([1, 2], invocation_start=0) == 0
    assert start_of([1, 2], replace(SOURCE, invocation_tokens=None), Policy.ACTIVATED, invocation_start=1) == 1
    for wrong in (2, -1):
        with pytest.raises(InvalidRequest) as caught:
            start_of([1, 2], invocation_start=wrong)
        assert caught.value.param == "agentcache.invocation_start"


def test_absent() -> None:
    for source in (SOURCE, replace(SOURCE, invocation_tokens=None)):
        with pytest.raises(InvalidRequest, match="'poet'") as caught:
            start_of([1, 2], source, Policy.ACTIVATED)
        assert (caught.value.status, caught.value.code) == (400, "invocation_not_found")
        assert start_of([1, 2], source, Policy.ACTIVATED, invocation_optional=True) is None
    use = use_adapter(POET, Policy.AUTO, replace(REQUEST, invocation_optional=True), [1, 2])
    assert (use.producer, use.activated_at, use.policy) == (None, None, Policy.ACTIVATED)


def test_policies() -> None:
    assert start_of([1, A, B], policy=Policy.EXACT) == 0
    assert start_of([1, A, B], policy=Policy.PREFILL_SHARE) == 2
    assert start_of([1], policy=Policy.PREFILL_SHARE) == 0
    cached_only = SamplingParams(max_tokens=0)
    assert start_of([1, A, B], policy=Policy.PREFILL_SHARE, sampling=cached_only) is None
    with pytest.raises(InvalidRequest, match="has no invocation"):
        start_of([1, A, B], policy=Policy.EXACT, invocation_start=1)


def test_producer_and_report() -> None:
    activated = use_adapter(POET, Policy.AUTO, REQUEST, [1, A, B])
    assert activated.producer == KVOrigin("digest", 1, frozenset([1, 2]))
    assert activated.activated_at == 1
    exact = use_adapter(POET, Policy.EXACT, REQUEST, [1, A, B])
    assert (exact.producer, exact.activated_at) == (KVOrigin("digest", 0, frozenset([1, 2])), None)


def test_base_has_no_invocation() -> None:
    refuse_without_adapter(replace(REQUEST, policy=Policy.EXACT))
    for wrong in ({"policy": Policy.ACTIVATED}, {"policy": Policy.PREFILL_SHARE}, {"invocation_start": 0}):
        with pytest.raises(InvalidRequest, match="needs an adapter"):
            refuse_without_adapter(replace(REQUEST, **wrong))
