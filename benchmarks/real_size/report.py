from __future__ import annotations

from typing import Any

from rich.table import Table

from agentcache.bench.reporter import Report, Reporter, number_table
from benchmarks.real_size.measure import RealSizePlan

CAVEATS = [
    "Weights are random; times do not depend on what a model has learnt. Compare ratios.",
    "mlx-lm keeps keys and values in the model's type, agentcache in 4 bits: 3.5 times fewer bytes.",
    "mlx_lm.server runs with its defaults; it keeps prompts in RAM, so that a restart has it compute them again.",
]


def build_report(plan: RealSizePlan, rows: list[dict[str, Any]]) -> Report:
    return REAL_SIZE.report(plan, CAVEATS, model=plan.model or "random weights", rows=rows)


def real_size_table(report: Report) -> Table:
    table = number_table("At real size", ("", "bare mlx-lm", "mlx_lm.server", "agentcache", "ratio"), named=True)
    for row in report["rows"]:
        mine, bare, server = (row.get(name) for name in ("agentcache_ms", "bare_ms", "server_ms"))
        theirs = bare or server
        ratio = "" if theirs is None else f"{mine / theirs:.2f}"
        table.add_row(row["what"], *("" if each is None else f"{each:.1f} ms" for each in (bare, server, mine)), ratio)
    return table


REAL_SIZE = Reporter("real_size", "agentcache beside mlx-lm and its server at real size", (real_size_table,))
