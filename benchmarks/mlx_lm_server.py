"""Starts `mlx_lm.server` with options of `agentcache serve`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

COMMAND = (sys.executable, str(Path(__file__).resolve()))


def main() -> None:
    """Replace this process, so that its id is the server's."""
    options = sys.argv[1:]
    where = options.index("--cache-dir")
    del options[where : where + 2]
    os.execv(sys.executable, [sys.executable, "-m", "mlx_lm", "server", *options])


if __name__ == "__main__":
    main()
