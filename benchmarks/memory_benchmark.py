"""What agents remember across phases, and what that costs: the same as `agentcache bench memory`, from a clone.

    python benchmarks/memory_benchmark.py                       prisoner's dilemma, embedded model, three seeds
    python benchmarks/memory_benchmark.py --script gossip --seeds 5
    python benchmarks/memory_benchmark.py --model mlx-community/Qwen3-4B-4bit

It starts server processes of its own, kills one at every phase border, and needs no network beyond loopback. Results go
to agentcache-bench/: memory.json (caveats, machine, versions, commit, every transcript) and memory.png.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> None:
    import typer

    from agentcache.cli.bench import memory
    from agentcache.errors import AgentCacheError

    try:
        typer.run(memory)
    except AgentCacheError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
