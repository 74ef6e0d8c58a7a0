"""Sets and reverts values in other programs' JSON or TOML settings; TOML comments and order stay."""

from __future__ import annotations

import copy
import json
import os
import stat
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from agentcache.errors import AgentCacheError
from agentcache.system.durable import sync, sync_path

Path_ = tuple[str, ...]
_ABSENT = object()


class UnreadableSettings(AgentCacheError):
    """A settings file is invalid."""


@dataclass(frozen=True)
class Value:
    """One setting. `adds`: `value` has items for the user's list; `is_default`: the user's value wins; `ignores`: keys
    that the program changes.
    """

    path: Path_
    value: Any
    adds: bool = False
    is_default: bool = False
    ignores: tuple[str, ...] = ()


@dataclass(frozen=True)
class Change:
    """A planned change. `before` is None without a file, `after` to delete it, `note` after an undo; `kept`: settings
    changed since the note.
    """

    file: Path
    before: str | None
    after: str | None
    note: dict[str, Any] | None
    kept: tuple[str, ...] = ()


def put_in(file: Path, values: Sequence[Value], note: Mapping[str, Any] | None) -> Change:
    """Plan to set `values` and revert the rest of `note`. Raises UnreadableSettings."""
    file = file.resolve()
    if note is not None and note["file"] != str(file):
        raise UnreadableSettings(f"{note['file']} was changed before: revert that first, with --undo")
    before = _read(file)
    document = _parsed(file, before)
    known, wanted = _noted(note), {each.path for each in values}
    _take_back(file, document, {path: entry for path, entry in known.items() if path not in wanted})
    entries = []
    for each in values:
        current = _get(document, each.path)
        if each.adds:
            entries += _add_items(file, document, each, known.get(each.path))
            continue
        if each.is_default and each.path not in known and _is_decided(document, each.path):
            continue
        if each.path in known and _equal(current, known[each.path]["value"], each.ignores):
            entries.append(known[each.path] | {"value": each.value})
        else:
            entries.append(_entry(each, current, _num_tables(document, each.path)))
        if not _equal(current, each.value, each.ignores):
            _set(file, document, each.path, each.value)
    existed = bool(note["existed"]) if note is not None else before is not None
    return Change(file, before, _text(file, document), {"file": str(file), "existed": existed, "set": entries})


def take_out(note: Mapping[str, Any]) -> Change:
    """Plan to revert a note. Raises UnreadableSettings."""
    file = Path(note["file"])
    before = _read(file)
    document = _parsed(file, before)
    kept = _take_back(file, document, _noted(note))
    after = None if before is None or (not document and not note["existed"]) else _text(file, document)
    return Change(file, before, after, None, tuple(kept))


