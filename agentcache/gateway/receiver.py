"""The event loop's end of a submitted request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from agentcache.report import Update
from agentcache.threads import as_exception


class Receiver:
    """Passes a request's updates to `take` until the last one, an error, or cancellation of `ended`.

    Attributes:
        ended: done after the last update.
        finished: done when the engine has finished with the request, including its save.
    """

    def __init__(self, take: Callable[[Update], None]) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.finished: asyncio.Future[None] = loop.create_future()
        self._take = take
        self._prompt_known: asyncio.Future[None] = loop.create_future()

    def __call__(self, update: Update | BaseException) -> None:
        if isinstance(update, BaseException):
            self.finish()
            if not self.ended.done():
                self.ended.set_exception(as_exception(update))
            return
        if update.report is not None:
            self.finish()
        if update.prompt_token_ids is not None and not self._prompt_known.done():
            self._prompt_known.set_result(None)
        if not self.ended.done():
            self._hand_over(update)

    def _hand_over(self, update: Update) -> None:
        try:
            self._take(update)
        except BaseException as error:  # later requests' updates must still be delivered
            self.ended.set_exception(as_exception(error))
        else:
            if update.report is not None:
                self.ended.set_result(None)

    async def prompt_known(self) -> None:
        """Wait until the prompt is computed. Raises an error that ended the request."""
        await asyncio.wait({self._prompt_known, self.ended}, return_when=asyncio.FIRST_COMPLETED)
        if not self._prompt_known.done():
            await self.ended

    def leave(self) -> None:
        """Stop waiting for `ended`."""
        if not self.ended.cancel() and not self.ended.cancelled():
            self.ended.exception()  # mark as retrieved for asyncio

    def finish(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)
