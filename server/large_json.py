"""Large request bodies, read in processes of their own: to read 30 MB of JSON holds Python's lock for 0.1 s and more.

What is far too long for the model is refused there, and never becomes values here.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable
from functools import cached_property
from typing import Any

from agentcache.confined import ChildBroke, ConfinedWork, OverLimit
from agentcache.errors import ContextLengthExceeded, InvalidRequest
from agentcache.server.engine import Engine
from agentcache.server.large_json_child import ParseOutcome


class LargeJson:
    """Reads bodies. From any thread.

    Args:
        engine: whose model says how long prompts may be; asked when the first body comes.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @cached_property
    def _work(self) -> ConfinedWork:
        return ConfinedWork("agentcache.server.large_json_child", str(self._engine.model.max_context))

    def close(self) -> None:
        """End the processes that have nothing to do."""
        if "_work" in self.__dict__:  # there are any
            self._work.close()

    def parse(self, raw: list[bytes], param: str | None, go_on: Callable[[], None]) -> dict[str, Any]:
        """The JSON object in a body.

        Args:
            raw: the body alone; it is taken out.
            param: the prompt's name, for what is too long.
            go_on: called now and then; raises when nothing waits for the body any more, which ends the process.

        Raises:
            InvalidRequest: what `parse_object` raises, or the body took too much time or memory.
            ContextLengthExceeded: what `refuse_many_values` and `refuse_long_lists` raise.
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
