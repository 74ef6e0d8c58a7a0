from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.errors import ConfigError
from agentcache.settings.memory_plan import GIB, NO_WIRED_LIMIT, DeviceMemory, MemoryPlan, Wishes, plan_memory

MB, GB = 10**6, 10**9
LEAST = 64 * MB


def mac(gigabytes: int) -> DeviceMemory:
    """As Metal reports them: two thirds of the memory up to 36 GB, three quarters above."""
    total = gigabytes * GIB
    return DeviceMemory(total, total * 2 // 3 if gigabytes <= 36 else total * 3 // 4)


def plan(device: DeviceMemory, weights: float, wishes: Wishes | None = None, temporaries: int = 400 * MB) -> MemoryPlan:
    return plan_memory(
        device, wishes or Wishes(), weights=int(weights * GB), temporaries=temporaries, least_cache=LEAST
    )


def taken(plan: MemoryPlan) -> int:
    return plan.weights + plan.ram_budget + plan.trunk_budget + plan.temporaries


# Weights in GB by what fits; a 40 GB model is for 64 GB only, and not every 64 GB machine has room for more.
FITS = {8: (0.5, 2.5, 4.5), 16: (0.5, 4.5, 8.5), 24: (0.5, 8.5, 14), 32: (0.5, 14, 20), 64: (0.5, 20, 40)}
TOO_LARGE = {8: (6, 8.5, 40), 16: (12, 20, 40), 24: (18, 40), 32: (23, 40), 64: (52,)}


@pytest.mark.parametrize(("gigabytes", "weights"), [(size, each) for size, fits in FITS.items() for each in fits])
def test_all_together_stays_under_what_the_device_can_give(gigabytes: int, weights: float) -> None:
    device = mac(gigabytes)
    found = plan(device, weights)
    assert device.recommended is not None
    assert LEAST <= found.ram_budget <= device.total // 4
    assert taken(found) <= found.limit <= min(device.recommended, device.total - GIB)
    # What is wired: what is there, no more, whatever the device would let one have.
    assert found.wired == taken(found)
    if weights == 0.5:
        assert found.wired < device.total // 2, "a small model does not hold most of the machine"


@pytest.mark.parametrize(
    ("gigabytes", "weights"), [(size, each) for size, large in TOO_LARGE.items() for each in large]
)
def test_a_model_that_does_not_fit_is_refused_by_sizes_and_a_way_out(gigabytes: int, weights: float) -> None:
    device = mac(gigabytes)
    size = f"{weights:.1f} GB"
    sizes = rf"\({size} of weights.* of the {device.total / GB:.1f} GB of memory it may have .*memory_limit"
    with pytest.raises(ConfigError, match=sizes) as error:
        plan(device, weights)
    can_be_had = weights * GB + LEAST + 400 * MB <= device.total - device.reserve
    assert ("iogpu.wired_limit_mb=" if can_be_had else "take a smaller model") in str(error.value)


def test_the_way_out_that_is_named_is_one() -> None:
    device = DeviceMemory(8 * GIB)  # Linux: nothing is recommended
    with pytest.raises(ConfigError, match=r"--memory-limit 8\.2GB") as error:
        plan(device, 7.7)
    assert "smaller" not in str(error.value)
    found = plan(device, 7.7, Wishes(memory_limit=8_200 * MB))
    assert found.ram_budget >= LEAST and taken(found) <= 8_200 * MB
    with pytest.raises(ConfigError, match="take a smaller model, or one in fewer bits"):
        plan(device, 9)


def test_a_cache_budget_beside_the_weights() -> None:
    device = mac(16)
    assert plan(device, 4.5, Wishes(ram_budget=5 * GB)).ram_budget == 5 * GB
    with pytest.raises(ConfigError, match=r"7\.0 GB is more than the 6\.6 GB that are left of memory_limit = 11"):
        plan(device, 4.5, Wishes(ram_budget=7 * GB))
    with pytest.raises(ConfigError, match=f"ram_budget must be at least {LEAST} bytes"):
        plan(device, 4.5, Wishes(ram_budget=LEAST - 1))


def test_hidden_states_get_an_eighth_of_the_cache_or_what_is_left() -> None:
    device = DeviceMemory(16 * GIB)
    much, little = plan(device, 2.0), plan(device, 2.0, Wishes(memory_limit=6 * GB, ram_budget=3500 * MB))
    assert much.trunk_budget == much.ram_budget // 8
    assert 0 < little.trunk_budget < little.ram_budget // 8
    assert taken(little) == little.limit


def test_hidden_states_are_counted() -> None:
    device = mac(8)
    without, with_trunk = plan(device, 4.0, Wishes(trunk_budget=0)), plan(device, 4.0, Wishes(trunk_budget=500 * MB))
    assert without.ram_budget - with_trunk.ram_budget == 500 * MB
    with pytest.raises(ConfigError, match=r"500\.0 MB of hidden states \(trunk_budget\)"):
        plan(device, 5.0, Wishes(trunk_budget=500 * MB))


@pytest.mark.parametrize("key", ["memory_limit", "wired_limit"])
def test_no_limit_above_what_macos_allows(key: str) -> None:
    device = mac(16)
    assert device.recommended is not None
    assert plan(device, 1, replace(Wishes(), **{key: device.recommended}))
    with pytest.raises(ConfigError, match=f"{key} = .* macOS lets the GPU have"):
        plan(device, 1, replace(Wishes(), **{key: device.recommended + 1}))


def test_a_raised_system_limit_leaves_the_reserve() -> None:
    """`iogpu.wired_limit_mb` lets Metal recommend nearly all of the memory."""
    device = DeviceMemory(16 * GIB, recommended=16 * GIB - 256 * MB)
    found = plan(device, 12)
    assert found.limit == device.total - device.reserve and device.reserve == 2 * GIB
    assert found.wired is not None and found.wired <= device.total - 2 * GIB


def test_wired_memory_is_metals_alone_and_can_be_off() -> None:
    assert plan(DeviceMemory(16 * GIB), 1).wired is None
    assert plan(DeviceMemory(16 * GIB), 1, Wishes(wired_limit=GB)).wired is None
    assert plan(mac(16), 1, Wishes(wired_limit=NO_WIRED_LIMIT)).wired == NO_WIRED_LIMIT
    assert plan(mac(16), 1, Wishes(wired_limit=GB)).wired == GB


def test_more_than_there_is() -> None:
    with pytest.raises(ConfigError, match=r"memory_limit = 20\.0 GB is more than the 17\.2 GB of memory"):
        plan(DeviceMemory(16 * GIB), 1, Wishes(memory_limit=20 * GB))


@given(
    st.integers(GIB // 4, 512 * GIB),
    st.floats(0.1, 1.0) | st.none(),
    st.integers(0, 100 * GB),
    st.integers(0, 2 * GB),
    st.integers(1, GB),
    st.builds(
        Wishes,
        memory_limit=st.integers(1, 600 * GIB) | st.none(),
        ram_budget=st.integers(1, 600 * GIB) | st.none(),
        trunk_budget=st.integers(0, 4 * GIB) | st.none(),
        wired_limit=st.integers(0, 600 * GIB) | st.none(),
    ),
)
def test_any_sizes(total: int, share: float | None, weights: int, temporaries: int, least: int, wishes: Wishes) -> None:
    device = DeviceMemory(total, None if share is None else int(total * share))
    try:
        found = plan_memory(device, wishes, weights=weights, temporaries=temporaries, least_cache=least)
    except ConfigError:
        return
    assert taken(found) <= found.limit <= total
    assert found.ram_budget >= least and wishes.ram_budget in (None, found.ram_budget)
    if device.recommended is None:
        assert found.wired is None
    else:
        assert found.wired is not None and found.wired <= device.recommended and found.limit <= device.recommended
