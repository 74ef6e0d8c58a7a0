"""Marks of tests by what the emulator needs."""

from __future__ import annotations

import pytest

from tests.metal_kernels.emulator.build import clang

needs_clang = pytest.mark.skipif(clang() is None, reason="the kernels' emulator needs clang 18 or newer")
