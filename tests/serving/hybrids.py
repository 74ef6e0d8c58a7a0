"""Tiny models with recurrent layers as folders, and conversations on them, compared with what is computed cold."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from agentcache.llm import LLM, Completion
from tests.models.model_files import MODEL_FILES
from tests.models.zoo import build
from tests.serving import conversation
from tests.serving.block_damage import block_files, metadata_of
from tests.serving.conversation import greedy, make_ids
from tests.tiny import _token_config
from tests.tokenizers_factory import byte_bpe

# Beside what `model_files` has: what the tokenizer's library checks, too.
_MORE: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_expand": 2, "mamba_n_groups": 1},
    "mamba2": {"time_step_limit": [0.01, 10.0], "expand": 2},
    "kimi_linear": {"model_max_length": 32768},
}
HYBRIDS = (
    "qwen3_5",
    "nemotron_h",
    "qwen3_next",
    "lfm2",
    "granitemoehybrid",
    "falcon_h1",
    "jamba",
    "mamba2",
    "kimi_linear",
)
EVERY = 512  # tokens between snapshots
CLOSE = 4e-4  # of log probabilities: without its state a row is off by some 1e-3, with it by 1e-5


def write_hybrid(folder: Path, file: str, **overrides: Any) -> Path:
    """A model folder of this file of mlx-lm; `overrides` are entries of its config."""
    byte_bpe(folder)
    config = {
        **MODEL_FILES[file].config,
        **_MORE.get(file, {}),
        **_token_config(folder),
        "model_type": file,
        "max_position_embeddings": 32768,
        "torch_dtype": "float32",
        **overrides,
    }
    # As it is on people's disks, for who reads them: its own weights, as mlx-lm saves them.
    weights = dict(tree_flatten(build(file, config).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def with_template(model: Path, folder: Path, template: str) -> Path:
    """A copy of a model folder, with this chat template."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return folder


def answer(llm: LLM, ids: Sequence[int], agent: str | None, count: int = 4, **options: Any) -> Completion:
    """The next tokens, with the two likeliest each time."""
    return llm.generate(list(ids), greedy(count, logprobs=2), agent=agent, **options)


def check_same(completion: Completion, cold: Completion) -> None:
    """The same tokens, and as likely: a wrong state shows there."""
    conversation.check_same(completion, cold, CLOSE)


def more(ids: Sequence[int], count: int, seed: int) -> list[int]:
    return [*ids, *make_ids(count, seed=seed)]


def snapshot_files(cache_dir: Path) -> list[Path]:
    """Those in a cache folder."""
    return [path for path in block_files(cache_dir) if metadata_of(path)["group"] == "recurrent"]
