"""Typed, time-limited readers of request bodies; refusals name the parameter."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from agentcache.api.names import is_name
from agentcache.errors import ContextLengthExceeded, InvalidRequest, Overloaded
from agentcache.text.json_values import TooDeep, deep_place, parse_json

MAX_INTEGER = 2**63 - 1
MAX_NAME = 256
MAX_NUMBER = 1e300
# They parse in 0.1 s.
MANY_VALUES = 2**20
_CALLS = ("tool_use", "tool_result")
_VALUES_PER_TOKEN = 4
_MOST_LISTS = 256  # of token ids
_LONGEST_HINT = 80  # compared with known names

BASE_SECONDS = 2.0
SECONDS_PER_MEGABYTE = 0.5
STEPS = 32  # between checks
# Then a reading thread rests: the event loop needs the GIL.
_WORK_SECONDS = 0.0005
_REST_SECONDS = 0.0005


def parse_object(raw: list[bytes]) -> dict[str, Any]:
    """Parse a body as JSON object; empties `raw`, which holds it. Raises InvalidRequest."""
    try:
        text = raw.pop().decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest("The body is not valid UTF-8.", code="invalid_json") from None
    try:
        value = parse_json(text, mends_halves=True)
    except TooDeep as error:
        place = deep_place(text)
        message = f"The body is not valid JSON: {error}{place and f', at {place!r:.80}'}."
        raise InvalidRequest(message, code="invalid_json") from None
    except ValueError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.", code="invalid_json")
    return value


def refuse_many_values(raw: bytes, max_context: int) -> None:
    """Raise ContextLengthExceeded for an unparsed body with more values than `max_context` tokens need.

    Commas and brackets in strings count: they are tokens, too.
    """
    if len(raw) <= MANY_VALUES:
        return
    num_lists = raw.count(b"[")
    num_values = raw.count(b",") + raw.count(b"{") + num_lists
    most = max(MANY_VALUES, max_context * max(min(num_lists, _MOST_LISTS), _VALUES_PER_TOKEN))
    if num_values > most:
        raise ContextLengthExceeded(
            f"The body has {num_values} commas and brackets; within the model's context of {max_context} tokens, "
            f"prompts have at most {most}."
        )


def refuse_long_lists(body: dict[str, Any], max_context: int) -> None:
    """Raise ContextLengthExceeded for more messages, token ids, calls or results than tokens in the context."""
    for param in ("messages", "prompt", "input"):
        items = body.get(param)
        if isinstance(items, list):
            _refuse_long(f"{param} has {len(items)} items", len(items), max_context, param)
    messages = body.get("messages")
    count = sum(map(_num_calls, messages)) if isinstance(messages, list) else 0
    _refuse_long(f"the messages have {count} tool calls and results", count, max_context, "messages")


def _num_calls(message: Any) -> int:
    if not isinstance(message, dict):
        return 0
    calls, blocks = message.get("tool_calls"), message.get("content")
    num_calls = len(calls) if isinstance(calls, list) else 0
    if not isinstance(blocks, list):
        return num_calls
    return num_calls + sum(isinstance(block, dict) and block.get("type") in _CALLS for block in blocks)


def _refuse_long(what: str, count: int, max_context: int, param: str) -> None:
    if count > max_context:
        raise ContextLengthExceeded(f"{what}; the model's context has {max_context} tokens.", param=param)


def check_agent_id(value: str, param: str) -> str:
    """Return a valid agent id, which also names files. Raises InvalidRequest."""
    if not is_name(value):
        problem = "must be 1 to 64 letters, digits, '.', '_' or '-', and not '.' or '..'"
        raise InvalidRequest(f"{param} {problem}.", param=param)
    return value


class Reader:
    """One JSON object at a dotted path of the body; null counts as absent."""

    __slots__ = ("_limit", "path", "value")

    def __init__(self, value: dict[str, Any], path: str = "", limit: ReadLimit | None = None) -> None:
        self.value = value
        self.path = path
        self._limit = limit

    def param(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def fail(self, name: str, problem: str, *, code: str | None = None) -> NoReturn:
        param = self.param(name)
        raise InvalidRequest(f"{param} {problem}.", param=param, code=code)

    def get(self, name: str) -> Any:
        return self.value.get(name)

    def string(self, name: str) -> str | None:
        if self._limit is not None:
            self._limit.step()
        value = self.value.get(name)
        if value is not None and not isinstance(value, str):
            self.fail(name, "must be a string")
        return value

    def required_string(self, name: str) -> str:
        value = self.string(name)
        if value is None:
            self.fail(name, "is required")
        return value

    def name(self, name: str) -> str:
        value = self.required_string(name)
        if len(value) > MAX_NAME:
            self.fail(name, f"must have at most {MAX_NAME} characters")
        return value

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.value.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(name, "must be true or false")
        return value

    def integer(self, name: str, *, minimum: int, maximum: int = MAX_INTEGER) -> int | None:
        value = self.value.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():  # some languages write 8.0
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(name, "must be a whole number")
        if not minimum <= value <= maximum:
            self.fail(name, f"must be {_range(value, minimum, maximum)}")
        return value

    def number(self, name: str, default: float, *, minimum: float, maximum: float = MAX_NUMBER) -> float:
        value = self.value.get(name)
        return default if value is None else self.as_number(name, value, minimum=minimum, maximum=maximum)

    def as_number(self, name: str, value: Any, *, minimum: float, maximum: float = MAX_NUMBER) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(name, "must be a number")
        if not minimum <= value <= maximum:
            self.fail(name, f"must be {_range(value, minimum, maximum)}")
        return float(value)

    def object(self, name: str) -> Reader:
        """The object under `name`; empty if absent."""
        value = self.value.get(name)
        if value is not None and not isinstance(value, dict):
            self.fail(name, "must be an object")
        return Reader(value or {}, self.param(name), self._limit)

    def at(self, name: str, value: Mapping[str, Any]) -> Reader:
        """Reader of `value` in place of field `name`; in place of this object if empty."""
        return Reader(dict(value), self.param(name) if name else self.path, self._limit)

    def objects(self, name: str) -> list[Reader]:
        """Objects of the list under `name`; empty if absent."""
        value = self.value.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            self.fail(name, "must be a list")
        path, limit, readers = self.param(name), self._limit, list[Reader]()
        for index, item in enumerate(value):
            if not isinstance(item, dict):
                self.fail(f"{name}[{index}]", "must be an object")
            if limit is not None:
                limit.step()
            readers.append(Reader(item, f"{path}[{index}]", limit))
        return readers

    def items(self, name: str) -> Iterator[Any]:
        """Unchecked values of a list; `item` reads one as an object."""
        value = self.value.get(name)
        if value is None:
            return
        if not isinstance(value, list):
            self.fail(name, "must be a list")
        for start in range(0, len(value), STEPS):
            if self._limit is not None:
                self._limit.look()
            yield from value[start : start + STEPS]

    def item(self, name: str, index: int) -> Reader:
        value, at = self.value[name][index], f"{name}[{index}]"
        if not isinstance(value, dict):
            self.fail(at, "must be an object")
        return Reader(value, self.param(at), self._limit)

    def only(self, *known: str) -> None:
        for name in self.value:
            if name not in known:
                near = [] if len(name) > _LONGEST_HINT else difflib.get_close_matches(name, known, n=1)
                self.refuse(name, f"did you mean {near[0]!r}?" if near else "")

    def refuse(self, name: str, hint: str = "") -> NoReturn:
        param = self.param(name)
        raise InvalidRequest(f"unknown field {param!r:.80}{hint and '; ' + hint}.", param=param)


def _range(value: float, minimum: float, maximum: float) -> str:
    if maximum < MAX_INTEGER:
        return f"between {minimum} and {maximum}"
    return f"at least {minimum}" if value < minimum else f"at most {maximum}"


def never() -> bool:
    return False


class ReadLimit:
    """CPU time limit by length of the body. For one thread.

    `rests`: sleep for the GIL; never on the event loop.
    """

    def __init__(self, num_bytes: int, has_ended: Callable[[], bool] = never, *, rests: bool = False) -> None:
        self._seconds = BASE_SECONDS + SECONDS_PER_MEGABYTE * num_bytes / 1e6
        self._deadline: float | None = None
        self._has_ended = has_ended
        self._steps = 0
        self._rests = rests
        self._rested = time.perf_counter()

    def step(self) -> None:
        """Count one item. Raises InvalidRequest over the limit, Overloaded if the request has ended."""
        self._steps += 1
        if self._steps % STEPS == 0:
            self.look()

    def look(self) -> None:
        self.check()
        if self._rests and time.perf_counter() - self._rested > _WORK_SECONDS:
            time.sleep(_REST_SECONDS)
            self._rested = time.perf_counter()

    def check(self) -> None:
        if self._has_ended():
            raise Overloaded("the request has ended")
        now = time.thread_time()
        if self._deadline is None:
            self._deadline = now + self._seconds
        elif now > self._deadline:
            message = f"The body could not be read: it took longer than {self._seconds:.1f} s."
            raise InvalidRequest(message, code="body_not_read")
