"""What the engine costs beside the bare mlx-lm model: the same as `agentcache bench overhead`, from a clone.

    python benchmarks/overhead_benchmark.py                     a random model of 84M parameters, 1K and 16K tokens
    python benchmarks/overhead_benchmark.py --model FOLDER      any model folder

One process, both sides in turns; compare the ratios. On a CPU the 16K prefill takes a few minutes a side.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> None:
    import typer

    from agentcache.cli.bench import overhead
    from agentcache.errors import AgentCacheError

    try:
        typer.run(overhead)
    except AgentCacheError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
