"""Which sources compute a model: another statement is other code, another comment is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.nn as nn
import pytest
from mlx_lm.utils import load_model

from agentcache.models import fingerprint as sources
from agentcache.models.fingerprint import FIRST_SOURCES, source_digest
from agentcache.system.files import Memo
from tests.conftest import ModelFolder
from tests.models.other_sources import changed_source


@pytest.fixture
def built(model_folder: ModelFolder) -> Callable[[], nn.Module]:
    """Builds the model anew, of the sources that there are then."""
    folder = model_folder("qwen2", num_hidden_layers=2)
    return lambda: load_model(folder, lazy=True)[0]


def digest_of(model: nn.Module) -> str:
    return source_digest(model, Memo(None))


def test_sources_that_blocks_were_made_with_before_have_no_digest(built: Callable[[], nn.Module]) -> None:
    """With mlx-lm 0.32.2; with a later one only of models that it has not touched."""
    names = sources._with_imports({"mlx_lm.models.qwen2", "mlx_lm.utils"}, Memo(None))
    assert {"mlx_lm.models.base", "mlx_lm.models.rope_utils"} < names.keys() < FIRST_SOURCES.keys()
    assert (digest_of(built()) == "") == all(FIRST_SOURCES[name] == digest for name, digest in names.items())


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (
            "qwen2",
            "self.n_heads = n_heads = args.num_attention_heads",
            "self.n_heads = n_heads = args.num_attention_heads + 0",
        ),
        ("base", "def create_causal_mask(", "LIMIT = 1\n\ndef create_causal_mask("),
        ("rope_utils", "class ", "FACTOR = 2\n\nclass "),
    ],
)
def test_another_statement_is_other_code(
    built: Callable[[], nn.Module], tmp_path: Path, module: str, old: str, new: str
) -> None:
    before = digest_of(built())
    with changed_source(tmp_path, module, old, new):
        assert digest_of(built()) not in (before, "")
    assert digest_of(built()) == before


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("qwen2", "import mlx.nn as nn", '"""About."""\n# A comment.\n\n\nimport mlx.nn as nn'),
        (
            "qwen2",
            "self.n_heads = n_heads = args.num_attention_heads",
            "self.n_heads = n_heads = (\n            args.num_attention_heads\n        )",
        ),
        ("cache", "class LRUPromptCache", "ENTRIES = 3\n\n\nclass LRUPromptCache"),  # a part that no model here uses
        ("qwen3", "import mlx.nn as nn", "import mlx.nn as nn\nX = 1"),
    ],
)
def test_comments_layout_and_other_models_do_not_count(
    built: Callable[[], nn.Module], tmp_path: Path, module: str, old: str, new: str
) -> None:
    before = digest_of(built())
    with changed_source(tmp_path, module, old, new):
        assert digest_of(built()) == before


def test_of_caches_those_of_recurrent_layers_count(tmp_path: Path) -> None:
    """Keys and values lie in caches of our own."""
    hybrid = {"mlx_lm.models.qwen3_next"}
    before = sources._with_imports(set(hybrid), Memo(None))
    for old, new, counts in (
        ("class KVCache(_BaseCache):", "class KVCache(_BaseCache):\n    more = 1", False),
        ("class ArraysCache(_BaseCache):", "class ArraysCache(_BaseCache):\n    more = 1", True),
    ):
        with changed_source(tmp_path, "cache", old, new):
            assert (sources._with_imports(set(hybrid), Memo(None)) != before) == counts


def test_a_source_is_examined_once(
    built: Callable[[], nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examined, original = list[str](), sources._examine
    monkeypatch.setattr(sources, "_examine", lambda name, file: examined.append(name) or original(name, file))
    model, digests = built(), list[str]()
    for _ in range(2):
        memo = Memo(tmp_path / "memo.json")
        digests.append(source_digest(model, memo))
        memo.keep()
    assert len(set(examined)) == len(examined) > 4
    assert digests == [digest_of(model)] * 2
