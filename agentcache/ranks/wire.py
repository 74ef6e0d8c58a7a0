"""The way between the ranks: each says something, and all hear it, by `mx.distributed`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import numpy as np

from agentcache.errors import UnsupportedModel
from agentcache.ranks.lost import lost_rank

_LEAST_WORDS = 64
_REMEMBERED = 16  # messages: as long as the longest of them, the next one has room
_MOST_REMEMBERED = 1 << 16  # bytes: of steps; no room is kept for the next adapter, or block from elsewhere


class Wire:
    """Belongs to the thread that computes the model: what is said, and the model's own reductions, have one order.

    A message is one `all_gather` of int32 words, as many from each rank. How many is known from the messages before;
    what is longer says so, and goes by a second one.

    Attributes:
        messages: gathers, counted.
        sent_bytes: that this rank has sent by them.
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
        """Say `own`, and return what each rank says, by rank; all of them have to call this.

        Raises:
            RankLost: one of them is gone.
        """
        room = _words_for(max(self._lengths, default=0))
        heard = self._gather(own, room)
        longest = int(heard[:, 0].max())
        self._lengths.append(min(longest, _MOST_REMEMBERED))
        if _words_for(longest) > room:
            heard = self._gather(own, _words_for(longest))
        return [row[1:].tobytes()[: row[0]] for row in heard]

    def _gather(self, own: bytes, num_words: int) -> np.ndarray:
        """int32 [size, num_words]: of each rank its number of bytes, and as many of these as there is room for."""
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
    """A power of two, so that a message a little longer than those before needs no second one."""
    return max(_LEAST_WORDS, 1 << (1 + -(-num_bytes // 4) - 1).bit_length())


@contextmanager
def naming_the_lost() -> Iterator[None]:
    """Inside, what a back end of `mx.distributed` says of a connection becomes `RankLost`, also where a model's proof
    has taken it for the model's fault."""
    try:
        yield
    except (RuntimeError, UnsupportedModel) as error:
        lost = lost_rank(error)
        if lost is None:
            raise
        raise lost from error
