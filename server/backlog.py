"""Updates of a stream that its client has yet to read."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from agentcache.report import Update

_BEHIND = 32  # updates; a client that is further behind gets several tokens in one event
_TOGETHER = 256  # tokens in one update
# Tokens and candidates of their logprobs: with more pending the stream is ended. A token without logprobs counts once.
_MOST_PENDING = 50_000


class Backlog:
    """A queue whose size is bounded by what it holds: updates that wait long are merged."""

    def __init__(self) -> None:
        self._pending: deque[Update | Exception | None] = deque()
        self._size = 0

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def is_full(self) -> bool:
        """Whether the client is so far behind that its stream is to be ended."""
        return self._size > _MOST_PENDING

    def put(self, update: Update | Exception | None) -> None:
        """Add an update, an error, or None for a silence."""
        if isinstance(update, Update):
            self._size += _size(update)
        if len(self._pending) >= _BEHIND:
            last = self._pending[-1]
            if update is None:
                return  # something is there to be sent
            if isinstance(last, Update) and isinstance(update, Update) and _can_merge(last, update):
                self._pending[-1] = _merged(last, update)
                return
        self._pending.append(update)

    def pop(self) -> Update | Exception | None:
        """The next one; there must be one."""
        update = self._pending.popleft()
        if isinstance(update, Update):
            self._size -= _size(update)
        return update


def _size(update: Update) -> int:
    return len(update.token_ids) + sum(1 + len(token.top) for token in update.logprobs)


def _can_merge(first: Update, second: Update) -> bool:
    return (
        first.choice == second.choice
        and len(first.token_ids) + len(second.token_ids) <= _TOGETHER
        and _is_plain(first)
        and _is_plain(second)
    )


def _is_plain(update: Update) -> bool:
    """Whether it has no more than text and tokens."""
    others = (update.prompt_token_ids, update.prompt_logprobs, update.finish_reason, update.stop_string, update.report)
    return all(each is None for each in (*others, update.prompt_end))


def _merged(first: Update, second: Update) -> Update:
    offset = len(first.text)
    return replace(
        first,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        markers=first.markers + tuple((offset + at, name) for at, name in second.markers),
    )
