"""Weights of adapters on the device, within the RAM budget that they share with the cache."""

from __future__ import annotations

from collections.abc import Sequence

from agentcache.blocks.slots import Slots
from agentcache.errors import OutOfBlocks
from agentcache.models.adapters import AdapterContent, trunk_cut
from agentcache.models.decoder import Decoder, DecoderWeights, load_decoder
from agentcache.models.loader import LoadedModel
from agentcache.models.lora import AdapterWeights, RowAdapter
from agentcache.models.runner import ModelRunner
from agentcache.serving.activation import AdapterUse
from agentcache.serving.adapter_stacks import StackLoan

_SHARE = 0.5  # of what the cache can spare


class AdapterWeightSet:
    """By digest. Belongs to the engine thread; `AdapterTable` knows what may be dropped.

    Args:
        slots: the cache's, which gives up what weights take, and lends what copies of them take.
    """

    def __init__(self, loaded: LoadedModel, runner: ModelRunner, slots: Slots) -> None:
        self._loaded = loaded
        self._adapters = loaded.adapters
        self._runner = runner
        self._slots = slots
        self._loan = StackLoan(loaded.adapters.stacks, slots)
        self._ram_budget = slots.ram_budget
        self._weights: dict[str, AdapterWeights] = {}
        self._decoders: dict[str, DecoderWeights] = {}

    @property
    def budget(self) -> int:
        """Bytes that all weights together may take."""
        return int((self._ram_budget - self._slots.min_ram_budget) * _SHARE)

    @property
    def nbytes(self) -> int:
        """Bytes on the device, with the copies for steps that mix adapters."""
        return self._weight_bytes + self._adapters.stacks.nbytes

    @property
    def _weight_bytes(self) -> int:
        held: list[AdapterWeights | DecoderWeights] = [*self._weights.values(), *self._decoders.values()]
        return sum(weights.nbytes for weights in held)

    def load(self, content: AdapterContent | Decoder) -> None:
        """Put an adapter's matrices, or a decoder, on the device, where they may be already.

        Raises:
            OutOfBlocks: running requests hold so many blocks that the cache cannot make room.
            UnsupportedAdapter: the decoder does not fit the base model.
        """
        source = content if isinstance(content, Decoder) else content.adapter
        if source.digest in self._weights or source.digest in self._decoders:
            return
        try:
            if not self._resize(source.nbytes):
                raise OutOfBlocks(f"running requests take the RAM budget of {self._ram_budget} bytes")
            self._put(content)
        finally:
            self._resize()

    def _put(self, content: AdapterContent | Decoder) -> None:
        if isinstance(content, Decoder):
            self._decoders[content.digest] = load_decoder(content, self._loaded)
        else:
            self._weights[content.adapter.digest] = self._adapters.load(content)

    def drop(self, digest: str) -> None:
        """Give an adapter's memory back to the cache. No request may use it any more."""
        if digest in self._weights:
            self._loan.forget(self._weights.pop(digest))
        else:
            del self._decoders[digest]
        self._resize()

    def _resize(self, added: int = 0) -> bool:
        """Leave the cache what weights do not take; False if it cannot make do with that now."""
        left = self._ram_budget - self._weight_bytes - added
        fits = self._slots.resize(max(left, self._slots.min_ram_budget))
        self._runner.fit()
        return fits

    def rows(self, uses: Sequence[AdapterUse | None]) -> list[RowAdapter | None]:
        """The LoRA of each row of the next step, which stacks them if it mixes several and there is room."""
        rows = [self.row(use) for use in uses]
        self._loan.prepare(rows)
        return rows

    def row(self, use: AdapterUse | None) -> RowAdapter | None:
        """The LoRA that a request's row is computed with; None for none."""
        if use is None or use.start is None or use.is_decoder:
            return None
        return RowAdapter(self._weights[use.digest], use.start)

    def cut(self, use: AdapterUse | None) -> int:
        """Layer below which all that a request computes is base's, at any token; 0 for none, or for base itself."""
        row = self.row(use)
        return 0 if row is None else trunk_cut(row.weights.adapter, self._loaded.spec)

    @property
    def cuts(self) -> list[int]:
        """Layers at which adapters on the device can go on from the trunk, lowest first."""
        cuts = {trunk_cut(weights.adapter, self._loaded.spec) for weights in self._weights.values()}
        return sorted(cuts - {0})

    def decoder(self, digest: str | None) -> DecoderWeights | None:
        """The model that computes a step; None for base."""
        return None if digest is None else self._decoders[digest]
