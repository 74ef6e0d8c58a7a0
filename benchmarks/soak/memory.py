"""Compare the blocks that a soak left on disk with the same tokens computed again.

Bytes may differ, because chunking affects rounding. Vectors differ by up to 0.17 of their length on the embedded
model; those of another token or position by more than half.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from agentcache.client import Client
from agentcache.kv.packed import Packed, dequantise
from agentcache.kv.packing import PARTS, Quantisation
from agentcache.store.manifest import Manifest, SavedCache, decode_manifest
from agentcache.store.transcript_log import parse_log

ALIKE = 0.5  # allowed difference, relative to a vector's length
_VALUES_A_WORD = 8  # 4-bit values per 32-bit word


def recompute(cache_dir: Path, quiet: Client) -> int:
    """Have a quiet server compute and save the tokens of all lineages; return their number.

    Residual KV is included if the server has the adapters and shares by default.
    """
    count, adapters = 0, {each["digest"]: each["name"] for each in quiet.request("GET", "/v1/adapters")["data"]}
    for path in sorted((cache_dir / "agents").glob("*/*.json")):
        manifest = decode_manifest(path.read_bytes())
        if manifest.base.num_saved:
            # One agent per lineage, so that the server drops none.
            agent = path.stem.replace("~", ".")
            quiet.cache_prompt(_saved_tokens(path, manifest, manifest.base), agent=agent)
            count += 1
            for number, residual in enumerate(manifest.caches[1:]):
                own = {"agent": f"{agent}.{number}", "adapter": adapters[residual.name.partition(".")[2]]}
                prompt = _saved_tokens(path, manifest, residual)
                quiet.request("POST", "/v1/completions", {"prompt": prompt, "max_tokens": 0, **own})
    return count


def _saved_tokens(path: Path, manifest: Manifest, cache: SavedCache) -> list[int]:
    log = path.with_name(f"{manifest.name}.{manifest.log.generation}.log").read_bytes()
    content = parse_log(log, manifest.name, manifest.model, manifest.log)
    return list(content.transcript.ids[: cache.num_saved])


def differences(cache_dir: Path, quiet_dir: Path) -> dict[str, float]:
    """Return by key the largest Euclidean distance of a block's vector from that in `quiet_dir`, relative to its
    length.

    It is infinity if the block is missing.
    """
    paths = sorted((cache_dir / "blocks").glob("??/*.safetensors"))
    return {path.stem: _difference(path, quiet_dir / path.relative_to(cache_dir)) for path in paths}


def _difference(path: Path, other: Path) -> float:
    if not other.is_file():
        return float("inf")
    vectors, others = load_file(path), load_file(other)
    residual = sorted(name for name in vectors if name.startswith("residual."))
    if residual:  # short vectors: relative to the usual length of their neighbours
        return max(_apart(vectors[name].astype(np.float32), others[name].astype(np.float32)) for name in residual)
    pairs = zip(_vectors(vectors), _vectors(others), strict=True)
    return max(float(np.max(_norms(one - two) / np.maximum(_norms(two), 1e-6))) for one, two in pairs)


def _vectors(tensors: Mapping[str, NDArray[np.generic]]) -> Iterator[NDArray[np.float32]]:
    """Yield [H_kv, k, D] of each layer and side, in order of name."""
    for name in sorted(name for name in tensors if name.endswith(".data")):
        data, scales, biases = (mx.array(tensors[name.removesuffix("data") + part]) for part in PARTS)
        group_size = data.shape[-1] * _VALUES_A_WORD // scales.shape[-1]
        yield np.array(dequantise(Packed(data, scales, biases), Quantisation(group_size=group_size), mx.float32))


def _apart(one: NDArray[np.float32], two: NDArray[np.float32]) -> float:
    return float(np.max(_norms(one - two)) / max(float(np.sqrt(np.mean(_norms(two) ** 2))), 1e-6))


def _norms(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.asarray(np.linalg.norm(vectors, axis=-1))
