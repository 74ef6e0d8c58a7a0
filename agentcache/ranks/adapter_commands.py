from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from agentcache.models.adapter_files import LowRank, ModuleName
from agentcache.ranks.words import Numbers, WordReader, WordWriter


@dataclass(frozen=True)
class LoadAdapter:
    """Load an adapter under a number; each rank takes its part of the whole matrices."""

    code: ClassVar = 10
    number: int
    digest: str
    matrices: Mapping[ModuleName, LowRank]

    def put(self, words: WordWriter) -> None:
        words.put(self.number, len(self.matrices))
        words.put_text(self.digest)
        for name, pair in self.matrices.items():
            words.put(name.layer, *pair.a.shape, pair.b.shape[1])
            words.put_text(name.path)
            for matrix in (pair.a, pair.b):
                words.put_bytes(np.ascontiguousarray(matrix, np.float32).tobytes())

    @classmethod
    def get(cls, words: WordReader) -> LoadAdapter:
        number, count, digest = words.get(), words.get(), words.get_text()
        matrices = {}
        for _ in range(count):
            layer, in_dim, rank, out_dim = (words.get() for _ in range(4))
            path = words.get_text()
            a = np.frombuffer(words.get_bytes(), np.float32).reshape(in_dim, rank)
            b = np.frombuffer(words.get_bytes(), np.float32).reshape(rank, out_dim)
            matrices[ModuleName(layer, path)] = LowRank(a, b)
        return cls(number, digest, matrices)


@dataclass(frozen=True)
class DropAdapter(Numbers):
    """Free an adapter's memory."""

    code: ClassVar = 11
    number: int
