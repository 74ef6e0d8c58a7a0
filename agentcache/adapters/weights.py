"""Weights of adapters on the device, within the RAM budget that they share with the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agentcache.adapters.activation import AdapterUse
from agentcache.adapters.stacks import StackLoan
from agentcache.blocks.ledger import ADAPTERS, Ledger
from agentcache.errors import OutOfBlocks
from agentcache.models.adapter_rows import AdapterWeights, RowAdapter
from agentcache.models.adapters import AdapterContent, trunk_cut
from agentcache.models.decoder import Decoder, DecoderWeights, load_decoder
from agentcache.models.loader import LoadedModel
from agentcache.models.runner import ModelRunner

_SHARE = 0.5  # of what the cache can spare


@dataclass(frozen=True)
class _Arrival:
    """A decoder that is being loaded. Its bytes count from the beginning."""

    decoder: Decoder
    pieces: Iterator[DecoderWeights | None]

    @property
    def nbytes(self) -> int:
        return self.decoder.nbytes


class AdapterWeightSet:
    """By digest. Belongs to the engine thread; `AdapterTable` knows what may be dropped.

    Args:
        ledger: has the cache give way to weights, and lend what copies of them take.
    """

    def __init__(self, loaded: LoadedModel, runner: ModelRunner, ledger: Ledger) -> None:
        self._loaded = loaded
        self._adapters = loaded.adapters
        self._runner = runner
        self._ledger = ledger
        self._account = ledger.open(ADAPTERS, used=lambda: self._weight_bytes)
        self._loan = StackLoan(loaded.adapters.stacks, ledger)
        self._weights: dict[str, AdapterWeights] = {}
        self._decoders: dict[str, DecoderWeights] = {}
        self._arrivals: dict[str, _Arrival] = {}

    @property
    def budget(self) -> int:
        """Bytes that all weights together may take."""
        return int((self._ledger.budget - self._ledger.floors) * _SHARE)

    @property
    def nbytes(self) -> int:
        """Bytes on the device, with the copies for steps that mix adapters."""
        return self._weight_bytes + self._adapters.stacks.nbytes

    @property
    def _weight_bytes(self) -> int:
        held: list[AdapterWeights | DecoderWeights | _Arrival] = [*self._weights.values(), *self._decoders.values()]
        return sum(each.nbytes for each in (*held, *self._arrivals.values()))

    def load(self, content: AdapterContent | Decoder) -> bool:
        """Put an adapter's matrices on the device, or a decoder's next piece; True when everything is there.

        Raises:
            OutOfBlocks: running requests hold so many blocks that the cache cannot make room.
            UnsupportedAdapter: the decoder does not fit the base model.
        """
        try:
            return self._load_piece(content) if isinstance(content, Decoder) else self._load(content)
        finally:
            self._account.settle(self._weight_bytes)

    def _load(self, content: AdapterContent) -> bool:
        digest = content.adapter.digest
        if digest not in self._weights:
            self._make_room(content.adapter.nbytes)
            self._weights[digest] = self._adapters.load(content)
        return True

    def _load_piece(self, decoder: Decoder) -> bool:
        digest = decoder.digest
        if digest in self._decoders:
            return True
        if digest not in self._arrivals:
            self._make_room(decoder.nbytes)
            self._arrivals[digest] = _Arrival(decoder, load_decoder(decoder, self._loaded))
        arrival = self._arrivals.pop(digest)  # for good, if this piece fails
        weights = next(arrival.pieces)
        if weights is None:
            self._arrivals[digest] = arrival
        else:
            self._decoders[digest] = weights
        return weights is not None

    def _make_room(self, nbytes: int) -> None:
        fits = self._account.ask(nbytes)
        self._runner.fit()  # the cache's memory goes before the weights come
        if not fits:
            raise OutOfBlocks(f"running requests take the RAM budget of {self._ledger.budget} bytes")
        self._account.claim(nbytes)

    def drop(self, digest: str) -> None:
        """Give an adapter's memory back to the cache. No request may use it any more."""
        if digest in self._weights:
            self._loan.forget(self._weights.pop(digest))
        else:
            del self._decoders[digest]
        self._account.settle(self._weight_bytes)

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
        row = None if use is None or use.is_residual else self.row(use)
        return 0 if row is None else trunk_cut(row.weights.adapter, self._loaded.spec)

    @property
    def cuts(self) -> list[int]:
        """Layers at which adapters on the device can go on from the trunk, lowest first."""
        cuts = {trunk_cut(weights.adapter, self._loaded.spec) for weights in self._weights.values()}
        return sorted(cuts - {0})

    def decoder(self, digest: str | None) -> DecoderWeights | None:
        """The model that computes a step; None for base."""
        return None if digest is None else self._decoders[digest]
