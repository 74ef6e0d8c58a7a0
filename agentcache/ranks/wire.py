from __future__ import annotations

from collections import deque

import mlx.core as mx
import numpy as np

from agentcache.ranks.lost import naming_the_lost

_LENGTH_BYTES = 4
_LEAST_BYTES = 256
_REMEMBERED = 16  # messages; the next one has room for the longest
_MOST_REMEMBERED = 1 << 16  # bytes, enough for steps; adapters and imported blocks reserve no room


class Wire:
    """Exchanges messages between ranks on the thread that computes, ordered with the model's reductions.

    A message is one `all_gather` of as much room per rank as recent messages took: length, then bytes. Longer ones
    need a second gather.
    """

    def __init__(self, group: mx.distributed.Group) -> None:
        self._group = group
        self._lengths: deque[int] = deque(maxlen=_REMEMBERED)
        self.messages = 0
        self.sent_bytes = 0

    @property
    def rank(self) -> int:
        return int(self._group.rank())

    @property
    def size(self) -> int:
        return int(self._group.size())

    def exchange(self, own: bytes) -> list[bytes]:
        """Send `own` and return each rank's message. All ranks must call it. Raises RankLost."""
        room = _row_bytes(max(self._lengths, default=0))
        heard = self._gather(own, room)
        lengths = heard[:, :_LENGTH_BYTES].copy().view(np.uint32)[:, 0].tolist()
        self._lengths.append(min(max(lengths), _MOST_REMEMBERED))
        if (needed := _row_bytes(max(lengths))) > room:
            heard = self._gather(own, needed)
        return [row[:length].tobytes() for row, length in zip(heard[:, _LENGTH_BYTES:], lengths, strict=True)]

    def _gather(self, own: bytes, num_bytes: int) -> np.ndarray:
        """uint8 [size, num_bytes]: length, then bytes, maybe truncated."""
        row = np.zeros(num_bytes, np.uint8)
        row[:_LENGTH_BYTES].view(np.uint32)[0] = len(own)
        sent = np.frombuffer(own[: num_bytes - _LENGTH_BYTES], np.uint8)
        row[_LENGTH_BYTES:][: len(sent)] = sent
        self.messages += 1
        self.sent_bytes += row.nbytes
        with naming_the_lost():
            gathered = mx.distributed.all_gather(mx.array(row)[None], group=self._group)
            mx.eval(gathered)
        return np.array(gathered)


def _row_bytes(num_bytes: int) -> int:
    return max(_LEAST_BYTES, 1 << (_LENGTH_BYTES + num_bytes - 1).bit_length())
