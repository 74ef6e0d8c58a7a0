"""Runs a model with rows whose keys and values are base's with an adapter's residuals, as the engine does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from agentcache.blocks.pool import BlockPool, BlockTable
from agentcache.models.adapters import AdapterWeights, RowAdapter
from agentcache.models.loader import LoadedModel
from agentcache.models.residual.arenas import ResidualArenas
from agentcache.models.residual.rows import ResidualRow
from agentcache.models.residual.spec import residual_spec
from agentcache.models.step import StepInputs, StepOutputs
from tests.models.driver import Driver, Row


@dataclass
class Residuals:
    """One adapter's cache."""

    weights: AdapterWeights
    pools: list[BlockPool]
    arenas: ResidualArenas


@dataclass
class ResidualKV:
    """A residual row: base's row, which it reads, and its own residuals of the first `length` tokens."""

    base: Row
    cache: Residuals
    tables: list[BlockTable] = field(default_factory=list)
    length: int = 0

    @property
    def adapter(self) -> RowAdapter:
        return RowAdapter(self.cache.weights)


AnyRow = Row | ResidualKV | tuple[Row, RowAdapter]


class ResidualDriver(Driver):
    """A runner with base's pools and one set of pools an adapter."""

    def __init__(self, loaded: LoadedModel, *, measures: bool = False) -> None:
        super().__init__(loaded, measures=measures)
        self.caches: dict[AdapterWeights, Residuals] = {}

    def residuals(self, weights: AdapterWeights) -> Residuals:
        if weights not in self.caches:
            support = self.loaded.adapters.residual_forms.support
            spec = residual_spec(self.loaded.spec, support.shape_of(weights.adapter))
            pools = [BlockPool() for _ in spec.groups]
            self.caches[weights] = Residuals(weights, pools, self.runner.open_residual(spec, pools))
        return self.caches[weights]

    def residual_kv(self, base: Row, weights: AdapterWeights) -> ResidualKV:
        cache = self.residuals(weights)
        return ResidualKV(base, cache, [BlockTable() for _ in cache.pools])

    def mixed(self, rows: Sequence[AnyRow], token_ids: np.ndarray) -> StepOutputs:
        """One step of rows of all kinds: [B, n] next tokens. An overlay's base has its keys and values by the end."""
        num_tokens = token_ids.shape[1]
        bases = [row.base if isinstance(row, ResidualKV) else row[0] if isinstance(row, tuple) else row for row in rows]
        lengths = [
            row.length if isinstance(row, ResidualKV) else base.length for row, base in zip(rows, bases, strict=True)
        ]
        residual_kvs = [row for row in rows if isinstance(row, ResidualKV)]
        for row, base in zip(rows, bases, strict=True):
            if isinstance(row, ResidualKV):
                self._extend(row.tables, row.cache.pools, row.length + num_tokens)
            else:
                self._reserve(base, num_tokens)
        residual = self.runner.residual_rows(
            [
                ResidualRow(place, row.cache.weights, row.cache.arenas, row.tables, row.length)
                for place, row in enumerate(rows)
                if isinstance(row, ResidualKV)
            ],
            len(rows),
            num_tokens,
        )
        writers = range(len(rows)) if residual is None else residual.writers
        tables = [base.tables for base in bases]
        step = StepInputs(
            mx.array(token_ids.astype(np.int32)),
            lengths,
            reads=self.runner.reads(tables, lengths, num_tokens),
            writes=self.runner.writes(
                [tables[place] for place in writers], [lengths[place] for place in writers], num_tokens
            )
            if writers
            else (),
            adapters=[
                row.adapter if isinstance(row, ResidualKV) else row[1] if isinstance(row, tuple) else None
                for row in rows
            ],
            all_logits=True,
            states=[None] * len(rows),
            residual=residual,
        )
        outputs = self.runner.forward(step)
        mx.eval(outputs.logits)
        self.runner.evaluate()
        for row, base in zip(rows, bases, strict=True):
            if not isinstance(row, ResidualKV):
                base.length += num_tokens
        for residual_kv in residual_kvs:
            residual_kv.length += num_tokens
        return outputs

    def read(self, residual_kv: ResidualKV, token_ids: np.ndarray, chunk: int = 64) -> mx.array:
        """Both passes over one row's tokens [n]; logits [n, vocabulary] of the adapter's."""
        for begin in range(0, len(token_ids), chunk):
            self.mixed([residual_kv.base], token_ids[None, begin : begin + chunk])
        pieces = [
            self.mixed([residual_kv], token_ids[None, begin : begin + chunk]).logits[0]
            for begin in range(0, len(token_ids), chunk)
        ]
        return mx.concatenate(pieces)

    def _extend(self, tables: Sequence[BlockTable], pools: Sequence[BlockPool], num_tokens: int) -> None:
        for table, pool in zip(tables, pools, strict=True):
            while table.end_block * 256 < num_tokens:
                if not pool.num_free:
                    pool.grow(pool.capacity + 2)
                table.block_ids.append(pool.allocate())