def write(change: Change) -> None:
    """Replace the file atomically; a new one has mode 0600."""
    if change.after is None:
        change.file.unlink(missing_ok=True)
        return
    change.file.parent.mkdir(parents=True, exist_ok=True)
    mode = stat.S_IMODE(change.file.stat().st_mode) if change.before is not None else 0o600
    temp = change.file.with_name(f".{change.file.name}.{os.getpid()}.tmp")
    try:
        with open(os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8", newline="") as out:
            os.fchmod(out.fileno(), mode)
            out.write(change.after)
            out.flush()
            sync(out.fileno(), covered=True)
        os.replace(temp, change.file)
        sync_path(change.file.parent)
    finally:
        temp.unlink(missing_ok=True)


def _take_back(file: Path, document: MutableMapping[str, Any], entries: Mapping[Path_, dict[str, Any]]) -> list[str]:
    """Revert entries, last first; return those changed since, which stay."""
    kept: list[str] = []
    for path, entry in reversed(list(entries.items())):
        if entry.get("adds"):
            kept += [] if _take_items(file, document, path, entry) else [".".join(path)]
        elif not _equal(_get(document, path), entry["value"], entry.get("ignores", ())):
            kept.append(".".join(path))
        elif "before" in entry:
            _set(file, document, path, entry["before"])
        else:
            _remove(document, path, entry["tables"])
    return kept


def _add_items(
    file: Path, document: MutableMapping[str, Any], wanted: Value, earlier: dict[str, Any] | None
) -> list[dict[str, Any]]:
    if earlier is not None:
        _take_items(file, document, wanted.path, earlier)
    current: Any = _get(document, wanted.path)
    if current is not _ABSENT and not isinstance(current, list):
        raise UnreadableSettings(f"{file}: {'.'.join(wanted.path)} is no list")
    own: list[Any] = list(current) if isinstance(current, list) else []
    added = [item for item in wanted.value if item not in own]
    if not added:
        return []
    entry = _entry(Value(wanted.path, added), current, _num_tables(document, wanted.path))
    _set(file, document, wanted.path, own + added)
    return [entry | {"adds": True}]


def _take_items(file: Path, document: MutableMapping[str, Any], path: Path_, entry: Mapping[str, Any]) -> bool:
    """Remove added items; return whether the setting is still a list."""
    current = _get(document, path)
    if not isinstance(current, list):
        return False
    left = [item for item in current if item not in entry["value"]]
    if left or "before" in entry:
        _set(file, document, path, left)
    else:
        _remove(document, path, entry["tables"])
    return True


def _read(file: Path) -> str | None:
    try:
        return file.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableSettings(f"{file} cannot be read: {error}") from error


def _parsed(file: Path, text: str | None) -> MutableMapping[str, Any]:
    is_toml = file.suffix == ".toml"
    try:
        document: Any = tomlkit.parse(text or "") if is_toml else json.loads(text or "{}")
    except (TOMLKitError, ValueError, RecursionError) as error:
        raise UnreadableSettings(f"{file} cannot be parsed: {error}") from error
    if not isinstance(document, MutableMapping):
        raise UnreadableSettings(f"{file} is not a table of settings")
    return document


def _text(file: Path, document: MutableMapping[str, Any]) -> str:
    if file.suffix == ".toml":
        return tomlkit.dumps(document)
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _get(document: Any, path: Path_) -> Any:
    for key in path:
        if not isinstance(document, Mapping) or key not in document:
            return _ABSENT
        document = document[key]
    return document


def _set(file: Path, document: MutableMapping[str, Any], path: Path_, value: Any) -> None:
    for depth, key in enumerate(path[:-1]):
        if key not in document:
            # A table of tables needs no heading.
            document[key] = tomlkit.table(is_super_table=depth < len(path) - 2) if file.suffix == ".toml" else {}
        document = document[key]
        if not isinstance(document, MutableMapping):
            raise UnreadableSettings(f"{file}: {'.'.join(path[: depth + 1])} is no table")
    document[path[-1]] = copy.deepcopy(value)


def _is_decided(document: Any, path: Path_) -> bool:
    return any(
        (found := _get(document, path[:depth])) is not _ABSENT
        and (depth == len(path) or not isinstance(found, Mapping))
        for depth in range(1, len(path) + 1)
    )


def _num_tables(document: Any, path: Path_) -> int:
    return sum(_get(document, path[:depth]) is not _ABSENT for depth in range(1, len(path)))


def _remove(document: MutableMapping[str, Any], path: Path_, num_tables: int) -> None:
    """Delete the setting, and empty tables below the outermost `num_tables`."""
    if len(path) > 1:
        inner = document[path[0]]
        _remove(inner, path[1:], num_tables - 1)
        if inner or num_tables > 0:
            return
    del document[path[0]]


def _equal(current: Any, value: Any, ignored: Sequence[str] = ()) -> bool:
    if current is _ABSENT:
        return False
    plain = getattr(current, "unwrap", lambda: current)()
    if ignored and isinstance(plain, Mapping):
        plain, value = ({key: each[key] for key in each if key not in ignored} for each in (plain, value))
    return bool(plain == value)


def _entry(value: Value, replaced: Any, num_tables: int) -> dict[str, Any]:
    entry = {"path": list(value.path), "value": value.value, "tables": num_tables}
    if value.ignores:
        entry["ignores"] = list(value.ignores)
    if replaced is not _ABSENT:
        entry["before"] = getattr(replaced, "unwrap", lambda: replaced)()
    return entry


def _noted(note: Mapping[str, Any] | None) -> dict[Path_, dict[str, Any]]:
    return {} if note is None else {tuple(entry["path"]): entry for entry in note["set"]}
