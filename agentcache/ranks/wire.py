from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import numpy as np

from agentcache.errors import UnsupportedModel
from agentcache.ranks.lost import lost_rank

_LEAST_WORDS = 64
_REMEMBERED = 16  # messages; the next one has room for the longest
_MOST_REMEMBERED = 1 << 16  # bytes, enough for steps; adapters and imported blocks reserve no room


class Wire:
    """Exchanges messages between ranks on the thread that computes, ordered with the model's reductions.

    A message is one `all_gather` of equally many int32 words per rank. Recent messages determine the number; longer
    ones need a second gather.
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
        room = _words_for(max(self._lengths, default=0))
        heard = self._gather(own, room)
        longest = int(heard[:, 0].max())
        self._lengths.append(min(longest, _MOST_REMEMBERED))
        if _words_for(longest) > room:
            heard = self._gather(own, _words_for(longest))
        return [row[1:].tobytes()[: row[0]] for row in heard]

    def _gather(self, own: bytes, num_words: int) -> np.ndarray:
        """int32 [size, num_words]: each rank's length in bytes, then its bytes, truncated."""
        row = np.zeros(num_words, np.int32)
        row[0] = len(own)
        row[1:].view(np.uint8)[: len(own)] = np.frombuffer(own, np.uint8)[: row[1:].nbytes]
        self.messages += 1
        self.sent_bytes += row.nbytes
        with naming_the_lost():
            gathered = mx.distributed.all_gather(mx.array(row)[None], group=self._group)
            mx.eval(gathered)
        return np.array(gathered)


def _words_for(num_bytes: int) -> int:
    """A power of two, so that slightly longer messages fit."""
    return max(_LEAST_WORDS, 1 << (1 + -(-num_bytes // 4) - 1).bit_length())


@contextmanager
def naming_the_lost() -> Iterator[None]:
    """Turn connection errors inside into `RankLost` (`lost_rank`)."""
    try:
        yield
    except (RuntimeError, UnsupportedModel) as error:
        lost = lost_rank(error)
        if lost is None:
            raise
        raise lost from error
