"""Digest of the mlx-lm sources that compute a model's keys and values.

A corrected model file gives other keys and values for the same weights, so block keys cover sources, not mlx-lm's
version; comments, docstrings, layout and error texts do not count.
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

from agentcache.models.first_sources import FIRST_SOURCES
from agentcache.system.files import file_identity
from agentcache.system.memo import Memo

_PACKAGE = "mlx_lm"
# Definitions that decide bytes. Keys and values lie in our own caches (kv/step_cache), so only recurrent layers' cache
# classes count; of `utils`, the way from files to parameters.
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
    "mlx_lm.models",  # the packages: their imported members are modules
    "mlx_lm",
    "mlx_lm.models.pipeline",  # layers over several machines, unused here
}
_SCHEME = "source 1"  # of the digests and the memo's keys


def source_digest(model: nn.Module, memo: Memo) -> str:
    """Digest of the sources that compute `model`, as built by mlx-lm; 16 hex digits.

    Empty for `FIRST_SOURCES`: blocks with these sources predate source digests.
    """
    names = {type(module).__module__ for module in (model, *model.modules())}
    sources = _with_imports({name for name in names if _is_theirs(name)} | {_READS_WEIGHTS}, memo)
    if all(FIRST_SOURCES.get(name) == digest for name, digest in sources.items()):
        return ""
    return _digest(f"{sorted(sources.items())}")


def _with_imports(names: set[str], memo: Memo) -> dict[str, str]:
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
    """Digest of a module's source, then the names that it imports."""
    file = _file_of(name)
    if file is None:  # installed without sources
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
    except ModuleNotFoundError:  # its parent is no package
        return False


def _spell(node: object, text: list[str]) -> list[str]:
    """Append a syntax tree to `text`, in words independent of Python's version."""
    if isinstance(node, ast.Raise):
        text.append("Raise;")
    elif isinstance(node, ast.AST):
        text.append(f"{type(node).__name__}(")
        for field, value in ast.iter_fields(node):
            # Versions differ in empty fields. None may be a constant.
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
