"""Which code computes a model's keys and values: the sources of mlx-lm that its modules come from.

An mlx-lm release that corrects a model file gives other keys and values for the same weights; one that does not touch
the model's files gives the same. So addresses cover the sources, not mlx-lm's version. Comments, docstrings, layout
and the texts of errors do not count.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterator
from importlib.util import find_spec, resolve_name
from pathlib import Path

import mlx.nn as nn
import mlx_lm

from agentcache.models.file_identity import file_identity
from agentcache.models.first_sources import FIRST_SOURCES
from agentcache.models.memo import Memo

_PACKAGE = "mlx_lm"
# Of these files only some definitions decide bytes. Keys and values lie in caches of our own (kv/step_cache), so that
# of mlx-lm's caches recurrent layers' counts alone; of `utils`, the way from files to parameters.
_PARTS = {
    "mlx_lm.models.cache": {"_BaseCache", "ArraysCache"},
    "mlx_lm.utils": {
        "_compressed_tensors_quantization",
        "_decode_tagged_floats",
        "_transform_awq_weights",
        "_unpack_awq_weights",
        "infer_quant_config",
        "load_model",
    },
}
_READS_WEIGHTS = "mlx_lm.utils"
_LEFT_OUT = {
    "mlx_lm.models",  # the packages themselves: what is imported from them are modules
    "mlx_lm",
    "mlx_lm.models.pipeline",  # layers spread over machines, which is never used here
}
_SCHEME = "source 1"  # of the digests; another one is another key of the memo


def source_digest(model: nn.Module, memo: Memo) -> str:
    """Digest of the sources that compute `model`, a model as mlx-lm builds it; 16 hex digits.

    Empty for the sources of `FIRST_SOURCES`: blocks were made with these before addresses covered them.
    """
    names = {type(module).__module__ for module in (model, *model.modules())}
    sources = _with_imports({name for name in names if _is_theirs(name)} | {_READS_WEIGHTS}, memo)
    if all(FIRST_SOURCES.get(name) == digest for name, digest in sources.items()):
        return ""
    return _digest(f"{sorted(sources.items())}")


def _with_imports(names: set[str], memo: Memo) -> dict[str, str]:
    """The digest of each of these modules, and of those of mlx-lm that they import."""
    found: dict[str, str] = {}
    while names:
        name = names.pop()
        digest, *imports = _read(name, memo)
        found[name] = digest
        names.update(set(imports) - found.keys())
    return found


def _is_theirs(name: str) -> bool:
    return name.startswith(f"{_PACKAGE}.") and name not in _LEFT_OUT


def _read(name: str, memo: Memo) -> list[str]:
    """The digest of a module's source, and the names of the modules of mlx-lm that it imports."""
    file = _file_of(name)
    if file is None:  # an installation without sources
        return [_digest(f"{name} {mlx_lm.__version__}")]
    return memo.get(f"{_SCHEME}|{name}|{file_identity(file)}", lambda: " ".join(_examine(name, file))).split()


def _file_of(name: str) -> Path | None:
    spec = getattr(sys.modules.get(name), "__spec__", None) or find_spec(name)
    file = None if spec is None or spec.origin is None else Path(spec.origin)
    return file if file is not None and file.suffix == ".py" and file.is_file() else None


def _examine(name: str, file: Path) -> list[str]:
    tree, parts = ast.parse(file.read_bytes()), _PARTS.get(name)
    if parts is not None:
        tree.body = [node for node in tree.body if getattr(node, "name", None) in parts]
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    imports = () if parts is not None else sorted(set(_imports(tree, package)))
    return [_digest("".join(_spell(tree, []))), *imports]


def _imports(tree: ast.AST, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module or ""
            within = [f"{base}.{alias.name}" for alias in node.names]
            yield from (name for name in (base, *within) if _is_theirs(name) and _is_module(name))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _is_theirs(alias.name))


def _is_module(name: str) -> bool:
    try:
        return name in sys.modules or find_spec(name) is not None
    except ModuleNotFoundError:  # what it would be in is no package
        return False


def _spell(node: object, text: list[str]) -> list[str]:
    """`text`, extended by the tree of a source in words that are the same with every version of Python."""
    if isinstance(node, ast.Raise):
        text.append("Raise;")
    elif isinstance(node, ast.AST):
        text.append(f"{type(node).__name__}(")
        for field, value in ast.iter_fields(node):
            # Versions differ in what is there and empty. Of a constant, None may be the value.
            is_empty = value is None or value == []
            if field not in ("ctx", "kind", "type_comment") and (not is_empty or isinstance(node, ast.Constant)):
                text.append(f"{field}=")
                _spell(value, text)
        text.append(")")
    elif isinstance(node, list):
        for each in node:
            if not _is_docstring(each):
                _spell(each, text)
        text.append(";")
    else:
        text.append(f"{node!r};")
    return text


def _is_docstring(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
