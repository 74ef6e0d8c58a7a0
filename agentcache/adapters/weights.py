from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agentcache.adapters.activation import AdapterUse
from agentcache.adapters.stacks import StackLoan
from agentcache.api.stats import ADAPTERS
from agentcache.blocks.ledger import Ledger
from agentcache.errors import OutOfBlocks
from agentcache.models.adapters import AdapterContent, AdapterWeights, RowAdapter, trunk_cut
from agentcache.models.decoder import Decoder, DecoderWeights, load_decoder
from agentcache.models.loader import LoadedModel
from agentcache.models.runner import ModelRunner

Content = AdapterContent | Decoder

_SHARE = 0.5  # of the budget above all floors


@dataclass(frozen=True)
class _Arrival:
    """A decoder being loaded; all its bytes count."""

    decoder: Decoder
    pieces: Iterator[DecoderWeights | None]

    @property
    def nbytes(self) -> int:
        return self.decoder.nbytes


class AdapterWeightSet:
    """Weights on the device, by digest; `AdapterTable` decides which to drop. Engine thread only."""

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
        return int((self._ledger.budget - self._ledger.floors) * _SHARE)

    @property
    def nbytes(self) -> int:
        return self._weight_bytes + self._adapters.stacks.nbytes

    @property
    def _weight_bytes(self) -> int:
        held: list[AdapterWeights | DecoderWeights | _Arrival] = [*self._weights.values(), *self._decoders.values()]
        return sum(each.nbytes for each in (*held, *self._arrivals.values()))

    def load(self, content: Content) -> bool:
        """Load an adapter, or a decoder's next piece; True when complete.

        Raises OutOfBlocks, or UnsupportedAdapter if the decoder does not fit base.
        """
        try:
            return self._load_piece(content) if isinstance(content, Decoder) else self._load(content)
        finally:
            self._account.set_bytes(self._weight_bytes)

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
        self._runner.base.fit()  # before the weights are allocated
        if not fits:
            raise OutOfBlocks(f"running requests take the RAM budget of {self._ledger.budget} bytes")
        self._account.claim(nbytes)

    def drop(self, digest: str) -> None:
        """Drop an adapter that no request uses."""
        if digest in self._weights:
            self._loan.forget(self._weights.pop(digest))
        else:
            del self._decoders[digest]
        self._account.set_bytes(self._weight_bytes)

    def rows(self, uses: Sequence[AdapterUse | None]) -> list[RowAdapter | None]:
        """Return each row's LoRA for the next step, stacked if possible."""
        rows = [self.row(use) for use in uses]
        self._loan.prepare(rows)
        return rows

    def row(self, use: AdapterUse | None) -> RowAdapter | None:
        if use is None or use.start is None or use.is_decoder:
            return None
        return RowAdapter(self._weights[use.digest], use.start)

    def cut(self, use: AdapterUse | None) -> int:
        """Layer below which a request's tokens are base's; 0 for none."""
        row = None if use is None or use.is_residual else self.row(use)
        return 0 if row is None else trunk_cut(row.weights.adapter, self._loaded.spec)

    @property
    def cuts(self) -> list[int]:
        """Layers where loaded adapters can use hidden states, ascending."""
        cuts = {trunk_cut(weights.adapter, self._loaded.spec) for weights in self._weights.values()}
        return sorted(cuts - {0})

    def decoder(self, digest: str | None) -> DecoderWeights | None:
        return None if digest is None else self._decoders[digest]
