"""How many random examples a test tries: `make test` takes fewer of all than `make test-all`, see tests/conftest.py."""

from __future__ import annotations

from hypothesis import settings

THOROUGH = 100  # of hypothesis itself, and of the profile "thorough"


def examples(count: int) -> int:
    """`count` in the profile "thorough", in others the profile's share of it."""
    return max(1, count * settings.default.max_examples // THOROUGH)
