"""Which layers kernels compute, in a child process: a broken back end may crash."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.nn as nn

from agentcache.api.model import GroupKind
from agentcache.kv.group_info import describe_group
from agentcache.kv.packing import BITS, Precision
from agentcache.kv.spec import LayerSpec
from agentcache.metal_kernels.self_test import Verdict
from agentcache.metal_kernels.tiling import ResidualKind
from agentcache.models.adapters import TargetModules, target_modules
from agentcache.models.fused import layer_verdict
from agentcache.models.inspection import Inspection, inspect_model
from agentcache.models.loader import read_model
from agentcache.models.residual.forms import likely_key_form
from agentcache.models.residual.fused import turning_of

_SECONDS = 600  # three self-tests a head shape
_RANK = 16
_OWN_CODE = Verdict(False, "a state is computed by mlx-lm's own operations")


@dataclass(frozen=True)
class LayerKind:
    """Layers of one kind, `by` "kernel" or "reference"; `heads` as `8/2 x 64`: query, cached, key size."""

    kind: GroupKind
    window: int | None
    heads: str
    layers: int
    by: str
    why: str = ""
    residuals: str = ""

    @property
    def phrase(self) -> str:
        name = self.kind.value if self.window is None else f"{self.kind.value} of {self.window:,}"
        said = f"{name}: {self.by}{f' ({self.why})' if self.why else ''}"
        return f"{said}, with residuals on {self.residuals}" if self.residuals and not self.why else said


def layer_kinds(folder: Path, kv: str = "4") -> list[LayerKind]:
    """Layer kinds of a model folder; `kv` as in `BITS`. Raises UnsupportedModel."""
    read = read_model(str(folder))
    seen = inspect_model(read.model)
    seen = seen.kept_in(Precision((BITS[kv],) * len(seen.layers)))
    counted = Counter(_layers(read.model, seen, read.config))
    return [
        LayerKind(kind, window, heads, layers, _by(verdict), verdict.reason, residuals)
        for (kind, window, heads, verdict, residuals), layers in counted.items()
    ]


def _by(verdict: Verdict) -> str:
    return "kernel" if verdict.right else "reference"


def _layers(
    model: nn.Module, seen: Inspection, config: dict[str, Any]
) -> Iterator[tuple[GroupKind, int | None, str, Verdict, str]]:
    spec = seen.spec(config["model_type"], config)
    kinds = {layer: describe_group(group).kind for group in spec.lasting_groups for layer in group.layers}
    modules = target_modules(model.layers, seen)
    for layer, latent, dtype, packing in zip(seen.layers, seen.latents, seen.dtypes, seen.packings, strict=True):
        heads = f"{seen.num_heads}/{layer.num_kv_heads} x {layer.key_dim}"
        latent_rank = None if latent is None else latent.rank
        verdict = layer_verdict(layer, seen.num_heads, packing, dtype, latent_rank=latent_rank)
        residuals = ""
        if latent is None:
            on_values, on_both = verdict, verdict
            if verdict.right:
                heads_of = partial(layer_verdict, layer, seen.num_heads, packing, dtype)
                on_values = heads_of(residuals=ResidualKind(_RANK))
                on_both = _with_keys(model.layers[layer.index], layer, modules, heads_of)
            residuals = f"values (of rank {_RANK}): {_said(on_values)}; on keys, too: {_said(on_both)}"
        yield kinds[layer], layer.window, heads, verdict, residuals
    for _ in seen.recurrent:
        yield GroupKind.STATE, None, "", _OWN_CODE, ""


def _said(verdict: Verdict) -> str:
    return _by(verdict) + (f" ({verdict.reason})" if verdict.reason else "")


def _with_keys(
    module: nn.Module, layer: LayerSpec, modules: TargetModules, verdict_of: Callable[..., Verdict]
) -> Verdict:
    form = likely_key_form(module, layer, modules)
    if isinstance(form, str):
        return Verdict(False, form)
    turning = turning_of(form, layer.key_dim)
    if turning.why_not:
        return Verdict(False, turning.why_not)
    kind = ResidualKind(_RANK, _RANK, turning.pairs, turning.interleaved, form.norm is not None)
    return verdict_of(residuals=kind)


def in_child(folder: Path, kv: str) -> list[LayerKind]:
    """`layer_kinds` in a child process; empty if that fails."""
    command = [sys.executable, "-m", "agentcache.models.kernel_report", str(folder), kv]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
        return [LayerKind(**each | {"kind": GroupKind(each["kind"])}) for each in json.loads(done.stdout)]
    except (OSError, subprocess.SubprocessError, ValueError, TypeError, LookupError):
        return []


def main() -> None:
    print(json.dumps([asdict(kind) for kind in layer_kinds(Path(sys.argv[1]), sys.argv[2])]))


if __name__ == "__main__":
    main()
