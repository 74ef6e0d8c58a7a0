"""How much room a message gets: as much as those before took, but for what comes once."""

from __future__ import annotations

import sys

import mlx.core as mx
import numpy as np

from agentcache.ranks.wire import Wire


def sent_by(wire: Wire, message: bytes) -> tuple[int, int]:
    """Gathers and bytes that it took."""
    messages, sent = wire.messages, wire.sent_bytes
    assert wire.exchange(message) == [message]
    return wire.messages - messages, wire.sent_bytes - sent


def test_a_message_as_long_as_the_last_one_is_sent_at_once() -> None:
    wire = Wire(mx.distributed.init())
    assert sent_by(wire, bytes(5000))[0] == 2
    messages, sent = sent_by(wire, bytes(5000))
    assert messages == 1 and 5000 < sent <= 2 * 5004


def test_what_was_very_long_once_does_not_make_the_next_ones_long() -> None:
    wire = Wire(mx.distributed.init())
    sent_by(wire, bytes(1 << 22))
    messages, sent = sent_by(wire, b"a step")
    assert messages == 1 and sent < 1 << 18


class Among(Wire):
    """One of two ranks, of which the other says `theirs`."""

    theirs = b""

    def _gather(self, own: bytes, num_bytes: int) -> np.ndarray:
        self.messages += 1
        rows = [len(said).to_bytes(4, sys.byteorder) + said + bytes(num_bytes) for said in (own, self.theirs)]
        return np.array([np.frombuffer(row[:num_bytes], np.uint8) for row in rows])


def test_room_is_for_the_longest_of_all_ranks() -> None:
    wire = Among(mx.distributed.init())
    wire.theirs = bytes(5000)
    for messages in (2, 3):
        assert wire.exchange(b"short") == [b"short", wire.theirs]
        assert wire.messages == messages
