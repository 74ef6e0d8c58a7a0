"""Judges greedy answers, and blocks on disk, by computing them again on a quiet server.

How a prompt was cut and batched changes 4-bit rounding, maybe tokens: other cuts are tried.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file

from agentcache.client import Client
from agentcache.kv.packed import dequantise
from agentcache.kv.packed_arrays import Packed
from agentcache.kv.packing import PARTS, ByChannel, Packing, Quantisation
from agentcache.store.manifest import Manifest, SavedCache, decode_manifest
from agentcache.store.transcript_log import parse_log
from benchmarks.soak.watch import Sample

NEARLY = 0.1  # log probability below the likeliest token
MAX_WAYS = 64  # to cut a prompt
_MAX_CUTS = 6
_TOP = 20
Ask = Callable[[Mapping[str, Any]], Any]  # sends a body to /v1/completions
ALIKE = 0.5  # difference relative to a vector's length: rounding reaches 0.31, another token exceeds 0.5


@dataclass(frozen=True)
class Verdict:
    """Largest gap to the likeliest token: of the whole prompt, and of the best of `ways` cuts."""

    gap: float
    smallest_gap: float
    ways: int

    @property
    def right(self) -> bool:
        return self.smallest_gap <= NEARLY


class Judge:
    def __init__(self, ask: Ask, seed: int = 0, max_ways: int = MAX_WAYS) -> None:
        self._ask = ask
        self._rng = random.Random(seed)
        self._max_ways = max_ways
        self._num_salts = 0

    def judge(self, sample: Sample) -> Verdict:
        gap, texts = self._in_one_piece(sample)
        smallest, ways = gap, 1
        while smallest > NEARLY and ways < self._max_ways:
            smallest = min(smallest, self._in_pieces(sample, texts, limit=smallest))
            ways += 1
        return Verdict(gap, smallest, ways)

    def _in_one_piece(self, sample: Sample) -> tuple[float, Sequence[str]]:
        body = {"prompt": [*sample.prompt_token_ids, *sample.token_ids], "max_tokens": 0, "echo": True, "logprobs": 1}
        logprobs = _logprobs(self._ask(body | sample.asked))
        first = len(sample.prompt_token_ids)
        texts, chosen = logprobs["tokens"][first:], logprobs["token_logprobs"][first:]
        tops = logprobs["top_logprobs"][first:]
        return max(max(top.values()) - one for one, top in zip(chosen, tops, strict=True)), texts

    def _in_pieces(self, sample: Sample, texts: Sequence[str], limit: float) -> float:
        self._num_salts += 1
        # No reuse of cached blocks.
        cache = {"agentcache": {"salt": f"cut {self._num_salts}"}, **sample.asked}
        ids = [*sample.prompt_token_ids, *sample.token_ids]
        for cut in self._cuts(len(sample.prompt_token_ids)):
            self._ask({"prompt": ids[:cut], "max_tokens": 0, **cache})
        gap = 0.0
        for place, text in enumerate(texts, start=len(sample.prompt_token_ids)):
            sampling = {"max_tokens": 1, "temperature": 0, "ignore_eos": True, "logprobs": _TOP}
            [top] = _logprobs(self._ask({"prompt": ids[:place], **sampling, **cache}))["top_logprobs"]
            gap = max(gap, max(top.values()) - top.get(text, float("-inf")))
            if gap >= limit:
                break
        return gap

    def _cuts(self, num_tokens: int) -> list[int]:
        places = range(1, num_tokens)
        return sorted(self._rng.sample(places, min(len(places), self._rng.randint(1, _MAX_CUTS))))


def _logprobs(answer: Any) -> Any:
    return answer["choices"][0]["logprobs"]


def recompute(cache_dir: Path, quiet: Client) -> int:
    """Have a quiet server save all lineages, residual KV if it shares by default; return their number."""
    count, adapters = 0, {each["digest"]: each["name"] for each in quiet.request("GET", "/v1/adapters")["data"]}
    for path in sorted((cache_dir / "agents").glob("*/*.json")):
        manifest = decode_manifest(path.read_bytes())
        if manifest.base.num_saved:
            # One agent per lineage: none is dropped.
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
    """By block key, the largest relative distance from `quiet_dir`; infinity if missing."""
    paths = sorted((cache_dir / "blocks").glob("??/*.safetensors"))
    return {path.stem: _difference(path, quiet_dir / path.relative_to(cache_dir)) for path in paths}


def _difference(path: Path, other: Path) -> float:
    if not other.is_file():
        return float("inf")
    vectors, others = load_file(path), load_file(other)
    residual = sorted(name for name in vectors if name.startswith("residual."))
    if residual:  # relative to neighbours' usual length: vectors may be short
        return max(_apart(vectors[name].astype(np.float32), others[name].astype(np.float32)) for name in residual)
    pairs = zip(_vectors(path, vectors), _vectors(other, others), strict=True)
    return max(float(np.max(_norms(one - two) / np.maximum(_norms(two), 1e-6))) for one, two in pairs)


def _vectors(path: Path, tensors: Mapping[str, NDArray[np.generic]]) -> Iterator[NDArray[np.float32]]:
    """Keys and values of a block file [heads, tokens, head_dim], unpacked as its header says."""
    with safe_open(path, "np") as file:
        keys, values = _packings(file.metadata()["quantization"])
    for name in sorted(name for name in tensors if name.endswith(".data")):
        packed = Packed(*(mx.array(tensors[name.removesuffix("data") + part]) for part in PARTS))
        yield np.array(dequantise(packed, keys if "key_cache" in name else values, mx.float32))


def _packings(text: str) -> tuple[Packing, Packing]:
    """Inverse of `str(LayerPacking)`, of quantised ones."""
    found = [
        ByChannel(int(bits), int(group)) if by_channel else Quantisation(int(bits), int(group))
        for bits, by_channel, group in re.findall(r"affine-(\d+)bit(-channel)?-g(\d+)", text)
    ]
    return found[0], found[-1]


def _apart(one: NDArray[np.float32], two: NDArray[np.float32]) -> float:
    return float(np.max(_norms(one - two)) / max(float(np.sqrt(np.mean(_norms(two) ** 2))), 1e-6))


def _norms(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.asarray(np.linalg.norm(vectors, axis=-1))
