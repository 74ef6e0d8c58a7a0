"""Skips, visibly, what needs a package that cannot be had here."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.real.packages import Unavailable


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    try:
        return (yield)
    except Unavailable as missing:
        pytest.skip(str(missing))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    try:
        return (yield)
    except Unavailable as missing:
        pytest.skip(str(missing))
