"""Gives back the memory that a large request took, as soon as it is answered."""

from __future__ import annotations

import asyncio
import gc

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentcache.malloc import give_back_freed

LARGE_BODY = 1 << 20  # bytes


class LargeBodies:
    """Outermost middleware: after a request with a large body, what it has left behind is freed.

    A refusal's traceback holds the prompt in cycles, which the collector would find much later; and malloc keeps what
    is freed, since that is best for the steps of the engine.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

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
            if received >= LARGE_BODY:
                await asyncio.to_thread(_free)


def _free() -> None:
    gc.collect()
    give_back_freed()
