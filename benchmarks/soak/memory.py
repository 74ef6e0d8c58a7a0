"""Whether the memory that a soak left on disk is right: each block against the same tokens computed again.

The bytes need not be equal: where a prompt is cut otherwise, some values are rounded to the other side, and the layers
above see that. But what comes of it is nearly the same vector. On the embedded model a key or value differed by up to
0.17 of its length from that of a quiet server, as much as when a quiet server cut the prompts otherwise; what belongs
to another token, or to another place, differs by more than half of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from agentcache.client import Client
from agentcache.kv.arena import Packed, dequantise
from agentcache.kv.spec import Quantisation
from agentcache.store.manifest import Manifest, decode_manifest
from agentcache.store.transcript_log import parse_log

ALIKE = 0.5  # of a vector's length; see above
_VALUES_A_WORD = 8  # of 4 bits in 32


def recompute(cache_dir: Path, quiet: Client) -> int:
    """Have a quiet server compute and save the tokens of every lineage in a cache folder; returns how many."""
    count = 0
    for path in sorted((cache_dir / "agents").glob("*/*.json")):
        manifest = decode_manifest(path.read_bytes())
        if manifest.base.num_saved:
            # An agent each: none of them may be given up there.
            quiet.cache_prompt(_saved_tokens(path, manifest), agent=path.stem.replace("~", "."))
            count += 1
    return count


def _saved_tokens(path: Path, manifest: Manifest) -> list[int]:
    log = path.with_name(f"{manifest.name}.{manifest.log.generation}.log").read_bytes()
    content = parse_log(log, manifest.name, manifest.model, manifest.log)
    return list(content.transcript.ids[: manifest.base.num_saved])


def differences(cache_dir: Path, quiet_dir: Path) -> dict[str, float]:
    """How much each block of `cache_dir` differs from the one of the same key in `quiet_dir`, by key.

    Of all keys and values in it that one that differs most counts, as a part of its length (Euclidean norms); infinity
    where `quiet_dir` lacks the block.
    """
    paths = sorted((cache_dir / "blocks").glob("??/*.safetensors"))
    return {path.stem: _difference(path, quiet_dir / path.relative_to(cache_dir)) for path in paths}


def _difference(path: Path, other: Path) -> float:
    if not other.is_file():
        return float("inf")
    vectors, others = load_file(path), load_file(other)
    pairs = zip(_vectors(vectors), _vectors(others), strict=True)
    return max(float(np.max(_norms(one - two) / np.maximum(_norms(two), 1e-6))) for one, two in pairs)


def _vectors(tensors: Mapping[str, NDArray[np.generic]]) -> Iterator[NDArray[np.float32]]:
    """What the tensors of a block hold, [H_kv, k, D] for each layer and side, by name."""
    for name in sorted(name for name in tensors if name.endswith(".data")):
        parts = (mx.array(tensors[name.removesuffix("data") + part]) for part in ("data", "scales", "biases"))
        packed = Packed(*parts)
        group_size = packed.data.shape[-1] * _VALUES_A_WORD // packed.scales.shape[-1]
        yield np.array(dequantise(packed, Quantisation(group_size=group_size), mx.float32))


def _norms(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.asarray(np.linalg.norm(vectors, axis=-1))
