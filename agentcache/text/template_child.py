"""Renders chat templates in a confined process; imports only the standard library, jinja2 and `confined_child`.

Reads marshalled (template, seals, variables, maximum bytes); answers `RenderOutcome` and UTF-8.
"""

from __future__ import annotations

import json
import marshal
import re
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.optimizer
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import SandboxedEnvironment

from agentcache.system.confined_child import serve


class RenderOutcome:
    """Kind of a reply: text, its size, or error message."""

    TEXT = b"t"
    TOO_LONG = b"l"
    SYNTAX = b"s"
    REFUSED = b"r"


# Templates may scan the conversation for each message.
SECONDS_PER_BYTE = 1 / (32 << 10)


def main() -> None:
    serve(_answer, SECONDS_PER_BYTE)


def _answer(request: list[bytes]) -> tuple[bytes, bytes]:
    try:
        template, seals, variables, max_bytes = marshal.loads(request.pop())
        text = _compiled(template, seals).render(**variables).encode("utf-8", "surrogatepass")
    except MemoryError:  # `serve` handles it
        raise
    except RecursionError:
        return RenderOutcome.REFUSED, b"they are nested too deeply"
    except jinja2.TemplateSyntaxError as error:
        return RenderOutcome.SYNTAX, _message(error)
    except Exception as error:  # templates may raise anything
        return RenderOutcome.REFUSED, _message(error)
    return (RenderOutcome.TEXT, text) if len(text) <= max_bytes else (RenderOutcome.TOO_LONG, str(len(text)).encode())


def _message(error: Exception) -> bytes:
    return str(error)[:2000].encode("utf-8", "backslashreplace")


# As in transformers, but templates may change lists and dicts, which are copies.


@lru_cache(maxsize=16)
def _compiled(template: str, seals: bytes) -> jinja2.Template:
    environment = SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    tree = environment.parse(template)
    jinja2.optimizer.optimize(tree, environment)  # "a" + "b" is one constant
    _seal(tree, *marshal.loads(seals))
    return environment.from_string(tree)


def _seal(
    tree: jinja2.nodes.Node,
    seals: tuple[tuple[str, str], ...],
    openings: tuple[str, ...],
    opened: str,
    closings: tuple[str, ...],
    closed: str,
) -> None:
    seal_of = dict(seals)
    control = re.compile("|".join(map(re.escape, sorted(seal_of, key=len, reverse=True))) or r"(?!)")

    def sealed(text: str) -> str:
        text = control.sub(lambda found: seal_of[found[0]], text)
        text += opened if text.endswith(openings) else ""
        return (closed if text.startswith(closings) else "") + text

    for data in tree.find_all(jinja2.nodes.TemplateData):
        data.data = sealed(data.data)
    for const in tree.find_all(jinja2.nodes.Const):
        if isinstance(const.value, str):
            const.value = sealed(const.value)


class _Generation(jinja2.ext.Extension):
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
    # No HTML escapes; generators become lists.
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=list
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class _Dict:
    """`dict` without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(jinja2.utils.Namespace):
    """`namespace` without underscore names."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template's name may be `self`
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
