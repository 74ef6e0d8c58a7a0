"""Limits bodies in size, time and memory; parses large ones outside the GIL."""

from __future__ import annotations

import asyncio
import gc
import marshal
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentcache.errors import ContextLengthExceeded, InvalidRequest, Overloaded, PayloadTooLarge, RequestTooSlow
from agentcache.gateway.prompt_workers import Workers
from agentcache.server.engine import Engine
from agentcache.server.large_json_child import ParseOutcome
from agentcache.system.confined import ChildBroke, ConfinedWork, OverLimit
from agentcache.system.malloc import give_back_freed

_READ = "body_read"

FREE_BYTES = 64 << 10  # of a body, outside the shared budget

_TRIM_BYTES = 1 << 20  # of a body


def note_read(request: Request) -> None:
    """Release a parsed body's share of the budget."""
    give_back = request.scope.get("state", {}).get(_READ)
    if give_back is not None:
        give_back()


class WholeBody:
    """Calls the application with complete bodies: slow uploads take no place in the queue.

    `limit`: bytes of a body; `room`: of all unparsed ones beyond `FREE_BYTES` each.
    """

    def __init__(self, app: ASGIApp, limit: int, seconds: float, room: int) -> None:
        self.app = app
        self._limit = limit
        self._seconds = seconds
        self._room = room

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        self._check_announced(Headers(scope=scope).get("content-length"))
        body = _Body()
        try:
            pending: list[Message] = [await self._read(body, receive)]

            async def receive_rest() -> Message:
                return pending.pop() if pending else await receive()

            scope.setdefault("state", {})[_READ] = lambda: self._give_back(body)

            await self.app(scope, receive_rest, send)
        finally:
            self._give_back(body)

    def _check_announced(self, length: str | None) -> None:
        if length is None:
            return
        if not (length.isascii() and length.isdigit()):
            raise InvalidRequest("Content-Length must be a number of bytes.", param="Content-Length")
        # int() refuses thousands of digits; 18 exceed any limit.
        self._check(int(length) if len(length) <= 18 else 10**18)

    def _check(self, size: int) -> None:
        if size > self._limit:
            raise PayloadTooLarge(f"The body is over {self._limit} bytes.")

    async def _read(self, body: _Body, receive: Receive) -> Message:
        try:
            async with asyncio.timeout(self._seconds):
                while not body.is_complete:
                    self._add(body, await receive())
        except TimeoutError:
            raise RequestTooSlow(f"The body was not there within {self._seconds:g} s.") from None
        parts, body.parts = body.parts, []
        return {"type": "http.request", "body": b"".join(parts), "more_body": False}

    def _add(self, body: _Body, message: Message) -> None:
        if message["type"] == "http.disconnect":
            raise ClientDisconnect()
        body.parts.append(message.get("body", b""))
        body.size += len(body.parts[-1])
        self._check(body.size)
        body.is_complete = not message.get("more_body", False)
        held = max(0, body.size - FREE_BYTES)
        if not body.is_complete and held - body.held > self._room:
            raise Overloaded("Too many large bodies are on their way; try again later.")
        self._room -= held - body.held
        body.held = held

    def _give_back(self, body: _Body) -> None:
        self._room += body.held
        body.held = 0


class _Body:
    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0
        self.held = 0  # bytes of the shared budget
        self.is_complete = False


class LargeBodies:
    """Outermost middleware: after large bodies, collects garbage (tracebacks hold prompts) and trims malloc."""

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
            if received >= _TRIM_BYTES and not self._is_due:
                self._is_due = True
                with suppress(Overloaded):  # busy, or shutdown
                    await self._workers.run(0, self._free)
                self._is_due = False

    def _free(self, has_ended: object) -> None:
        self._is_due = False  # later requests need another run
        gc.collect()
        give_back_freed()


class LargeJson:
    """Parses bodies in a child process. The model must be loaded."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @cached_property
    def _work(self) -> ConfinedWork:
        return ConfinedWork("agentcache.server.large_json_child", str(self._engine.model.max_context))

    def close(self) -> None:
        if "_work" in self.__dict__:
            self._work.close()

    def parse(self, raw: list[bytes], param: str | None, go_on: Callable[[], None]) -> dict[str, Any]:
        """Return the JSON object in `raw`, which is emptied. Any thread.

        An exception of `go_on`, called periodically, ends the child. Raises InvalidRequest or ContextLengthExceeded.
        """
        try:
            kind, content = self._work.ask(raw, go_on=go_on)
        except OverLimit as error:
            raise _not_read(f"it took {error.what}") from None
        except ChildBroke:
            raise _not_read("its reader broke off") from None
        value = marshal.loads(content)
        if kind == ParseOutcome.OBJECT:
            assert isinstance(value, dict)
            return value
        message, at_fault, code = value
        if kind == ParseOutcome.TOO_LONG:
            raise ContextLengthExceeded(message, param=at_fault or param, code=code)
        raise InvalidRequest(message, param=at_fault, code=code)


def _not_read(why: str) -> InvalidRequest:
    return InvalidRequest(f"The body could not be read: {why}.", code="body_not_read")
