"""Time to first token over streaming HTTP, cold, warm and hot: the same as `agentcache bench ttft`, from a clone.

    python benchmarks/streaming_benchmark.py                    1K to 16K tokens on the embedded model
    python benchmarks/streaming_benchmark.py --quick            half a minute
    python benchmarks/streaming_benchmark.py --model mlx-community/Qwen3-4B-4bit --sizes 4K,16K,32K --repeats 5

It starts server processes of its own, with cache folders of their own, and needs no network beyond loopback. Results go
to agentcache-bench/: ttft.json (caveats, machine, versions, commit, every sample) and ttft.png.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> None:
    import typer

    from agentcache.cli.bench import ttft
    from agentcache.errors import AgentCacheError

    try:
        typer.run(ttft)
    except AgentCacheError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
