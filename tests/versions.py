"""What the compat modules say of library versions, against pyproject.toml and the installed libraries."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def check_versions(read: Mapping[str, str]) -> None:
    """The source of each library was read in the newest minor version that pyproject.toml allows and tests run on."""
    requirements = PROJECT["project"]["dependencies"]
    for name, text in read.items():
        [requirement] = [each for each in requirements if re.split(r"[\[<>=]", each)[0] == name]
        allowed = re.fullmatch(r"[\w.-]+>=([\d.]+),<([\d.]+)", requirement)
        assert allowed is not None, f"{requirement}: give {name} a lower and an upper bound"
        lowest, end = (numbers(group) for group in allowed.groups())
        major, minor = numbers(text)[:2]
        next_minor = (major, minor + 1)
        assert end == next_minor, f"{requirement}: the end is not the minor version after {text}, which was read"
        installed = numbers(version(name))
        assert lowest <= installed < end, f"{name} {version(name)} is installed, and pyproject.toml says {requirement}"
        assert installed[:2] <= (major, minor), f"read the source of {name} {version(name)}, then change READ"
