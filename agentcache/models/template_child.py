"""Renders chat templates in a process of its own, whose time and memory the kernel limits.

Run as a script by `template.py`, which sends requests to standard input and reads replies from standard output. It
imports nothing but the standard library and jinja2, so that it starts quickly and stays small.

A request is a length (8 bytes, little-endian) and as many bytes of `marshal`: (template, variables, largest reply in
bytes). A reply is a kind (1 byte, see `Reply`), a length (8 bytes) and as many bytes of UTF-8.
"""

from __future__ import annotations

import contextlib
import json
import marshal
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_SECONDS = 2.0  # per request
# What a request may take beside what the process has from the start, and for each byte that it sends.
MEMORY_BYTES = 96 << 20
MEMORY_PER_BYTE = 8


class Reply:
    """Kinds of replies: the text, how many bytes it would have, or why there is none."""

    TEXT = b"t"
    TOO_LONG = b"l"
    SYNTAX = b"s"
    REFUSED = b"r"
    MEMORY = b"m"


def main() -> None:
    """Answer requests until the other side is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # for the parent, which may still have to render; its end is seen below
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    own_memory = _address_space()
    while head := requests.read(8):
        request = requests.read(int.from_bytes(head, "little"))
        with _limits(own_memory and own_memory + MEMORY_BYTES + MEMORY_PER_BYTE * len(request)):
            kind, content = _answer(request)
        del request
        replies.write(kind + len(content).to_bytes(8, "little") + content)
        replies.flush()


@contextlib.contextmanager
def _limits(address_space: int) -> Iterator[None]:
    """The default action of the timer's signal ends the process, also in the middle of a call into C.

    An `address_space` of 0 is not limited: only Linux holds to it, and elsewhere the parent watches.
    """
    if address_space:
        resource.setrlimit(resource.RLIMIT_AS, (address_space, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


def _address_space() -> int:
    """Bytes of address space that this process has; 0 where the kernel does not tell."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _answer(request: bytes) -> tuple[bytes, bytes]:
    try:
        template, variables, max_bytes = marshal.loads(request)
        text = _compiled(template).render(**variables).encode("utf-8", "surrogatepass")
    except MemoryError:
        return Reply.MEMORY, b""
    except RecursionError:
        return Reply.REFUSED, b"they are nested too deeply"
    except jinja2.TemplateSyntaxError as error:
        return Reply.SYNTAX, _message(error)
    except Exception as error:  # whatever the template's own code comes to
        return Reply.REFUSED, _message(error)
    return (Reply.TEXT, text) if len(text) <= max_bytes else (Reply.TOO_LONG, str(len(text)).encode())


def _message(error: Exception) -> bytes:
    return str(error)[:2000].encode("utf-8", "backslashreplace")


# -- the environment, as transformers makes it ----------------------------------------------------------------------


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment.from_string(template)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks what the assistant says: here it means nothing."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Callable[[], str]) -> str:
        return caller()


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja's own, without escapes for HTML."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class _Dict:
    """`dict`, without what hangs on the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(jinja2.utils.Namespace):
    """`namespace`, without names that lead into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may call one of its names `self`
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"Chat templates cannot store underscore-prefixed attributes on a namespace, but got {name!r}. "
            "Please rename the attribute."
        )


if __name__ == "__main__":
    main()
