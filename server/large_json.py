"""Parses large bodies in child processes: 30 MB of JSON would hold the GIL for over 0.1 s."""

from __future__ import annotations

import marshal
from collections.abc import Callable
from functools import cached_property
from typing import Any

from agentcache.errors import ContextLengthExceeded, InvalidRequest
from agentcache.server.engine import Engine
from agentcache.server.large_json_child import ParseOutcome
from agentcache.system.confined import ChildBroke, ConfinedWork, OverLimit


class LargeJson:
    """Parses bodies on any thread. Reads the model's context length at the first one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @cached_property
    def _work(self) -> ConfinedWork:
        return ConfinedWork("agentcache.server.large_json_child", str(self._engine.model.max_context))

    def close(self) -> None:
        if "_work" in self.__dict__:
            self._work.close()

    def parse(self, raw: list[bytes], param: str | None, go_on: Callable[[], None]) -> dict[str, Any]:
        """Return the JSON object in a body.

        Args:
            raw: one body; this call empties the list.
            param: the prompt's name in errors.
            go_on: called periodically; its exception ends the process.

        Raises:
            InvalidRequest: invalid body, or a limit of time or memory.
            ContextLengthExceeded: too long.
        """
        return _parse(self._work, raw, param, go_on)


def _parse(work: ConfinedWork, raw: list[bytes], param: str | None, go_on: Callable[[], None]) -> dict[str, Any]:
    try:
        kind, content = work.ask(raw, go_on=go_on)
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
