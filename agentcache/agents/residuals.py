from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from agentcache.blocks.block_tables import PathBlock
from agentcache.blocks.keys import BLOCK_SIZE, Namespace
from agentcache.blocks.origin_paths import chain_keys, spans
from agentcache.store.manifest import AgentRecord, ResidualBlocks


@dataclass(frozen=True)
class ResidualTurn:
    """A turn's residuals of one adapter.

    Args:
        cache: `keys.residual_cache` of the adapter.
        blocks: all of the lineage's, in the order of `spans`.
        early: blocks passed to `Persistence.save_blocks`, perhaps including surplus ones.
    """

    cache: str
    num_tokens: int
    blocks: Sequence[PathBlock]
    early: Sequence[PathBlock] = ()


def root_of(namespace: Namespace, residual: ResidualBlocks) -> str:
    """Chain key before a lineage's residuals, even of unloaded adapters. `namespace` is base's, with the lineage's
    salt.
    """
    return replace(namespace, spec=residual.spec, cache=residual.cache).root


def cut_residuals(record: AgentRecord, namespace: Callable[[str], Namespace]) -> AgentRecord:
    """Drop residuals of tokens outside the transcript."""
    if not record.residuals:
        return record
    cut = (_still_valid(record, each, namespace(record.salt)) for each in record.residuals)
    return replace(record, residuals=tuple(each for each in cut if each is not None))


def _still_valid(record: AgentRecord, residual: ResidualBlocks, namespace: Namespace) -> ResidualBlocks | None:
    num_tokens = min(residual.num_saved, len(record.transcript))
    layout = spans(num_tokens, None, len(residual.groups))
    chains = chain_keys(root_of(namespace, residual), record.transcript.ids, layout)
    pairs = enumerate(zip(residual.chains, chains, strict=False))
    agreed = next((index for index, (old, new) in pairs if old != new), len(chains))
    return residual.first_tokens(num_tokens if agreed == len(residual.blocks) else agreed * BLOCK_SIZE)
