"""What can be counted in the text of the repository: code lines, classes, helpers, words and idioms, by wing."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "agentcache"
LINKED = ("cli", "metal_kernels", "server")  # folders that are packages of agentcache
TOOLS = ("benchmarks", "training")
DOCUMENTS = "docs"

MOST_METHODS = 25
# Classes whose methods are what users may ask for.
PUBLIC_FACES = {"LLM", "Client", "AsyncEngine"}

# A sentence with one of these can be said with a component, a request or a thread as its subject.
IDIOMS = (
    r"nobody|somebody|anybody|everybody|whoever|no one|anyone|someone",
    r"meanwhile|of late|in vain|so many|as many as|for want of|by and by|all the same",
    r"goes on from|go on from|going on from|gone on from|goes on with|go on with|went on from",
    r"what is there|what there is|that there are|where there is none|where there are none",
    r"others (?:begin|find|read|take|have|write|may|wait|use|need|do|go)",
    r"who (?:asks|reads|waits|takes|wants|writes|needs|has|is|comes|goes|calls|computes|gets|knows)",
    r"what (?:becomes|became|comes|came) of|is to be (?:written|read|kept|computed|told|had)",
    r"let (?:go|others)|lets go of|are let go|gives? way|told behind|has to do with",
)
RETIRED = (
    r"Generation|CacheSequence|Producer|Lane|Lanes|Pace|CatchUp|Following|Grammars|InUse|Survey|Overlay",
    r"World|Alone|Leading|Follower|Words|Tickets|Patience",
    r"trunk|overlay|companion rows?|paired|survey|hosting|watched runs?|volatile lines?",
    r"staleness|settles?|settled|owed",
)
IDIOM = re.compile(rf"\b(?:{'|'.join(IDIOMS)})\b", re.IGNORECASE)
NAME = re.compile(rf"\b(?:{'|'.join(RETIRED)})\b")
WORD = re.compile(r"[A-Za-z][A-Za-z'’-]*")
PRIVATE = re.compile(r"\b_[a-z]\w*")
LONG_STRING = re.compile(r'(?:"""|\'\'\').*?(?:"""|\'\'\')', re.DOTALL)
DOCSTRING = re.compile(r'(?:\A|(?<=:\n))\s*r?"""(.*?)"""', re.DOTALL)  # behind the line that ends a header
COMMENT = re.compile(r"(?:^ *|  )# ?(.*)$", re.MULTILINE)
FUNCTION = re.compile(r"^ *(?:async )?def (\w+)", re.MULTILINE)
TOP_OR_METHOD = re.compile(r"^(?:(?P<method>    (?:async )?def )|class (?P<name>\w+)|\w)", re.MULTILINE)


@dataclass(frozen=True)
class Module:
    """One source file, read by its lines: the formatter has put each statement where it is looked for.

    Attributes:
        path: relative to the repository.
        text: its content.
    """

    path: str
    text: str

    @property
    def wing(self) -> str:
        parts = Path(self.path).parts
        if parts[0] in TOOLS:
            return f"tools/{parts[0]}"
        if parts[0] in LINKED:
            return parts[0]
        return parts[1] if len(parts) > 2 else PACKAGE

    @property
    def is_runtime(self) -> bool:
        return not self.wing.startswith("tools/")

    @cached_property
    def _docstrings(self) -> list[str]:
        return [match[1] for match in DOCSTRING.finditer(self.text)]

    @cached_property
    def _without_docstrings(self) -> str:
        return DOCSTRING.sub("", self.text)

    @cached_property
    def code_lines(self) -> int:
        """Lines with code: without blank lines, comments and docstrings."""
        lines = LONG_STRING.sub(lambda match: match[0].replace("#", " "), self._without_docstrings).splitlines()
        return sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in lines)

    @cached_property
    def prose(self) -> str:
        """Docstrings and comments."""
        code = LONG_STRING.sub("", self._without_docstrings)
        return "\n".join([*self._docstrings, *COMMENT.findall(code)])

    @cached_property
    def functions(self) -> list[str]:
        """Names of all functions and methods."""
        return FUNCTION.findall(self._without_docstrings)

    @cached_property
    def classes(self) -> dict[str, int]:
        """Number of methods of each class at the top."""
        found, name = dict[str, int](), ""
        for match in TOP_OR_METHOD.finditer(LONG_STRING.sub("", self._without_docstrings)):
            if match["method"]:
                found[name] += bool(name)
            else:
                name = match["name"] or ""
                found.setdefault(name, 0)
        return {name: count for name, count in found.items() if name}


