"""mlx-lm with a changed model file, as another release would have it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def changed_source(folder: Path, module: str, old: str, new: str) -> Iterator[Path]:
    """Meanwhile a module of `mlx_lm.models` is a copy in which `new` stands in place of the first `old`."""
    name = f"mlx_lm.models.{module}"
    found = importlib.util.find_spec(name)
    assert found is not None and found.origin is not None
    text = Path(found.origin).read_text(encoding="utf-8")
    assert old in text
    file = folder / f"{module}.py"
    file.write_text(text.replace(old, new, 1), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    copy, original = importlib.util.module_from_spec(spec), sys.modules.get(name)
    sys.modules[name] = copy
    try:
        spec.loader.exec_module(copy)
        yield file
    finally:
        if original is None:
            del sys.modules[name]
        else:
            sys.modules[name] = original
