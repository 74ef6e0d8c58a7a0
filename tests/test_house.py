"""The shape of the repository: packages, links, and imports that only go down."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
LINKED = ("cli", "metal_kernels", "server")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONTRACTS: list[dict[str, Any]] = PROJECT["tool"]["importlinter"]["contracts"]


def modules_of(name: str) -> list[str]:
    """A module, or a package and all that is in it."""
    folder = ROOT.joinpath(*name.split("."))
    return [name, *(f"{name}.{path.stem}" for path in sorted(folder.glob("[!_]*.py")))]


[PLAIN] = [contract["source_modules"] for contract in CONTRACTS if contract["id"] == "plain"]
BLOCKER = """
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} must not be imported here")

sys.meta_path.insert(0, Blocker())
for module in {modules!r}:
    for name in [name for name in sys.modules if name.startswith("agentcache")]:
        del sys.modules[name]  # each as if it were the first
    try:
        importlib.import_module(module)
    except Exception as error:
        raise SystemExit(f"{{module}}: {{error!r}}")
"""


def test_packages_are_the_folders_with_an_init() -> None:
    folders = {ROOT / "agentcache"} | {ROOT / "agentcache" / name for name in LINKED}
    folders |= {path.parent for path in (ROOT / "agentcache").rglob("__init__.py")}
    names = {".".join(folder.relative_to(ROOT).parts) for folder in folders if (folder / "__init__.py").is_file()}
    assert sorted(names) == sorted(PROJECT["tool"]["setuptools"]["packages"])


def test_package_dir_names_every_linked_folder() -> None:
    expected = {"agentcache": "agentcache"} | {f"agentcache.{name}": name for name in LINKED}
    assert PROJECT["tool"]["setuptools"]["package-dir"] == expected


@pytest.mark.parametrize("name", LINKED)
def test_links_are_relative_and_resolve(name: str) -> None:
    link = ROOT / "agentcache" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..", name)
    assert link.resolve() == (ROOT / name).resolve()


@pytest.mark.parametrize("name", LINKED)
def test_linked_folders_are_flat(name: str) -> None:
    assert [path for path in (ROOT / name).iterdir() if path.is_dir() and path.name != "__pycache__"] == []


def test_package_data_patterns_match_every_data_file() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]
    shipped = {
        path
        for package, globs in patterns.items()
        for pattern in globs
        for path in ROOT.joinpath(*package.split(".")).glob(pattern)
    }
    folders = (ROOT / "agentcache", *(ROOT / "agentcache" / name for name in LINKED))
    present = {
        path
        for folder in folders
        for path in folder.rglob("*")
        # Another process may be writing bytecode, under a name of its own at first.
        if path.is_file() and path.suffix != ".py" and path.parent.name != "__pycache__"
    }
    assert shipped == present


def test_console_script_exists() -> None:
    module, _, function = PROJECT["project"]["scripts"]["agentcache"].partition(":")
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    assert f"def {function}(" in path.read_text()


# Where clients' text is handled, only this module reads and writes JSON; these others read and write the server's own.
JSON_READER = "agentcache/text/json_values.py"
OWN_JSON = {
    "agentcache/text/tokenizer.py": "tokenizer.json",
    "agentcache/text/encoder.py": "tokenizer.json",
    "agentcache/text/model_folder.py": "files of a model",
    "agentcache/text/template_child.py": "the filter `tojson`, in a process with limits",
    "agentcache/text/grammars/reply_grammar.py": "grammars as llguidance writes and reads them",
    "server/completion.py": "events of answers",
}
FOR_CLIENTS = (
    "server",
    "agentcache/gateway",
    "agentcache/engine",
    "agentcache/agents",
    "agentcache/text",
)


def sources(*folders: str, words: Sequence[str] = ("",)) -> list[tuple[str, ast.Module]]:
    """Path and syntax tree of each module; only of those that contain one of `words`."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    texts = [(str(path.relative_to(ROOT)), path.read_text()) for path in paths]
    return [(path, ast.parse(text)) for path, text in texts if any(word in text for word in words)]


