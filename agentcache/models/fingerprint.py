"""Identity of models, from content, never from a name or a path.

A model folder has two digests. The **identity** decides which agents belong to the model; it names the model in a new
cache folder and is part of the root of every chain of blocks. The **source digest** (`source_digest`) is part of the
cache spec: if sources change, agents stay and their blocks are computed again.

====================================  ========  ====================================================================
input                                 part of   why
====================================  ========  ====================================================================
weights (`model*.safetensors`)        identity  decide every byte
`config.json`                         identity  all fields but `HARMLESS`: unknown fields may decide bytes
quantisation (`config.json`,          identity  how weights are read
`hf_quant_config.json`)
`generation_config.json`              no        how tokens are chosen, not how they are cached
tokens (`token_rules`): vocabulary,   identity  text and ids are kept together: with another rule the same text has
merges, normaliser, pre-tokeniser,              other ids, and warm answers would differ from cold ones
added tokens, decoder
chat template                         no        makes text only: prompts match by text, then by tokens
post-processor, padding, truncation,  no        in the prompt's text, or never applied
ids of BOS, EOS, padding
sources of mlx-lm that compute it     spec      a corrected model file gives other keys and values
mlx-lm's version                      no        a release that leaves the model's sources alone changes nothing
MLX's version, the device, the        no        differ by rounding only, as two chunk sizes do; `Proof` and the
driver, our kernels and attention               kernels' self-test compare them at load
our formats, chains and quantisation  root      `FORMAT_VERSION` and the cache spec
====================================  ========  ====================================================================

Adapters have `Adapter.digest`. A decoder with its own weights keeps `first_fingerprint`, which named every model before
identities existed; cache folders keep such names (`store/model_files.py`).
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

from agentcache.system.files import file_identity
from agentcache.system.memo import Memo
from agentcache.text.model_folder import token_rules, tokenizer_files

_CHUNK_BYTES = 4 << 20
_CONFIGS = ("config.json", "hf_quant_config.json")

# No file of mlx-lm reads these (tested). Any change renames models that have the field.
HARMLESS = frozenset(
    {
        "_name_or_path",
        "auto_map",
        "bos_token_id",
        "dtype",  # weights have their own
        "eos_token_id",
        "torch_dtype",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)
_PARTS = ("text_config", "vision_config", "audio_config")  # of config.json, with the same fields


@dataclass(frozen=True)
class ModelFingerprints:
    """Names of a model, 32 hex digits each; `first`: those in older cache folders (format version 2)."""

    identity: str
    first: tuple[str, ...]


def model_fingerprints(folder: Path, memo: Path | None = None) -> ModelFingerprints:
    """Names of the model in a folder; JSON file `memo` keeps large files' digests by `file_identity` for a restart."""
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
    if folder.parent.name != "snapshots":
        return []
    weights = [file.resolve() for file in _weight_files(folder)]
    others = (other for other in sorted(folder.parent.iterdir()) if other.name != folder.name)
    return [other for other in others if [file.resolve() for file in _weight_files(other)] == weights]


def first_fingerprint(folder: Path, memo: Path | None = None, *, tokenizer: bool = True) -> str:
    """Older name of a model, still that of a decoder with its own weights. Must never change.

    Covers all fields of the configs and the chat template; a decoder's `tokenizer` is base's.
    """
    known = Memo(memo)
    name = _digest(
        [*_configs(folder), tokenizer_files(folder, known) if tokenizer else "", *_weight_digests(folder, known)]
    )
    known.keep()
    return name


def _configs(folder: Path) -> list[str]:
    return [json.dumps(config, sort_keys=True) for _, config in _read_configs(folder)]


def _counting_configs(folder: Path) -> list[str]:
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
