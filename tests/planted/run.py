"""Plants one bug after the other in a copy of the tree, and runs the tests that are to catch it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results.json"
# Time limit of one test, and how many times that a whole run may take. A run over its limit counts as caught.
SECONDS, TIMES = 60, 10
FOLDERS = ("agentcache", "benchmarks", "cli", "metal_kernels", "server", "tests", "training")
FILES = ("pyproject.toml", "README.md")
# A random test that fails is not made smaller, and tries the same examples in every run.
PROFILE = """
from hypothesis import Phase
settings.register_profile(
    "planted",
    settings.get_profile("agentcache"),
    phases=[Phase.explicit, Phase.generate],
    derandomize=True,
    database=None,
)
settings.load_profile("planted")
"""


@dataclass(frozen=True)
class Bug:
    """A small change of the source that makes it wrong.

    Args:
        name: of the bug.
        wing: name of the file that lists it.
        file: that it changes, relative to the repository.
        was: text that occurs once in it.
        now: what stands there instead.
        idea: what goes wrong.
        tests: files, or tests in files by pytest's names, of which one is to fail.
    """

    name: str
    wing: str
    file: str
    was: str
    now: str
    idea: str
    tests: tuple[str, ...]

    def planted_in(self, text: str) -> str:
        """The source with the bug. Raises ValueError unless it applies to exactly one place."""
        if text.count(self.was) != 1:
            raise ValueError(f"{self.name}: {text.count(self.was)} places in {self.file} are as it says, not 1")
        return text.replace(self.was, self.now)


@dataclass(frozen=True)
class Outcome:
    """What came of the tests.

    Args:
        result: caught, hung (which is caught, too), missed, or broken: the tests could not be run.
        by: the test that failed.
        seconds: that the run took.
    """

    result: str
    by: str = ""
    seconds: float = 0.0


def bugs() -> list[Bug]:
    """All bugs, wing by wing."""
    found = []
    for path in sorted(FOLDER.glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["bug"]:
            found.append(Bug(wing=path.stem, **{**entry, "tests": tuple(entry["tests"])}))
    return found


@contextmanager
def copy_of_tree() -> Iterator[Path]:
    """A folder with all that tests need, links between packages included."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        root = Path(folder)
        for name in FOLDERS:
            shutil.copytree(ROOT / name, root / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        for name in FILES:
            shutil.copy2(ROOT / name, root / name)
        if (ROOT / "docs").is_dir():
            shutil.copytree(ROOT / "docs", root / "docs")
        with (root / "tests/conftest.py").open("a") as conftest:
            conftest.write(PROFILE)
        yield root


def run(chosen: Iterable[Bug]) -> None:
    """Plant each of the bugs; results are written as they come, those of other bugs stay."""
    with copy_of_tree() as root:
        for bug in chosen:
            path = root / bug.file
            text = path.read_text()
            path.write_text(bug.planted_in(text))
            try:
                outcome = _test(root, bug)
            finally:
                path.write_text(text)
            print(f"{bug.name:36} {outcome.result:8} {outcome.by}", flush=True)
            write_results(read_results() | {bug.name: outcome})


def _test(root: Path, bug: Bug) -> Outcome:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", "--tb=line"]
    command += ["--timeout", str(SECONDS)]
    environment = os.environ | {"PYTHONPATH": str(root)}
    began = time.monotonic()
    process = subprocess.Popen(
        [*command, *bug.tests],
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMES * SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return Outcome("hung", seconds=TIMES * SECONDS)
    failed = [
        line.split(" - ")[0] for line in output.splitlines() if line.startswith(("FAILED tests/", "ERROR tests/"))
    ]
    by = failed[0].split(" ", 1)[1] if failed else ""
    result = {0: "missed", 1: "caught"}.get(process.returncode, "caught" if by else "broken")
    if result == "broken":
        print(output[-2000:])
    return Outcome(result, by, round(time.monotonic() - began, 1))


def read_results() -> dict[str, Outcome]:
    if not RESULTS.exists():
        return {}
    return {name: Outcome(**each) for name, each in json.loads(RESULTS.read_text()).items()}


def write_results(outcomes: dict[str, Outcome]) -> None:
    known = [bug.name for bug in bugs()]
    ordered = {name: asdict(outcomes[name]) for name in known if name in outcomes}
    fresh = RESULTS.with_suffix(f".{os.getpid()}")  # several runs may write
    fresh.write_text(json.dumps(ordered, indent=1) + "\n")
    fresh.replace(RESULTS)


def exists(test: str) -> bool:
    """Whether there is the file, and the function in it if `test` names one."""
    name, _, function = test.partition("::")
    path = ROOT / name
    return path.is_file() and f"def {function.partition('[')[0]}" in path.read_text()


def misplaced() -> list[str]:
    """What is wrong with entries that the source has left behind: a sentence each."""
    said, names = [], set[str]()
    for bug in bugs():
        if bug.name in names:
            said.append(f"{bug.name}: there are two of that name")
        names.add(bug.name)
        try:
            bug.planted_in((ROOT / bug.file).read_text())
        except (ValueError, OSError) as error:
            said.append(str(error))
        said += [f"{bug.name}: there is no {test}" for test in bug.tests if not exists(test)]
    return said
