"""Caches of adapters' residuals beside base's, and which requests must do without them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from agentcache.agents.caches import KeptCache, KeptCaches
from agentcache.agents.persistence import Persistence
from agentcache.blocks.keys import BLOCK_SIZE, pack_token_ids, residual_cache
from agentcache.blocks.ledger import Ledger
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.blocks.sequence import CacheSequence
from agentcache.engine.generation import Generation
from agentcache.engine.passes import Overlay
from agentcache.engine.turns import Turns
from agentcache.errors import UnsupportedPolicy
from agentcache.kv.residual_arenas import ResidualArenas
from agentcache.kv.residual_spec import residual_spec
from agentcache.models.adapters import Adapter
from agentcache.models.divergence import Divergence
from agentcache.models.residual_forms import ResidualSupport
from agentcache.models.runner import ModelRunner

_MOST_REMEMBERED = 256


class Residuals:
    """Opens an adapter's cache when its weights come, and closes it when they go. Belongs to the engine thread.

    Args:
        support: which adapters can have residuals; None where no request may be answered so.
        max_divergence: above it an answer is computed exactly.
    """

    def __init__(
        self,
        caches: KeptCaches,
        persistence: Persistence,
        turns: Turns,
        runner: ModelRunner,
        ledger: Ledger,
        support: ResidualSupport | None,
        max_divergence: float,
    ) -> None:
        self._caches = caches
        self._persistence = persistence
        self._turns = turns
        self._runner = runner
        self._ledger = ledger
        self._support = support
        self._max_divergence = max_divergence
        # Beginnings of prompts whose residuals lay too far from base, by adapter and salt; the last used last.
        self._too_far: OrderedDict[tuple[str, str, bytes], float] = OrderedDict()

    # -- caches -------------------------------------------------------------------------------------------------------

    def open_for(self, adapter: Adapter) -> None:
        """The adapter's weights are on the device: so there is a cache for its residuals, if it can have any."""
        name = residual_cache(adapter.digest)
        if self._support is None or self._caches.is_open(name):
            return
        try:
            shape = self._support.shape_of(adapter)
        except UnsupportedPolicy:
            return  # its requests are refused before they come here
        base = self._caches.base
        spec = residual_spec(base.spec, shape)
        prefix = PrefixCache(spec.groups, self._ledger, name=name)
        prefix.allocator.headroom = base.prefix.allocator.headroom
        prefix.allocator.is_sparing = base.prefix.allocator.is_sparing
        arenas = self._runner.open_residual(spec, prefix.slots.pools)
        self._persistence.open_cache(KeptCache(name, spec, prefix, arenas))

    def close_for(self, digest: str) -> None:
        """The adapter's weights are gone, and nobody uses them: so is its cache, in RAM."""
        cache = self._caches.find(residual_cache(digest))
        if cache is None:
            return
        self._persistence.close_cache(cache.name)
        cache.prefix.allocator.close()
        assert isinstance(cache.arenas, ResidualArenas)  # they came from `open_for`
        self._runner.close_residual(cache.arenas)

    # -- steps --------------------------------------------------------------------------------------------------------

    def advance(self, generation: Generation, overlay: Overlay, token_ids: Sequence[int]) -> None:
        """An adapter has computed these tokens on top of base, and base beside it those that are paired."""
        residuals, base = overlay.residuals, self._caches.base.prefix
        written: list[tuple[KeptCache, CacheSequence]] = [(overlay.cache, residuals)]
        if overlay.is_paired(residuals.num_tokens):
            written.append((self._caches.base, overlay.base))
        for cache, sequence in written:
            if published := cache.prefix.advance(sequence, token_ids):
                self._turns.save_early(generation, sequence, published, cache.name)
        generation.drop_passes()
        overlay.cache.prefix.leave_window(residuals)
        base.leave_window(overlay.base, residuals.num_tokens)

    # -- the guard ----------------------------------------------------------------------------------------------------

    def known_divergence(self, generation: Generation) -> float | None:
        """How far off a prompt with this beginning has been with this adapter, if that was too far; else None."""
        digest, salt = _adapter_and_salt(generation)
        packed = pack_token_ids(generation.token_ids[:BLOCK_SIZE])
        for key in self._too_far:
            if key[:2] == (digest, salt) and packed.startswith(key[2]):
                self._too_far.move_to_end(key)
                return self._too_far[key]
        return None

    def is_too_far(self, generation: Generation) -> bool:
        """Measure a prompt that has been computed, and remember its beginning if it lies too far from base."""
        overlay = generation.overlay
        assert overlay is not None  # it is residual, and admitted
        measured = Divergence.of(*overlay.arenas.measured_of(overlay.residuals.tables, generation.num_prompt_tokens))
        generation.divergence = None if measured is None else measured.value
        if generation.divergence is None or generation.divergence <= self._max_divergence:
            return False
        key = (*_adapter_and_salt(generation), pack_token_ids(_beginning(generation)))
        self._too_far[key] = generation.divergence
        if len(self._too_far) > _MOST_REMEMBERED:
            self._too_far.popitem(last=False)
        return True


def _adapter_and_salt(generation: Generation) -> tuple[str, str]:
    assert generation.adapter is not None  # it is residual
    return generation.adapter.digest, generation.request.salt


def _beginning(generation: Generation) -> Sequence[int]:
    return generation.token_ids[: min(BLOCK_SIZE, generation.num_prompt_tokens)]
