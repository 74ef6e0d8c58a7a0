"""Adapters on a cached context, against mlx_lm.server: the same as `agentcache bench adapters`, from a clone.

    python benchmarks/adapters_benchmark.py                  some minutes on two CPU cores
    python benchmarks/adapters_benchmark.py --quick          about a minute
    python benchmarks/adapters_benchmark.py --model FOLDER   any model folder

The servers are real processes over the same model folder: agentcache, agentcache with a trunk (plain LoRA goes on from
base's hidden states), and the mlx_lm.server that is installed, with its defaults. The adapters are random, made for the
model on the spot. Results go to agentcache-bench/: adapters.json (caveats, where the other server wins, machine,
versions, commit, every sample), adapters_switches.png and adapters_pipelines.png.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> None:
    import typer

    from agentcache.cli.bench import adapters
    from agentcache.errors import AgentCacheError

    try:
        typer.run(adapters)
    except AgentCacheError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
