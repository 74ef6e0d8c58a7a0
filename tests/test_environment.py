"""What the package tells MLX before MLX is imported; whoever has said something else is heard."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

NAMES = ("MLX_ENABLE_TF32", "MLX_ENABLE_CACHE_THRASHING_CHECK")


@pytest.mark.parametrize("name", NAMES)
def test_mlx_is_told_what_nobody_else_has_said(name: str) -> None:
    says = [sys.executable, "-c", f"import agentcache, os, sys; print(os.environ[{name!r}], 'mlx.core' in sys.modules)"]
    silent = {key: value for key, value in os.environ.items() if key not in NAMES}
    for environment, expected in ((silent, "0 False"), ({**silent, name: "1"}, "1 False")):
        done = subprocess.run(says, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected
