"""The block files of a cache folder, and ways to damage them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import xxhash

Damage = Callable[[Path], None]


def block_files(cache_dir: Path) -> list[Path]:
    """Block files in order of position; full blocks first, the tail's last."""
    files = (cache_dir / "blocks").glob("*/*.safetensors")
    return sorted(files, key=lambda path: (metadata_of(path)["num_blocks"], metadata_of(path)["group"]))


def header_of(path: Path) -> tuple[bytes, bytes]:
    """(header as JSON, tensor bytes)"""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return data[8:end], data[end:]


def metadata_of(path: Path) -> dict[str, str]:
    return json.loads(header_of(path)[0])["__metadata__"]


def sign(path: Path, head: bytes, tensors: bytes) -> None:
    """Write a block file whose checksum is right."""
    stated = json.loads(head)["__metadata__"]["checksum"].encode()
    length = len(head).to_bytes(8, "little")
    unsigned = length + head.replace(stated, b"0" * len(stated))
    checksum = xxhash.xxh3_128_hexdigest(unsigned + tensors).encode()
    path.write_bytes(length + head.replace(stated, checksum) + tensors)


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x04
    path.write_bytes(data)


def flip_tensor(name: str) -> Damage:
    """Flip a bit in the middle of the first tensor whose name ends like this."""

    def damage(cache_dir: Path) -> None:
        path = block_files(cache_dir)[0]
        head, _ = header_of(path)
        entries = {key: value for key, value in json.loads(head).items() if key.endswith(name)}
        begin, end = next(iter(entries.values()))["data_offsets"]
        flip(path, 8 + len(head) + (begin + end) // 2)

    return damage


def flip_metadata(key: str) -> Damage:
    """Flip a bit in a value of the header."""

    def damage(cache_dir: Path) -> None:
        path = block_files(cache_dir)[0]
        flip(path, path.read_bytes().index(f'"{key}":"'.encode()) + len(key) + 4)

    return damage


def first_block(change: Callable[[Path], object]) -> Damage:
    return lambda cache_dir: change(block_files(cache_dir)[0]) and None


def tail(change: Callable[[Path], object]) -> Damage:
    return lambda cache_dir: change(block_files(cache_dir)[-1]) and None


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def swap(cache_dir: Path) -> None:
    first, second = block_files(cache_dir)[0], block_files(cache_dir)[2]
    assert metadata_of(first)["group"] == metadata_of(second)["group"]
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)


def put_tail_in_place_of_block(cache_dir: Path) -> None:
    files = block_files(cache_dir)
    files[0].write_bytes(files[-2].read_bytes())


def set_version(path: Path, number: int) -> None:
    """Have a file say, with a sound checksum, that it is of another format version."""
    head, tensors = header_of(path)
    version = metadata_of(path)["format_version"]
    sign(path, head.replace(f'"format_version":"{version}"'.encode(), f'"format_version":"{number}"'.encode()), tensors)


def older_version(path: Path) -> None:
    set_version(path, 0)


def newer_version(path: Path) -> None:
    set_version(path, 9)


def other_tokens(path: Path) -> None:
    head, tensors = header_of(path)
    mine = metadata_of(path)["token_ids"].encode()
    sign(path, head.replace(mine, mine[:-8] + mine[-8:].swapcase()), tensors)


def nan_scales(path: Path) -> None:
    head, tensors = header_of(path)
    begin, end = next(v for k, v in json.loads(head).items() if k.endswith("scales"))["data_offsets"]
    sign(path, head, tensors[:begin] + b"\x00\x7e" * ((end - begin) // 2) + tensors[end:])


BLOCK_DAMAGE: dict[str, Damage] = {
    "truncated": first_block(truncate),
    "truncated tail": tail(truncate),
    "emptied": first_block(lambda path: path.write_bytes(b"")),
    "longer": first_block(lambda path: path.write_bytes(path.read_bytes() + b"\0" * 8)),
    "random": tail(lambda path: path.write_bytes(bytes(range(256)) * 100)),
    "header length": first_block(lambda path: flip(path, 0)),
    "header length, high": first_block(lambda path: flip(path, 7)),
    "header start": first_block(lambda path: flip(path, 8)),
    **{f"header {key}": flip_metadata(key) for key in ("block_key", "parent", "token_ids", "checksum", "total_tokens")},
    **{
        f"{side} {part}": flip_tensor(f"{side}_cache.0.{part}")
        for side in ("key", "value")
        for part in ("data", "scales", "biases")
    },
    "last byte": tail(lambda path: flip(path, -1)),
    "swapped": swap,
    "tail in place of a block": put_tail_in_place_of_block,
    "older version": first_block(older_version),
    "other tokens": first_block(other_tokens),
    "NaN scales": first_block(nan_scales),
    "a folder": first_block(lambda path: (path.unlink(), path.mkdir())),
    "a link": first_block(lambda path: path.symlink_to(path.rename(path.parents[2] / "elsewhere"))),
}