def uses(tree: ast.Module, names: set[str]) -> set[str]:
    """Those of the dotted `names` that the module uses, or imports one by one."""
    last = {name.rpartition(".")[2] for name in names}
    used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in last}
    imported = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return names & (used | imported)


def test_one_reader_of_client_json() -> None:
    functions = ("load", "loads", "dump", "dumps", "JSONDecoder", "JSONEncoder", "scanner", "decoder", "encoder")
    forbidden = {f"json.{name}" for name in functions} | {"copy.deepcopy", "ast.parse", "pickle.loads"}
    found = {path: uses(tree, forbidden) for path, tree in sources(*FOR_CLIENTS)}
    assert {path for path, used in found.items() if used} == {JSON_READER, *OWN_JSON}


def test_no_pool_without_an_owner() -> None:
    """Threads of asyncio's pool and of executors hold up each other's work, and the end of the process."""
    forbidden = {
        "asyncio.to_thread",
        "concurrent.futures.ThreadPoolExecutor",
        "concurrent.futures.ProcessPoolExecutor",
        "starlette.concurrency.run_in_threadpool",
        "starlette.background.BackgroundTask",
        "anyio.to_thread",
    }
    for path, tree in sources("server", "agentcache/gateway"):
        methods = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not uses(tree, forbidden) and "run_in_executor" not in methods, path


def test_one_module_syncs() -> None:
    """What `fsync` leaves in a Mac's drive, `durable.sync` has the drive keep."""
    forbidden = {"os.fsync", "os.fdatasync", "os.sync", "fcntl.F_FULLFSYNC"}
    folders = ("agentcache", "cli", "server", "training", "benchmarks")
    words = [name.rpartition(".")[2] for name in forbidden - {"os.sync"}] + ["os.sync", "from os import"]
    found = {path: uses(tree, forbidden) for path, tree in sources(*folders, words=words)}
    counts_them = "benchmarks/durability.py"
    assert {path for path, used in found.items() if used} == {"agentcache/system/durable.py", counts_them}


@pytest.mark.slow
def test_import_contracts_hold() -> None:
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command; lint_imports_command()",
        "--no-cache",
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{len(CONTRACTS)} kept, 0 broken" in result.stdout


@pytest.mark.slow
def test_modules_are_named_in_strings_only_by_their_neighbours() -> None:
    """An import that is spelled as a string is seen by no contract, so none may cross from one floor to another."""
    crossing = [
        (str(path.relative_to(ROOT)), name)
        for package in ("agentcache", *(f"agentcache/{linked}" for linked in LINKED))
        for path in sorted((ROOT / package).rglob("*.py"))
        for name in modules_in_strings(path)
        if name.split(".")[1] != path.relative_to(ROOT).with_suffix("").parts[1]
    ]
    assert crossing == []


def modules_in_strings(path: Path) -> list[str]:
    """Modules of the package that a string names as a whole, loggers' names left out."""
    tree = ast.parse(path.read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    loggers = {id(name) for call in calls if ast.unparse(call.func).endswith("getLogger") for name in call.args}
    strings = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in loggers
    ]
    return [text for text in strings if re.fullmatch(r"agentcache(\.\w+)+", text) and is_module(text)]


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def test_the_wheel_holds_no_tools() -> None:
    assert {name.partition(".")[0] for name in PROJECT["tool"]["setuptools"]["packages"]} == {"agentcache"}
    runtime = {re.split(r"[\[>=]", requirement)[0] for requirement in PROJECT["project"]["dependencies"]}
    assert "matplotlib" not in runtime
    assert PROJECT["project"]["optional-dependencies"]["plots"] == ["matplotlib>=3.9"]


@pytest.mark.slow
def test_bookkeeping_and_files_run_without_mlx() -> None:
    modules = ["agentcache", *(module for name in PLAIN for module in modules_of(name))]
    assert len(modules) > 50
    script = BLOCKER.format(blocked=("mlx", "mlx_lm", "transformers"), modules=modules)
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_blocker_blocks() -> None:
    script = BLOCKER.format(blocked=("json",), modules=["json"])
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert "json must not be imported here" in result.stderr


