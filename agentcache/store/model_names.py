"""The names of one model in a cache folder.

A model's folder of agents, its manifests and the roots of its chains of blocks have one name: the model's identity,
or for older folders a digest that covered more, such as the chat template. ``agents/<name[:16]>/model`` is a label: it
says whose the folder is by identity, so that it is still found when what the older name covered has changed. A label
that is gone or unreadable is written anew where the name follows from the model's content.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentcache.errors import BrokenInvariant
from agentcache.names import is_name
from agentcache.store.atomic import Fault, replace_file
from agentcache.store.cache_files import CacheFiles
from agentcache.store.disk_usage import AGENTS

LABEL = "model"  # not *.json: earlier versions would take that for a manifest
_VERSION = 1
_MAX_BYTES = 1 << 16

log = logging.getLogger("agentcache.store")


@dataclass(frozen=True)
class ModelNames:
    """What a model is called.

    Args:
        current: names its new blocks and agents, 32 hex digits.
        former: names of other folders with agents of the same model; blocks by these names are not used.
        others: further names that mean this model, without a folder.
        identity: of the model by its content, for labels and archives; empty where no folder is to be labelled.
    """

    current: str
    former: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    identity: str = ""

    def __post_init__(self) -> None:
        # Agents of a former folder are removed once the current one has them: the two must never be the same.
        folders = [folder_of(name) for name in (self.current, *self.former)]
        if len(set(folders)) != len(folders):
            raise BrokenInvariant(f"a folder of agents has two names: {', '.join(folders)}")

    @classmethod
    def of(cls, names: ModelNames | str) -> ModelNames:
        """The names themselves, or those of a model with only one."""
        return cls(names) if isinstance(names, str) else names

    def mean(self, name: str, identity: str = "") -> bool:
        """Whether this is the model of manifests, or of an archive, with that name.

        Args:
            identity: what an archive says beside the name; empty where it says nothing.
        """
        return name in (self.current, *self.former, *self.others) or (identity != "" and identity == self.identity)


@dataclass(frozen=True)
class _Label:
    """Whose a folder of agents is.

    Args:
        name: in the folder's manifests.
        identity: of the model.
        order: among the folders of this model; the first is the one in use.
    """

    name: str
    identity: str
    order: int


def folder_of(name: str) -> str:
    """The name of the folder of agents of the model with this name."""
    return name[:16]


def find_names(cache_dir: Path, identity: str, first: Sequence[str]) -> ModelNames:
    """What a model is called in a cache folder, which may not be there. Only reads.

    Args:
        identity, first: of the model by its content, as in `ModelFingerprints`.
    """
    files = CacheFiles(cache_dir.resolve())
    labels = [label for label in _labels(files) if label.identity == identity]
    labelled = [label.name for label in sorted(labels, key=lambda label: label.order)]
    unlabelled = [name for name in (*first, identity) if _has_agents(files, name)]
    names = list(dict.fromkeys((*labelled, *unlabelled)))
    current = names[0] if names else identity
    others = tuple(dict.fromkeys(name for name in (*first, identity) if name not in (current, *names)))
    return ModelNames(current, tuple(names[1:]), others, identity)


def write_labels(files: CacheFiles, names: ModelNames, fault: Fault) -> None:
    """Label the folders of the model that have no label; by the holder of the folder's lock.

    What cannot be written is written at a later start.
    """
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
            replace_file(files, path, _encode(_Label(name, names.identity, order)), LABEL, fault)
        except OSError as error:
            log.warning("cannot write %s: %s", path, error)
            return  # later ones would get an order before it


def identity_of(files: CacheFiles, folder: str) -> str:
    """The identity that the label of a folder of agents tells; empty where there is none."""
    return next((label.identity for label in _labels(files) if folder_of(label.name) == folder), "")


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
    except OSError:  # a new cache folder; of one that cannot be read, opening the store says so
        return ()


def _has_agents(files: CacheFiles, name: str) -> bool:
    try:
        return any(entry.endswith(".json") for entry, _ in files.list_folder(files.root / AGENTS / folder_of(name)))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # it may have some: opening the store says why they cannot be read
        return True


def _encode(label: _Label) -> bytes:
    fields = {"version": _VERSION, **asdict(label)}
    return json.dumps({**fields, "checksum": _checksum(fields)}, indent=1).encode()


def _decode(data: bytes) -> _Label:
    """Raises ValueError, LookupError or TypeError for anything but what `_encode` has written."""
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
