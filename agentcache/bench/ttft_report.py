"""Tables, JSON and plot of the TTFT benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from agentcache.bench.plots import plot_ttft_by_size
from agentcache.bench.reporter import Report, Reporter, kilobytes, number_table
from agentcache.bench.ttft import COLD, Files, Plan, Sample, SizeResult

KINDS = ("cold", "warm", "warm, evicted", "hot")
EXPECTED_STATE = {"cold": "cold", "warm": "warm", "warm, evicted": "warm", "hot": "hot"}
SHAPE_KEYS = ("model_type", "num_layers", "num_attention_heads", "num_kv_heads", "head_dim", "quantization")
EMBEDDED_CAVEAT = (
    "The embedded model is tiny: it shows that the cache works, not what it saves. Cold time grows with the model's "
    "parameters, warm time only with the bytes of its cache, so a real model gains more."
)


def build_report(plan: Plan, results: Sequence[SizeResult]) -> Report:
    measured = next((result for result in results if result.files), None)
    files = None if measured is None else measured.files
    shape = {key: files.metadata[key] for key in SHAPE_KEYS if key in files.metadata} if files else {}
    kv_format = None if measured is None else measured.kv_format
    return TTFT.report(
        plan,
        _caveats(plan, results),
        model={"name": plan.model or "embedded", "shape": shape, "kv_format": kv_format},
        sizes=[summarise(result) for result in results],
        samples=[asdict(sample) for result in results for sample in result.samples],
    )


def _caveats(plan: Plan, results: Sequence[SizeResult]) -> list[str]:
    caveats = [
        "Block files were written moments before: warm reads come from the operating system's page cache, not from a "
        "disk at rest.",
        f"Medians of {plan.repeats} samples (cold: {min(COLD, plan.repeats)}), with minimum and maximum; one request "
        "at a time on an idle server.",
        "The first request of each process is not measured; a cold start also loads the model, which is not counted.",
        "Times are the client's, over loopback HTTP; compare ratios within one run rather than times across machines.",
    ]
    if plan.model is None:
        caveats.insert(0, EMBEDDED_CAVEAT)
    return [*_unexpected(results), *caveats]


def _unexpected(results: Sequence[SizeResult]) -> list[str]:
    odd = [
        f"{sample.kind} at {sample.context_tokens} was reported {sample.cache_state}"
        for result in results
        for sample in result.samples
        if sample.cache_state != EXPECTED_STATE[sample.kind]
    ]
    return [f"NOT AS MEANT: {'; '.join(odd)}."] if odd else []


def summarise(result: SizeResult) -> dict[str, Any]:
    by_kind = {kind: [sample for sample in result.samples if sample.kind == kind] for kind in KINDS}
    summary: dict[str, Any] = {"context_tokens": result.context_tokens, "skipped": result.skipped}
    for kind, samples in by_kind.items():
        if samples:
            summary[kind] = _summarise_kind(samples)
    if result.files and by_kind["warm"]:
        summary["cache"] = _summarise_cache(result.files, by_kind["warm"], by_kind["hot"])
    return summary


def _summarise_kind(samples: Sequence[Sample]) -> dict[str, Any]:
    return {
        "ttft_ms": _spread([sample.ttft_ms for sample in samples]),
        "server_ttft_ms": _spread([sample.server_ttft_ms for sample in samples]),
        "restore_ms": _spread([sample.restore_ms for sample in samples]),
        "decode_tokens_per_s": _spread([sample.decode_tokens_per_s for sample in samples]),
        "computed_tokens": [sample.computed_tokens for sample in samples],
        "prompt_tokens": [sample.prompt_tokens for sample in samples],
        "restored_bytes": [sample.restored_bytes for sample in samples],
        "cache_states": [sample.cache_state for sample in samples],
    }


def _summarise_cache(files: Files, warm: Sequence[Sample], hot: Sequence[Sample]) -> dict[str, Any]:
    bytes_per_token = files.data_bytes / hot[0].context_tokens
    turn_tokens = statistics.median(s.prompt_tokens - s.context_tokens + s.completion_tokens for s in hot)
    written = [sample.written_bytes for sample in hot if sample.written_bytes is not None]
    rates = [s.restored_bytes / s.restore_ms * 1000 for s in warm if s.restore_ms > 0]
    return {
        "files": files.count,
        "file_bytes": files.total_bytes,
        "kv_bytes": files.data_bytes,
        "kv_bytes_per_token": bytes_per_token,
        "raw_read_bytes_per_s": files.read_bytes_per_s,
        "restore_bytes_per_s": statistics.median(rates) if rates else None,
        "turn_tokens": turn_tokens,
        "turn_kv_bytes": bytes_per_token * turn_tokens,
        "turn_written_bytes": statistics.median(written) if written else None,
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ttft_table(report: Report) -> Table:
    title = f"Time to first token (ms), {report['model']['name']} on {report['machine']['cpu']}"
    headings = ("context", *KINDS, "cold / warm", "cold / hot", "computed c/w/h")
    table = number_table(title, headings, no_wrap=True)
    for size in report["sizes"]:
        table.add_row(str(size["context_tokens"]), *_ttft_cells(size))
    return table


def cache_table(report: Report) -> Table:
    headings = ("KV data", "restored", "restore rate", "raw read", "turn's KV data", "turn wrote", "decode")
    kv_format = report["model"]["kv_format"]
    title = "The cache behind it" + (f": keys and values in {kv_format}" if kv_format else "")
    table = number_table(title, ("context", *headings), no_wrap=True)
    for size in report["sizes"]:
        if not size["skipped"]:
            table.add_row(str(size["context_tokens"]), *_cache_cells(size))
    return table


def _ttft_cells(size: dict[str, Any]) -> list[str]:
    if size["skipped"]:
        return [f"skipped: {size['skipped']}"]
    median = {kind: size[kind]["ttft_ms"]["median"] for kind in KINDS}
    computed = "/".join(str(max(size[kind]["computed_tokens"])) for kind in ("cold", "warm", "hot"))
    return [
        *(_ms(size[kind]["ttft_ms"]) for kind in KINDS),
        f"{median['cold'] / median['warm']:.1f}x",
        f"{median['cold'] / median['hot']:.1f}x",
        computed,
    ]


def _cache_cells(size: dict[str, Any]) -> list[str]:
    cache = size["cache"]
    return [
        kilobytes(cache["kv_bytes"]),
        kilobytes(max(size["warm"]["restored_bytes"])),
        _rate(cache["restore_bytes_per_s"]),
        _rate(cache["raw_read_bytes_per_s"]),
        kilobytes(cache["turn_kv_bytes"]),
        kilobytes(cache["turn_written_bytes"]),
        f"{size['hot']['decode_tokens_per_s']['median']:.1f} tokens/s",
    ]


def _ms(spread: dict[str, float]) -> str:
    digits = 0 if spread["median"] >= 10 else 1
    return f"{spread['median']:.{digits}f} ({spread['min']:.{digits}f}-{spread['max']:.{digits}f})"


def _rate(bytes_per_s: float | None) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s else "-"


def plot_ttft(report: Report, path: Path) -> None:
    series: dict[str, dict[int, list[float]]] = {kind: {} for kind in KINDS}
    for sample in report["samples"]:
        series[sample["kind"]].setdefault(sample["context_tokens"], []).append(sample["ttft_ms"])
    model, machine = report["model"]["name"], report["machine"]
    title = f"Time to first token, {model} model, {machine['cores']} cores, {machine['device']}"
    plot_ttft_by_size(series, title, path)


TTFT = Reporter("ttft", "time to first token", (ttft_table, cache_table), {"": plot_ttft})