@dataclass(frozen=True)
class Prose:
    """Words of a text, and those that the wording rules ban."""

    words: int
    idioms: int

    @classmethod
    def of(cls, text: str) -> Prose:
        return cls(len(WORD.findall(text)), len(IDIOM.findall(text)))

    def __add__(self, other: Prose) -> Prose:
        return Prose(self.words + other.words, self.idioms + other.idioms)


def modules() -> list[Module]:
    """All source files but the tests', by path."""
    paths = [path for folder in (PACKAGE, *LINKED, *TOOLS) for path in (ROOT / folder).rglob("*.py")]
    inside = sorted(path for path in paths if not any((ROOT / PACKAGE / linked) in path.parents for linked in LINKED))
    return [Module(str(path.relative_to(ROOT)), path.read_text()) for path in inside]


def documents() -> str:
    """README and all pages."""
    return "\n".join(path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))))


def measure() -> dict[str, float]:
    """All static numbers by name."""
    found = modules()
    runtime = [module for module in found if module.is_runtime]
    numbers: dict[str, float] = {}
    for title, count in (("code lines", lambda module: module.code_lines), ("files", lambda module: 1)):
        by_wing: Counter[str] = Counter()
        for module in found:
            by_wing[module.wing] += count(module)
        numbers[f"{title}: runtime"] = sum(count(module) for module in runtime)
        numbers |= {f"{title}: {wing}": number for wing, number in sorted(by_wing.items())}
    numbers[f"classes with more than {MOST_METHODS} methods"] = len(large_classes(runtime))
    of_private, of_all = single_callers(runtime)
    numbers["private helpers with one caller: % of them"] = of_private
    numbers["private helpers with one caller: % of all functions"] = of_all
    prose: dict[str, Prose] = {}
    for module in found:
        prose[module.wing] = prose.get(module.wing, Prose(0, 0)) + Prose.of(module.prose)
    prose[DOCUMENTS] = Prose.of(documents())
    total = sum(prose.values(), Prose(0, 0))
    numbers |= {f"words: {wing}": each.words for wing, each in [("all", total), *sorted(prose.items())]}
    for wing, each in [("all", total), *sorted(prose.items())]:
        numbers[f"idioms per 1,000 words: {wing}"] = round(1000 * each.idioms / max(each.words, 1), 2)
    numbers["retired names: runtime"] = sum(len(NAME.findall(module.text)) for module in runtime)
    numbers["retired names: docs"] = len(NAME.findall(documents()))
    return numbers


def large_classes(found: list[Module]) -> dict[str, int]:
    """Number of methods by class, of classes with more than `MOST_METHODS`; public faces left out."""
    sizes = {name: size for module in found for name, size in module.classes.items()}
    return {name: size for name, size in sizes.items() if size > MOST_METHODS and name not in PUBLIC_FACES}


def single_callers(found: list[Module]) -> tuple[float, float]:
    """Private functions and methods that their module names once beside the definition.

    Percent of the private ones, and of all functions and methods.
    """
    total = private = single = 0
    for module in found:
        named = Counter(PRIVATE.findall(module.text))
        helpers = [name for name in module.functions if PRIVATE.fullmatch(name)]
        total += len(module.functions)
        private += len(helpers)
        single += sum(named[name] == 2 for name in helpers)
    return round(100 * single / max(private, 1), 1), round(100 * single / max(total, 1), 1)
