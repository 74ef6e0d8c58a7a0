"""What `import agentcache` gives: the names of `__all__`, each loaded on first use."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import agentcache

ROOT = Path(__file__).parent.parent
NAMES = [name for name in agentcache.__all__ if name != "__version__"]


@pytest.mark.parametrize("name", NAMES)
def test_every_exported_name_is_a_documented_class_of_the_package(name: str) -> None:
    exported = getattr(agentcache, name)
    assert isinstance(exported, type) and exported.__name__ == name
    assert exported.__module__.startswith("agentcache.")
    assert (vars(exported).get("__doc__") or "").strip(), f"{name} has no docstring"
    assert name in dir(agentcache)


def test_exported_names_are_all_there_is() -> None:
    assert agentcache.__all__ == sorted(agentcache.__all__, key=lambda name: (not name.isupper(), name))
    assert agentcache.__version__.count(".") == 2
    with pytest.raises(AttributeError, match="has no attribute 'Sampling'"):
        _ = agentcache.Sampling


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(agentcache.__file__).read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imported = [alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(imported) == sorted(NAMES)


def test_only_the_llm_loads_mlx() -> None:
    """Importing the package, and whatever a client needs to read its errors and answers, loads no model library."""
    script = f"""
import sys
import agentcache
for name in {NAMES!r}:
    if name not in ("LLM", "Completion"):
        getattr(agentcache, name)
    loaded = {{"mlx", "mlx_lm", "transformers"}} & set(sys.modules)
    assert not loaded, f"{{name}} imports {{loaded}}"
"""
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
