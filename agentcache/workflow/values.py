"""A script's facts: drawn from lists by a seed, derived by rules, filled into texts as `{name}`.

Names of a `[draw.…]` table get different words, by the blake2b digests of seed, table and word: alike on all Python
versions. Later rules (`[[when]]`) override earlier ones; without `if` they always apply.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agentcache.errors import ConfigError
from agentcache.workflow.reader import check_known, check_unique, hint, read_strings, read_table, read_words

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


class Filler:
    """Fills values into texts, and records which are `used`. `known`: names with a value for some seed."""

    def __init__(self, seed: int, values: Mapping[str, str], known: Iterable[str], used: Iterable[str]) -> None:
        self.seed = seed
        self.values = dict(values)
        self._known = list(known)
        self._used = set(used)

    def fill(self, text: str, where: str) -> str:
        """Replace `{name}` by its value, `{{` and `}}` by single braces. Raises ConfigError."""
        return _BRACES.sub(lambda found: self._replace(found, where), text)

    def check_all_used(self) -> None:
        unused = [name for name in self._known if name not in self._used]
        if unused:
            raise ConfigError(f'the value "{unused[0]}" is used nowhere; write {{{unused[0]}}} where it belongs')

    def _replace(self, found: re.Match[str], where: str) -> str:
        if found[0] in ("{{", "}}"):
            return found[0][0]
        name = found[1]
        if name is None:
            raise ConfigError(f'{where} holds a lone "{found[0]}"; write {found[0] * 2} for a brace')
        self._used.add(name)
        if name not in self.values:
            raise ConfigError(f"{where} asks for {{{name}}}, {self._why_missing(name)}")
        return self.values[name]

    def _why_missing(self, name: str) -> str:
        if name in self._known:
            return f"which has no value with seed {self.seed}: no [[when]] that sets it applies"
        return f"an unknown value{hint(name, self._known)}; write {{{{ }}}} for braces"


@dataclass(frozen=True)
class _Rule:
    where: str
    conditions: Mapping[str, str]
    values: Mapping[str, str]


def read_values(draws: Mapping[str, Any], rules: list[Any], seed: int) -> Filler:
    """Draw and derive a script's values. Raises ConfigError."""
    drawn = dict(_draw_all(draws, seed))
    parsed = [_read_rule(entry, number) for number, entry in enumerate(rules, 1)]
    names = list(dict.fromkeys([*drawn, *(name for rule in parsed for name in rule.values)]))
    for rule in parsed:
        _check_rule(rule, drawn, names)
    used = set().union(*(_names_in(rule).union(rule.conditions) for rule in parsed))
    filler = Filler(seed, drawn, names, used)
    for rule in parsed:
        _apply(rule, filler)
    return filler


def _draw_all(draws: Mapping[str, Any], seed: int) -> Iterator[tuple[str, str]]:
    seen: set[str] = set()
    for table, entry in draws.items():
        where = f"[draw.{table}]"
        read = read_table(entry, where, required={"from": list, "as": list})
        words = read_words(read["from"], f'{where}: key "from"')
        names = read_words(read["as"], f'{where}: key "as"')
        _check_names(names, seen, f'{where}: key "as"')
        if len(names) > len(words):
            raise ConfigError(f"{where} has {len(words)} words for {len(names)} names; each needs a word of its own")
        yield from zip(names, sorted(words, key=lambda word: _order(seed, table, word)), strict=False)


def _check_names(names: list[str], seen: set[str], where: str) -> None:
    for name in names:
        _check_name(name, where)
        if name in seen:
            raise ConfigError(f'{where}: "{name}" is drawn twice')
        seen.add(name)


def _check_name(name: str, where: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(f'{where} holds "{name}"; a name has letters, digits and _ and begins with no digit')


def _order(seed: int, table: str, word: str) -> bytes:
    state = hashlib.blake2b(digest_size=16, person=b"agentcache.draw")
    for part in (str(seed), table, word):
        encoded = part.encode()
        state.update(len(encoded).to_bytes(8, "little") + encoded)
    return state.digest()


def _read_rule(entry: Any, number: int) -> _Rule:
    where = f"[[when]] {number}"
    read = read_table(entry, where, required={"then": dict}, optional={"if": dict})
    values = read_strings(read["then"], f'{where}: key "then"')
    for name in values:
        _check_name(name, f'{where}: key "then"')
    if not values:
        raise ConfigError(f'{where}: key "then" is empty')
    return _Rule(where, read_strings(read.get("if", {}), f'{where}: key "if"'), values)


def _check_rule(rule: _Rule, drawn: Mapping[str, str], names: list[str]) -> None:
    for name in (*rule.conditions, *_names_in(rule)):
        check_known(name, names, "value", rule.where)
    check_unique([*drawn, *rule.values], f'{rule.where}: key "then" (what is drawn keeps its value)')


def _names_in(rule: _Rule) -> set[str]:
    texts = (*rule.conditions.values(), *rule.values.values())
    return {found[1] for text in texts for found in _BRACES.finditer(text) if found[1]}


def _apply(rule: _Rule, filler: Filler) -> None:
    wanted = {name: filler.fill(text, f'{rule.where}: key "if"') for name, text in rule.conditions.items()}
    if all(filler.values.get(name) == text for name, text in wanted.items()):
        at = f'{rule.where}: key "then"'
        filler.values.update({name: filler.fill(text, at) for name, text in rule.values.items()})
