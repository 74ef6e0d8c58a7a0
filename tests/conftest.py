"""Fixtures for all tests."""

from __future__ import annotations

import gc
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.alone import in_turn
from tests.kept_children import children_kept, children_of_its_own
from tests.mlx_headers import precompile

if TYPE_CHECKING:
    from agentcache.text.tokenizer import Tokenizer

ModelFolder = Callable[..., Path]
StyledTokenizer = Callable[[str], "Tokenizer"]

# No deadlines: machines are shared and noisy. In CI the same examples every time, so that green stays green.
# `make test` takes a tenth of the examples of "thorough", which `make test-all` asks for (--hypothesis-profile).
for _name, _examples in {"agentcache": 10, "thorough": 100}.items():
    settings.register_profile(
        _name,
        max_examples=_examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize="CI" in os.environ,
    )
settings.load_profile("agentcache")


# Tests know what 4 bits give, and random models need more: what is measured at a start has tests of its own.
os.environ.setdefault("AGENTCACHE_KV", "4t")

ROOT = Path(__file__).resolve().parent.parent
RAM_DISK = Path("/dev/shm")


@pytest.fixture
def set_free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Have every disk, of 10^12 bytes, say that so many are free."""

    def set_free(num_bytes: int) -> None:
        status = SimpleNamespace(f_bavail=num_bytes, f_bfree=num_bytes, f_frsize=1, f_blocks=10**12)
        for name in ("statvfs", "fstatvfs"):
            monkeypatch.setattr(os, name, lambda path: status)

    return set_free


@pytest.fixture
def ram_path(tmp_path: Path) -> Iterator[Path]:
    """A folder whose files are flushed at once, where there is room: for hundreds of runs none of which loses power."""
    if not RAM_DISK.is_dir() or shutil.disk_usage(RAM_DISK).free < 256 << 20:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=RAM_DISK) as folder:
        yield Path(folder)


def _schedule(item: pytest.Item | None) -> None:
    """On Linux, run as a batch job, which does not lose its core to each thread that it wakes.

    MLX wakes its worker for every few operations; of the tests' CPU time that takes a quarter. Servers and those who
    measure how quick they are run as users run them.
    """
    if hasattr(os, "SCHED_BATCH"):
        ordinary = item is not None and item.path.parent.name in ("live", "benchmarks")
        with suppress(OSError):  # some containers allow no choice
            os.sched_setscheduler(0, os.SCHED_OTHER if ordinary else os.SCHED_BATCH, os.sched_param(0))


_schedule(None)


def pytest_configure(config: pytest.Config) -> None:
    """In the process that starts the others: headers are compiled before they have collected."""
    if hasattr(config, "workerinput"):
        return
    config.pluginmanager.register(NamesFailures(config))
    if process := precompile():
        config.add_cleanup(process.wait)


class NamesFailures:
    """Print the name of a failed test at once: a run that is stopped prints no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and (terminal := self._config.pluginmanager.get_plugin("terminalreporter")):
            terminal.write_line(f"\nFAILED {report.nodeid} ({report.when})")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Outermost: no time limit counts how long a test waits for its turn."""
    with in_turn(item):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _schedule(item)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Of several processes each begins with a share of the tests, which the others then find compiled."""
    worker = getattr(session.config, "workerinput", None)
    if worker is None:
        return
    gc.disable()  # what is collected stays: looking for garbage in it would take longer than to make it
    folders = [Path(name) for name in session.config.args if Path(name).is_dir()]
    files = sorted({file.resolve() for folder in folders for file in folder.rglob("test_*.py")})
    number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    for file in files[number::count]:
        with suppress(Exception, pytest.skip.Exception):  # comes up again where the test is collected
            import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))


# What MLX's CUDA back end cannot do (0.32.4): some packed products; ropes of few pairs for many rows.
_LACKS = ("No implementation for problem shape", "&params) failed: invalid argument")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """A test of what MLX lacks on a device is skipped, and says what that is."""
    try:
        return (yield)
    except RuntimeError as error:
        if any(lack in str(error) for lack in _LACKS):
            pytest.skip(f"MLX on CUDA: {error!s:.120}")
        raise


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest test first: begun last, it would keep one process busy while the other has nothing left to do."""
    items.sort(key=lambda item: item.path.name != "test_soak.py")


def pytest_collection_finish() -> None:
    """Thousands of tests and all imports stay to the end: collections of garbage need not go through them each time."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def kept_children() -> Iterator[None]:
    with children_kept():
        yield


@pytest.fixture
def own_children(monkeypatch: pytest.MonkeyPatch) -> None:
    children_of_its_own(monkeypatch)


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """MLX's operations compute everything, also where this device has kernels."""
    from agentcache.models import fused  # imports mlx; plain-Python tests stay quick without it

    def forget() -> None:
        fused.mode.cache_clear()
        fused.why_none.cache_clear()

    with monkeypatch.context() as patch:
        patch.setenv(fused.VARIABLE, fused.Mode.OFF)
        forget()
        yield
    forget()


@pytest.fixture(scope="session")
def files_known() -> Iterator[None]:
    """What a load finds out about the same files is found out once a session."""
    from tests.proven import examine_once, prove_once  # imports mlx; plain-Python tests stay quick without it

    with pytest.MonkeyPatch.context() as patch:
        prove_once(patch)
        examine_once(patch)
        yield


@pytest.fixture(scope="session")
def model_folder(files_known: None, tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """`model_folder(architecture, tokenizer="byte_bpe", seed=0, **config)`: a tiny model's folder, made once a session.

    The folder is shared: copy it before changing it.
    """
    made: dict[str, Path] = {}

    def make(architecture: str, tokenizer: str = "byte_bpe", seed: int = 0, **overrides: Any) -> Path:
        from tests.tiny import tiny_model  # imports mlx; plain-Python tests stay quick without it

        key = json.dumps([architecture, tokenizer, seed, overrides], sort_keys=True)
        if key not in made:
            folder = tmp_path_factory.mktemp(architecture)
            made[key] = tiny_model(folder, architecture, tokenizer, seed, **overrides)
        return made[key]

    return make


@pytest.fixture(scope="session")
def styled_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> StyledTokenizer:
    """`styled_tokenizer("gemma")`: a tokenizer of a kind that tokenizers_factory lists, made once a session."""

    @cache
    def load(style: str) -> Tokenizer:
        from agentcache.text.tokenizer import Tokenizer  # imports mlx-lm, too
        from tests.tokenizers_factory import STYLES, STYLES_WITHOUT_TEMPLATE

        write = (STYLES | STYLES_WITHOUT_TEMPLATE)[style]
        return Tokenizer.load(write(tmp_path_factory.mktemp(style)))

    return load


@pytest.fixture(scope="session")
def chatml(styled_tokenizer: StyledTokenizer) -> Tokenizer:
    """Byte-level BPE with ChatML, for what does not depend on the kind."""
    return styled_tokenizer("byte_bpe")
