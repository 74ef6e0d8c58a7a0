"""What an event loop has of a request that the engine is at work on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from agentcache.report import Update
from agentcache.threads import as_exception


class Receiver:
    """Hands the updates of one request to `take`, up to the last one, an error, or the cancellation of `ended`.

    Attributes:
        ended: done when nothing more is handed over.
        settled: done when the engine has finished with the request: what there is to save of it is saved.
    """

    def __init__(self, take: Callable[[Update], None]) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.settled: asyncio.Future[None] = loop.create_future()
        self._take = take
        self._prompt_known: asyncio.Future[None] = loop.create_future()

    def __call__(self, update: Update | BaseException) -> None:
        if isinstance(update, BaseException):
            self.settle()
            if not self.ended.done():
                self.ended.set_exception(as_exception(update))
            return
        if update.report is not None:
            self.settle()
        if update.prompt_token_ids is not None and not self._prompt_known.done():
            self._prompt_known.set_result(None)
        if not self.ended.done():
            self._hand_over(update)

    def _hand_over(self, update: Update) -> None:
        try:
            self._take(update)
        except BaseException as error:  # the other requests' updates come behind this one
            self.ended.set_exception(as_exception(error))
        else:
            if update.report is not None:
                self.ended.set_result(None)

    async def prompt_known(self) -> None:
        """Return when the prompt is computed. Raises what ended the request before."""
        await asyncio.wait({self._prompt_known, self.ended}, return_when=asyncio.FIRST_COMPLETED)
        if not self._prompt_known.done():
            await self.ended

    def leave(self) -> None:
        """Nobody waits for `ended` any more."""
        if not self.ended.cancel() and not self.ended.cancelled():
            self.ended.exception()  # seen, so that asyncio does not report it as never retrieved

    def settle(self) -> None:
        """The engine has finished with the request, or never got it."""
        if not self.settled.done():
            self.settled.set_result(None)
