"""The gate closes only while no call is inside, and keeps no call out for ever."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache.gateway.async_engine import Gate
from tests.examples import examples


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 4)), max_size=12), st.integers(0, 6), st.integers(0, 4))
def test_no_call_is_inside_while_it_is_closed(calls: list[tuple[int, int]], closes_at: int, lasts: int) -> None:
    """Each call comes at some turn of the loop, stays for some, and calls another through the gate."""

    async def scenario() -> None:
        gate, closed, done = Gate(), False, 0

        async def call(begin: int, stay: int) -> None:
            nonlocal done
            await pause(begin)
            async with gate.inside():
                for _ in range(stay):
                    assert not closed
                    await asyncio.sleep(0)
                async with gate.inside():
                    assert not closed and not gate.is_empty
            done += 1

        async def replace() -> None:
            nonlocal closed
            await pause(closes_at)
            async with gate.closed():
                assert gate.is_empty and not gate.is_open
                closed = True
                await pause(lasts)
                closed = False

        await asyncio.gather(replace(), *(call(*each) for each in calls))
        assert done == len(calls) and gate.is_open and gate.is_empty

    asyncio.run(asyncio.wait_for(scenario(), 60))


async def pause(turns: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)
