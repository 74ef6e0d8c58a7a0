"""All parts of `benchmarks/quality` in one report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.table import Table

from agentcache.bench.reporter import Report, Reporter, say
from benchmarks.quality import format_bench, memory, precision, restore, sharing, texts
from benchmarks.quality.plan import Part, QualityPlan, ResultTable
from benchmarks.workload import Progress

PARTS: dict[str, Part] = {
    "precision": precision.PART,
    "restore": restore.PART,
    "memory": memory.PART,
    "sharing": sharing.PART,
    "texts": texts.PART,
    "formats": format_bench.PART,
}
OF_REAL_TEXTS = ("texts", "formats")  # which the embedded model cannot read
OF_THE_EMBEDDED_MODEL = tuple(name for name in PARTS if name not in OF_REAL_TEXTS)
QUICK = QualityPlan(OF_THE_EMBEDDED_MODEL, scale=1 / 16)
CAVEATS = (
    "A small model shows that a cache returns what was put in, and what breaks it; how much a large model's answers "
    "suffer, only a run on that model tells (--model).",
)


def measure_quality(plan: QualityPlan, progress: Progress) -> list[ResultTable]:
    return [table for name in plan.parts for table in PARTS[name].measure(plan, progress)]


def build_report(plan: QualityPlan, tables: Sequence[ResultTable]) -> Report:
    caveats = [*CAVEATS, *(caveat for name in plan.parts for caveat in PARTS[name].caveats)]
    model = {"name": plan.model or "embedded"}
    return _reporter(plan, len(tables)).report(plan, caveats, model=model, tables=[asdict(table) for table in tables])


def tables_of(report: Report) -> dict[str, ResultTable]:
    return {data["name"]: ResultTable.of(data) for data in report["tables"]}


def hand_out(plan: QualityPlan, report: Report, out: Path, *, as_json: bool) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "quality.md").write_text(as_markdown(report), encoding="utf-8")
    say(f"wrote {out / 'quality.md'}")
    _reporter(plan, len(report["tables"])).hand_out(report, out, as_json=as_json)


def as_markdown(report: Report) -> str:
    head = [f"- {caveat}" for caveat in report["caveats"]]
    machine = f"Machine: `{json.dumps(report['machine'], ensure_ascii=False)}`"
    tables = [table.as_markdown() for table in tables_of(report).values()]
    return "\n".join(["# Quality", "", *head, "", machine, "", *tables])


def _reporter(plan: QualityPlan, num_tables: int) -> Reporter:
    plots = {key: plot for name in plan.parts for key, plot in PARTS[name].plots.items()}
    return Reporter("quality", "quality", tuple(partial(_rich, index) for index in range(num_tables)), plots)


def _rich(index: int, report: Report) -> Table:
    return ResultTable.of(report["tables"][index]).as_rich()
