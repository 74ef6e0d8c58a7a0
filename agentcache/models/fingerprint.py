"""What makes two models the same, and what belongs in the keys of their blocks. Never a name or a path.

Two digests follow from a model folder. The **identity** says which agents belong to the model. It is the model's name
in a new cache folder, and so part of the root of every chain of blocks. The **source digest** (`source_digest`) is part
of the cache spec: with other sources a model has the same agents, and their blocks are computed again.

====================================  ========  ====================================================================
input                                 counts    why
====================================  ========  ====================================================================
weights (`model*.safetensors`)        identity  they decide every byte
`config.json`                         identity  shapes and numbers of the computation; all fields but `HARMLESS`,
                                                a list, for a field that decides bytes must never be left out
quantisation (`config.json`,          identity  it says how weights are read
`hf_quant_config.json`)
`generation_config.json`              no        it decides how tokens are chosen, not what they are cached as
tokens (`token_rules`): vocabulary,   identity  blocks depend on token ids alone, but an agent's text and ids are kept
merges, normaliser, pre-tokeniser,              together: with another rule the same text has other ids, and a warm
added tokens, decoder                           answer would not be a cold one's
chat template                         no        it only makes the text: prompts match by text, then by tokens, so an
                                                agent continues from the longest common prefix
post-processor, padding, truncation,  no        what they add stands in the prompt's text, or is never applied
which tokens are BOS, EOS, padding
sources of mlx-lm that compute it     spec      a corrected model file gives other keys and values
mlx-lm's version                      no        a release that leaves the model's sources alone changes nothing
MLX's version, the device, the        no        numbers differ by rounding only, as they do between two chunk sizes;
driver, our kernels and attention               `Proof` and the kernels' self-test compare them at load
our formats, chains and quantisation  root      `FORMAT_VERSION` and the cache spec
====================================  ========  ====================================================================

Adapters: `Adapter.digest` covers matrices, modules and effective scale, and no other field of their config. A decoder
with weights of its own keeps `first_fingerprint`, which was every model's name before there was an identity. Cache
folders keep such names (`store/model_names.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from agentcache.models.file_identity import file_identity
from agentcache.models.memo import Memo
from agentcache.models.text.token_rules import token_rules, tokenizer_files

_CHUNK_BYTES = 4 << 20
_CONFIGS = ("config.json", "hf_quant_config.json")

# No file of mlx-lm reads these (a test looks). Each one that is added or taken off renames models that have it.
HARMLESS = frozenset(
    {
        "_name_or_path",
        "auto_map",
        "bos_token_id",
        "dtype",  # weights say their own
        "eos_token_id",
        "torch_dtype",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)
_PARTS = ("text_config", "vision_config", "audio_config")  # of config.json, which repeat the same fields


@dataclass(frozen=True)
class ModelFingerprints:
    """The names of a model by its content, 32 hex digits each.

    Args:
        identity: the name of today, as the table above says.
        first: names in cache folders of format version 2 from before there was an identity: its own first, then those
            of other revisions of it on this machine.
    """

    identity: str
    first: tuple[str, ...]


def model_fingerprints(folder: Path, memo: Path | None = None) -> ModelFingerprints:
    """The names of the model in a folder.

    Args:
        folder: holds config.json and model*.safetensors, and what else mlx-lm reads to build the model.
        memo: a JSON file that remembers digests of large files by size, times and inode, so that a restart does not
            read gigabytes again.
    """
    known = Memo(memo)
    identity, first = _both_names(folder, known)
    names = [first]
    for revision in _other_revisions(folder):
        with suppress(OSError, ValueError):
            of_revision, name = _both_names(revision, known)
            if of_revision == identity and name not in names:
                names.append(name)
    known.keep()
    return ModelFingerprints(identity, tuple(names))


def _both_names(folder: Path, known: Memo) -> tuple[str, str]:
    weights = _weight_digests(folder, known)
    identity = _digest(["identity 1", *_counting_configs(folder), token_rules(folder, known), *weights])
    return identity, _digest([*_configs(folder), tokenizer_files(folder, known), *weights])


def _other_revisions(folder: Path) -> list[Path]:
    """What the hub's cache has beside the folder that leads to the same weight files: with another template, say."""
    if folder.parent.name != "snapshots":
        return []
    weights = [file.resolve() for file in _weight_files(folder)]
    others = (other for other in sorted(folder.parent.iterdir()) if other.name != folder.name)
    return [other for other in others if [file.resolve() for file in _weight_files(other)] == weights]


def first_fingerprint(folder: Path, memo: Path | None = None, *, tokenizer: bool = True) -> str:
    """The name of a model before there was an identity; of a decoder with weights of its own still. Never changes.

    It covers every field of the configs, and the chat template too.

    Args:
        memo: as in `model_fingerprints`.
        tokenizer: False for a decoder, whose tokenizer is base's.
    """
    known = Memo(memo)
    name = _digest(
        [*_configs(folder), tokenizer_files(folder, known) if tokenizer else "", *_weight_digests(folder, known)]
    )
    known.keep()
    return name


def _configs(folder: Path) -> list[str]:
    """What the config files say, without how they are laid out."""
    return [json.dumps(config, sort_keys=True) for _, config in _read_configs(folder)]


def _counting_configs(folder: Path) -> list[str]:
    """The same of the fields that count."""
    configs = ((name, _without_harmless(config)) for name, config in _read_configs(folder))
    return [f"{name} {json.dumps(config, sort_keys=True)}" for name, config in configs]


def _read_configs(folder: Path) -> list[tuple[str, Any]]:
    return [(name, json.loads((folder / name).read_bytes())) for name in _CONFIGS if (folder / name).is_file()]


def _without_harmless(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    kept = {name: value for name, value in config.items() if name not in HARMLESS}
    return {name: _without_harmless(value) if name in _PARTS else value for name, value in kept.items()}


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("model*.safetensors"))


def _weight_digests(folder: Path, known: Memo) -> list[str]:
    files = _weight_files(folder)
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda file: known.get(file_identity(file), lambda: _digest_file(file)), files))


def _digest(parts: Sequence[str]) -> str:
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode()
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def _digest_file(file: Path) -> str:
    state = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            state.update(chunk)
    return state.hexdigest()
