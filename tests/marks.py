"""Parameters that only `make test-all` runs."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A parameter set for `pytest.mark.parametrize` that is marked slow: what the others leave out is little."""
    return pytest.param(*values, marks=pytest.mark.slow)
