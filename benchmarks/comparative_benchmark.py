"""Conversations with a restart, against mlx_lm.server: the same as `agentcache bench compare`, from a clone.

    python benchmarks/comparative_benchmark.py                  about three minutes on two CPU cores
    python benchmarks/comparative_benchmark.py --quick          under a minute
    python benchmarks/comparative_benchmark.py --model FOLDER   any model folder

Both servers are real processes over the same model folder; mlx_lm.server is the one that is installed, with its
defaults. Results go to agentcache-bench/: compare.json (caveats, where the other server wins, machine, versions,
commit, every sample) and compare.png.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> None:
    import typer

    from agentcache.cli.bench import compare
    from agentcache.errors import AgentCacheError

    try:
        typer.run(compare)
    except AgentCacheError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
