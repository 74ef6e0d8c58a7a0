"""Matching, sharing, copy-on-write, windows and eviction."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

from tests.blocks.cache_machine import CacheMachine, FakeGroup


class FullMachine(CacheMachine):
    groups = (FakeGroup("full.0", None, 1), FakeGroup("full.1", None, 2))
    spare_bytes = 12


class MixedMachine(CacheMachine):
    groups = (FakeGroup("full.0", None, 1), FakeGroup("window300.0", 300, 1))
    spare_bytes = 9


class WindowMachine(CacheMachine):
    groups = (FakeGroup("window512.0", 512, 1),)


class NarrowMachine(CacheMachine):
    """A window narrower than a block: only the last block or two of a sequence are in RAM."""

    groups = (FakeGroup("window128.0", 128, 1), FakeGroup("window128.1", 128, 3))


TestFull = FullMachine.TestCase
TestMixed = MixedMachine.TestCase
TestWindow = WindowMachine.TestCase
TestNarrow = NarrowMachine.TestCase
for case in (TestFull, TestMixed, TestWindow, TestNarrow):
    case.settings = settings(max_examples=40, deadline=None, phases=(Phase.explicit, Phase.generate), suppress_health_check=list(HealthCheck), stateful_step_count=30 if 0 else 50)
