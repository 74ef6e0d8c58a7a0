"""Several agents at once on one server: the same as `agentcache bench batched`, from a clone.

    python benchmarks/batched_benchmark.py                      about five minutes on two CPU cores
    python benchmarks/batched_benchmark.py --quick              under a minute
    python benchmarks/batched_benchmark.py --model FOLDER       any model folder

It starts server processes of its own, with cache folders of their own, and needs no network beyond loopback. Results go
to agentcache-bench/: batched.json (caveats, machine, versions, commit, every number) and three plots.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> None:
    import typer

    from agentcache.cli.bench import batched
    from agentcache.errors import AgentCacheError

    try:
        typer.run(batched)
    except AgentCacheError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
