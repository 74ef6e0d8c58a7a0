"""The names of models in a cache folder, and the precision of their KV.

A name is the model's identity or, in older folders, another digest; it is in manifests and chain roots. The label
``agents/<name[:16]>/model`` maps a folder to an identity.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentcache.api.names import is_name
from agentcache.errors import BrokenInvariant, FileUnavailable
from agentcache.kv.packing import Precision
from agentcache.store.cache_files import CacheFiles, WrongFile
from agentcache.store.disk_usage import AGENTS, QUARANTINE
from agentcache.store.writing import Fault, as_store_error, replace_file

LABEL = "model"  # earlier versions read *.json as manifests
PRECISION_FILE = "precision.json"
_VERSION = 1
_MAX_BYTES = 1 << 16
_PRECISION_VERSION = 2  # of the file; since keys by channel. Models in older files are measured again
_MAX_PRECISION_BYTES = 1 << 20

log = logging.getLogger("agentcache.store")


@dataclass(frozen=True)
class ModelNames:
    """The names of one model."""

    current: str  # for new blocks and agents, 32 hex digits
    former: tuple[str, ...] = ()  # of other folders with its agents
    others: tuple[str, ...] = ()  # without a folder
    identity: str = ""  # of its content; empty to write no labels

    def __post_init__(self) -> None:
        # The folders must differ: former agents are deleted once saved under the current name.
        folders = [folder_of(name) for name in (self.current, *self.former)]
        if len(set(folders)) != len(folders):
            raise BrokenInvariant(f"a folder of agents has two names: {', '.join(folders)}")

    @classmethod
    def of(cls, names: ModelNames | str) -> ModelNames:
        return cls(names) if isinstance(names, str) else names

    def mean(self, name: str, identity: str = "") -> bool:
        """Whether a manifest, or an archive with `identity`, is of this model."""
        return name in (self.current, *self.former, *self.others) or (identity != "" and identity == self.identity)


@dataclass(frozen=True)
class _Label:
    name: str
    identity: str
    order: int


def folder_of(name: str) -> str:
    return name[:16]


def find_names(cache_dir: Path, identity: str, first: Sequence[str]) -> ModelNames:
    """Find a model's names; the cache folder may not exist."""
    files = CacheFiles(cache_dir.resolve())
    labels = [label for label in _labels(files) if label.identity == identity]
    labelled = [label.name for label in sorted(labels, key=lambda label: label.order)]
    unlabelled = [name for name in (*first, identity) if _has_agents(files, name)]
    names = list(dict.fromkeys((*labelled, *unlabelled)))
    current = names[0] if names else identity
    others = tuple(dict.fromkeys(name for name in (*first, identity) if name not in (current, *names)))
    return ModelNames(current, tuple(names[1:]), others, identity)


def write_labels(files: CacheFiles, names: ModelNames, fault: Fault) -> None:
    """Label folders, under the lock; a later start retries."""
    if not names.identity:
        return
    labels = {label.name: label for label in _labels(files) if label.identity == names.identity}
    order = max((label.order for label in labels.values()), default=0)
    for name in (names.current, *names.former):
        if name in labels:
            continue
        order += 1
        path = files.root / AGENTS / folder_of(name) / LABEL
        try:
            fields = {"version": _VERSION, **asdict(_Label(name, names.identity, order))}
            content = json.dumps({**fields, "checksum": _checksum(fields)}, indent=1)
            replace_file(files, path, content.encode(), LABEL, fault)
        except OSError as error:
            log.warning("cannot write %s: %s", path, error)
            return  # later labels must not get a lower order


def identity_of(files: CacheFiles, folder: str) -> str:
    return next((label.identity for label in _labels(files) if folder_of(label.name) == folder), "")


def read_precision(cache_dir: Path, fingerprint: str) -> Precision | None:
    """Return a model's precision, the same for all starts; None to measure it.

    Raises FileUnavailable: with another precision, all blocks would be lost.
    """
    try:
        return Precision.of(_read_precisions(cache_dir)[fingerprint])
    except (LookupError, TypeError, ValueError):
        return None


def write_precision(cache_dir: Path, fingerprint: str, precision: Precision, fault: Fault = lambda step: None) -> None:
    """Save a model's precision, under the lock. Raises StoreError, FileUnavailable."""
    if read_precision(cache_dir, fingerprint) == precision:
        return
    models = _read_precisions(cache_dir) | {fingerprint: precision.as_data()}
    fields = {"version": _PRECISION_VERSION, "models": models}
    content = json.dumps({**fields, "checksum": _checksum(fields)}, indent=1)
    root = cache_dir.resolve()
    with as_store_error(f"write {root / PRECISION_FILE}"):
        replace_file(CacheFiles(root), root / PRECISION_FILE, content.encode(), "precision", fault)


def _labels(files: CacheFiles) -> list[_Label]:
    labels = []
    for folder in _folders(files):
        try:
            label = _decode(files.read(files.root / AGENTS / folder / LABEL, _MAX_BYTES))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            log.warning("the label of %s/%s cannot be used: %s", AGENTS, folder, error)
            continue
        if folder_of(label.name) == folder:
            labels.append(label)
    return labels


def _folders(files: CacheFiles) -> Sequence[str]:
    try:
        return sorted(name for name, _ in files.list_folder(files.root / AGENTS))
    except OSError:  # opening the store reports it
        return ()


def _has_agents(files: CacheFiles, name: str) -> bool:
    try:
        entries = files.list_folder(files.root / AGENTS / folder_of(name))
        if any(entry.endswith(".json") for entry, _ in entries):
            return True
        # Earlier releases may have quarantined them all.
        return any(".json." in entry for entry, _ in files.list_folder(files.root / QUARANTINE))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # opening the store reports it
        return True


def _decode(data: bytes) -> _Label:
    fields: dict[str, Any] = json.loads(data)
    if not isinstance(fields, dict):
        raise TypeError("it is no object")
    if fields.pop("checksum") != _checksum(fields):
        raise ValueError("its checksum does not match its content")
    if (version := fields.pop("version")) != _VERSION:
        raise ValueError(f"it has version {version!r:.40}")
    label = _Label(**fields)
    if not is_name(label.name) or type(label.identity) is not str or type(label.order) is not int:
        raise TypeError("a field is of another type")
    return label


def _checksum(fields: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=16).hexdigest()


def _read_precisions(cache_dir: Path) -> dict[str, Any]:
    """Return `models` of the file `{"version": 2, "models": {fingerprint: entry}, "checksum": of all else}`.

    An entry is `{"layers": [[4, 4, true], [8, 4]], "divergence": 0.0031}`: bits of each layer's keys and values, and
    whether keys are by channel; divergence may be null.
    """
    path = cache_dir.resolve() / PRECISION_FILE
    try:
        fields = json.loads(CacheFiles(path.parent).read(path, _MAX_PRECISION_BYTES))
        if fields.pop("checksum") != _checksum(fields):
            return {}
        version, models = fields["version"], fields["models"]
    except (FileNotFoundError, WrongFile, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}
    except (OSError, MemoryError) as error:
        raise FileUnavailable(f"{path.parent}: {CacheFiles.describe(path, error)}") from error
    if type(version) is int and version > _PRECISION_VERSION:
        raise FileUnavailable(f"a newer release wrote {path}: version {version}, and {_PRECISION_VERSION} is known")
    return models if version == _PRECISION_VERSION and isinstance(models, dict) else {}
