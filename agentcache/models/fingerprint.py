"""What makes two models the same: their weights, config and tokenizer. Never a name or a path."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from agentcache.models.memo import read_memo, write_memo

_CHUNK_BYTES = 4 << 20


def model_fingerprint(folder: Path, tokenizer_fingerprint: str, memo: Path | None = None) -> str:
    """Digest of a model folder, 32 hex digits.

    Args:
        folder: holds config.json and model*.safetensors, and what else mlx-lm reads to build the model.
        tokenizer_fingerprint: digest of the tokenizer and chat template.
        memo: a JSON file that remembers digests of weight files by size, times and inode, so that a restart does not
            read gigabytes again.
    """
    state = hashlib.blake2b(digest_size=16)
    parts = [*_configs(folder), tokenizer_fingerprint, *_weight_digests(folder, memo)]
    for part in parts:
        data = part.encode()
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def _configs(folder: Path) -> list[str]:
    """What the config files say, without how they are laid out."""
    files = [folder / "config.json", folder / "hf_quant_config.json"]
    return [json.dumps(json.loads(file.read_bytes()), sort_keys=True) for file in files if file.is_file()]


def _weight_digests(folder: Path, memo: Path | None) -> list[str]:
    files = sorted(folder.glob("model*.safetensors"))
    known = read_memo(memo)
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(lambda file: known.get(file_identity(file)) or _digest(file), files))
    if memo is not None and files:
        write_memo(memo, {file_identity(file): digest for file, digest in zip(files, digests, strict=True)} | known)
    return digests


def file_identity(file: Path) -> str:
    """Changes whenever the file's content may have changed: its path, size, times and inode."""
    stat = file.stat()
    return f"{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ctime_ns}|{stat.st_ino}"


def _digest(file: Path) -> str:
    state = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            state.update(chunk)
    return state.hexdigest()
