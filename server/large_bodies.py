"""Gives back the memory that a large request took, as soon as it is answered."""

from __future__ import annotations

import gc
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentcache.errors import Overloaded
from agentcache.gateway.prompt_workers import Workers
from agentcache.malloc import give_back_freed

LARGE_BODY = 1 << 20  # bytes


class LargeBodies:
    """Outermost middleware: after a request with a large body, what it has left behind is freed.

    A refusal's traceback holds the prompt in cycles, which the collector would find much later; and malloc keeps what
    is freed, since that is best for the steps of the engine.

    Args:
        workers: on which that is done.
    """

    def __init__(self, app: ASGIApp, workers: Workers) -> None:
        self.app = app
        self._workers = workers
        self._is_due = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        received = 0

        async def counted_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            return message

        try:
            await self.app(scope, counted_receive, send)
        finally:
            if received >= LARGE_BODY and not self._is_due:
                self._is_due = True
                with suppress(Overloaded):  # busy, or at the end
                    await self._workers.run(0, self._free)
                self._is_due = False

    def _free(self, has_ended: object) -> None:
        self._is_due = False  # what is freed from now on is not part of this collection
        gc.collect()
        give_back_freed()