# At the top of a module, or within a class there. Trees of all sources would take two seconds.
DEFINITION = re.compile(r"^(?:(?:class|def) (?P<name>\w+)|    (?:async )?(?:class|def) (?P<member>\w+))", re.MULTILINE)


def test_every_name_on_the_structure_page_exists() -> None:
    page = (ROOT / "docs" / "structure.md").read_text()
    folders = ("agentcache", "server", "cli", "metal_kernels")  # the last three are links in the first
    sources = {path: path.read_text() for folder in folders for path in ROOT.glob(f"{folder}/**/*.py")}
    owner, defined, members = "", set[str](), set[tuple[str, str]]()
    for match in DEFINITION.finditer("\n".join(sources.values())):
        if match["member"]:
            members.add((owner, match["member"]))
        else:
            defined.add(owner := match["name"])
    names = re.findall(r"`([A-Za-z_][\w./]*)`", page)
    assert len(names) > 50
    for name in names:
        if "/" in name or name.endswith((".py", ".toml")):
            assert any(ROOT.joinpath(base, name).exists() for base in ("", "agentcache")), name
        elif "." in name:
            owner, member = name.split(".")
            assert (owner, member) in members, name
        else:
            assert name in defined or (ROOT / "agentcache" / name).is_dir(), name


def test_the_distribution_has_its_own_name() -> None:
    """`agentcache` on PyPI is another project: no text may have a user install that."""
    assert PROJECT["project"]["name"] == "agentcache-mlx"
    own_extra = re.compile(r"(?<![\w-])agentcache\[(?:cpu|cuda|plots|dev)")
    texts = [ROOT / "pyproject.toml", ROOT / "Makefile"]
    texts += [path for folder in ("agentcache", *LINKED) for path in (ROOT / folder).rglob("*.py")]
    assert [str(path) for path in texts if own_extra.search(path.read_text())] == []


DOCUMENTS = [path for folder in ("", "docs", "examples") for path in sorted((ROOT / folder).glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_in_documents_resolve(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text()))
    for target in targets:
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def test_links_that_do_not_resolve_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b`, c-d\n\n```\n# no heading\n```\n[here](#a-b-c-d)\n")
    assert anchors(page) == {"a-b-c-d"}
    test_links_in_documents_resolve(page)
    for wrong in ("other.md", "#no-heading", "page.md#c"):
        page.write_text(f"# A\n\n[there]({wrong})\n")
        with pytest.raises(AssertionError):
            test_links_in_documents_resolve(page)


def command_lines(page: Path) -> list[list[str]]:
    """Lines of consoles that call `agentcache`, and such calls in running text, without the name."""
    text = page.read_text()
    consoles = [block for kind, block in FENCE.findall(text) if kind == "console"]
    lines = re.findall(r"^\$ (.*)$", "\n".join(consoles), re.MULTILINE)
    lines += re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    calls = [re.match(r"(?:\.venv/bin/)?agentcache ([a-z].*)", line) for line in lines]
    return [shlex.split(call[1], comments=True) for call in calls if call]


def refused(arguments: list[str]) -> str:
    """What is wrong with a command line: an unknown command or option; empty if nothing is."""
    from agentcache.cli.main import COMMANDS, load_command

    name, *rest = arguments
    if name not in COMMANDS:
        return f"no command {name}"
    command = load_command(name)
    if hasattr(command, "commands"):
        known = {option for each in command.commands.values() for parameter in each.params for option in parameter.opts}
    else:
        known = {option for parameter in command.params for option in parameter.opts}
    options = [word.partition("=")[0] for word in rest[: rest.index("--") if "--" in rest else None]]
    return " ".join(option for option in options if option.startswith("--") and option not in {*known, "--help"})


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_command_lines_in_documents_exist(page: Path) -> None:
    wrong = {" ".join(line): refused(line) for line in command_lines(page)}
    assert {line: why for line, why in wrong.items() if why} == {}


def test_command_lines_that_do_not_exist_are_found() -> None:
    assert len(command_lines(ROOT / "README.md")) >= 2
    assert refused(["serve", "--model", "M"]) == "" and refused(["launch", "pi", "--start", "--", "--any"]) == ""
    assert refused(["served"]) == "no command served" and refused(["serve", "--modle", "M"]) == "--modle"
