"""Kernel or reference, for each kind of attention layer of a model, and why, for the doctor.

From the model's config.json alone, in a process of its own: weights are not read, and a broken back end ends nothing
else.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from agentcache.kv.spec import quantisation_for
from agentcache.metal_kernels.tiling import HeadShape
from agentcache.models.fused import usable

_SECONDS = 240
_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


@dataclass(frozen=True)
class LayerKind:
    """How one kind of attention layer is computed.

    Args:
        kind: "attention", or "latent" (MLA).
        by: "kernel" or "reference".
        why: the reason for the reference.
    """

    kind: str
    by: str
    why: str = ""


def layer_kinds(config: dict[str, Any], kv_bits: int = 4) -> list[LayerKind]:
    """Of a model's config.json, whose keys and values are kept in so many bits.

    Raises:
        LookupError, TypeError, ValueError: an entry is missing or makes no sense.
        UnsupportedModel: heads that have no quantisation groups.
    """
    sizes = config | (config.get("text_config") or {})
    if sizes.get("kv_lora_rank"):
        return [LayerKind("latent", "reference", "no kernel for latents yet")]
    verdict = usable(head_shape(sizes, kv_bits))
    return [LayerKind("attention", "kernel" if verdict.right else "reference", verdict.reason)]


def head_shape(sizes: dict[str, Any], kv_bits: int = 4) -> HeadShape:
    """The heads of a model with grouped-query attention."""
    heads = int(sizes["num_attention_heads"])
    kv_heads = int(sizes.get("num_key_value_heads") or heads)
    dim = int(sizes.get("head_dim") or int(sizes["hidden_size"]) // heads)
    dtype = _DTYPES[str(sizes.get("dtype") or sizes.get("torch_dtype") or "bfloat16")]
    return HeadShape(dim, kv_heads, heads // kv_heads, quantisation_for(dim).group_size, dtype, kv_bits)


def in_child(folder: Path, kv_bits: int) -> list[LayerKind]:
    """`layer_kinds` of a model folder, found out by a process of its own; empty if it could not."""
    command = [sys.executable, "-m", "agentcache.models.kernel_report", str(folder), str(kv_bits)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
        return [LayerKind(**kind) for kind in json.loads(done.stdout)]
    except (OSError, subprocess.SubprocessError, ValueError, TypeError):
        return []


def main() -> None:
    config = json.loads((Path(sys.argv[1]) / "config.json").read_text())
    print(json.dumps([asdict(kind) for kind in layer_kinds(config, int(sys.argv[2]))]))


if __name__ == "__main__":
    main()
