"""Frees memory after large requests."""

from __future__ import annotations

import gc
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentcache.errors import Overloaded
from agentcache.gateway.prompt_workers import Workers
from agentcache.system.malloc import give_back_freed

LARGE_BODY = 1 << 20  # bytes


class LargeBodies:
    """Outermost middleware: collects garbage and trims malloc after a large request.

    A refusal's traceback holds the prompt in cycles. malloc is set to keep freed memory, which suits the engine.
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
                with suppress(Overloaded):  # busy, or shutdown
                    await self._workers.run(0, self._free)
                self._is_due = False

    def _free(self, has_ended: object) -> None:
        self._is_due = False  # later requests need another run
        gc.collect()
        give_back_freed()
