"""Ways to keep a file of the cache folder from being read, and to take them back."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentcache.store.cache_files import CacheFiles
from agentcache.store.manifest import _signed

NOBODY = 65534
CAUSES = (errno.EACCES, errno.EPERM, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ELOOP)
Cause = int | type[MemoryError]
is_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def raise_cause(cause: Cause, path: Path | str) -> None:
    if isinstance(cause, int):
        raise OSError(cause, os.strerror(cause), str(path))
    raise cause


@contextmanager
def unreadable(causes: Mapping[Path, Cause]) -> Iterator[None]:
    """Meanwhile these files cannot be opened for reading, and these folders not be listed."""

    def refusing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(files: CacheFiles, path: Path | str, *args: Any) -> Any:
            if (cause := causes.get(Path(path))) is not None:
                raise_cause(cause, path)
            return real(files, path, *args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("open_regular", "list_folder"):
            patch.setattr(CacheFiles, name, refusing(getattr(CacheFiles, name)))
        yield


def make_newer(manifest: Path) -> bytes:
    """Have a manifest be one of a later release: signed, of the next format version, with a new field. What it was."""
    before = manifest.read_bytes()
    manifest.write_bytes(_signed(json.loads(before) | {"format_version": "3", "more": [1]}))
    return before


def as_user(user: int, work: Callable[[], None]) -> None:
    """Run `work` in a child process of another user; what it raises fails the test."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            work()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "see what the child has printed"


def give(user: int, *paths: Path) -> None:
    """Have files and folders, with all below these, belong to a user."""
    for path in paths:
        for each in (path, *path.rglob("*")):
            os.chown(each, user, user, follow_symlinks=False)
