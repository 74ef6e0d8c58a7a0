"""Groups of full and of open blocks: random use, beside a model of what slots and files hold."""

from __future__ import annotations

from hypothesis import settings

from tests.blocks.cache_machine import CacheMachine
from tests.blocks.cache_model import FakeGroup, pair
from tests.examples import examples


class PairMachine(CacheMachine):
    groups = pair("full")
    spare_bytes = 8


class BesideOthersMachine(CacheMachine):
    """Some layers keep all blocks in one group."""

    groups = (FakeGroup("full.0", None, 1), *pair("full.1", None, 2, 3))
    spare_bytes = 14


class WindowPairsMachine(CacheMachine):
    """Two pairs, one with a window; an adapter may change the upper one only."""

    groups = (*pair("full.0", None, 1, 2), *pair("window300.0", 300, 2, 1))
    spare_bytes = 16


class WindowBelowMachine(CacheMachine):
    groups = (*pair("window300.0", 300), FakeGroup("full.0", None, 1))
    spare_bytes = 10


class ScarceMachine(CacheMachine):
    groups = (*pair("window128.0", 128), *pair("full.0"))
    spare_bytes = 2


class HybridPairMachine(CacheMachine):
    groups = (FakeGroup("full.0", None, 1), *pair("full.1"))
    spare_bytes = 12
    state = FakeGroup("state", None, 10)
    state_budget = 150


TestPair = PairMachine.TestCase
TestBesideOthers = BesideOthersMachine.TestCase
TestWindowPairs = WindowPairsMachine.TestCase
TestWindowBelow = WindowBelowMachine.TestCase
TestScarce = ScarceMachine.TestCase
TestHybridPair = HybridPairMachine.TestCase
SETTINGS = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
for each in (TestPair, TestBesideOthers, TestWindowPairs, TestWindowBelow, TestScarce, TestHybridPair):
    each.settings = SETTINGS
