"""Child process of `LargeJson`: answers with a `ParseOutcome` and `marshal` of the object or refusal."""

from __future__ import annotations

import marshal
import os

from agentcache.errors import ContextLengthExceeded, InvalidRequest
from agentcache.server.validate import parse_object, refuse_long_lists, refuse_many_values
from agentcache.system.confined_child import serve

_NICE = 10  # below the engine and the event loop


class ParseOutcome:
    """An object, or a refusal as (message, parameter, code)."""

    OBJECT = b"o"
    INVALID = b"i"
    TOO_LONG = b"l"


def main(max_context: str) -> None:
    os.nice(_NICE)
    serve(lambda request: _answer(request, int(max_context)))


def _answer(request: list[bytes], max_context: int) -> tuple[bytes, bytes]:
    try:
        refuse_many_values(request[0], max_context)
        value = parse_object(request)
        refuse_long_lists(value, max_context)
    except ContextLengthExceeded as error:
        return ParseOutcome.TOO_LONG, marshal.dumps((error.message, error.param, error.code))
    except InvalidRequest as error:
        return ParseOutcome.INVALID, marshal.dumps((error.message, error.param, error.code))
    return ParseOutcome.OBJECT, marshal.dumps(value)
