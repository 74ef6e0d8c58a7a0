"""Ways to damage the files of residuals, and of nothing else, in a cache folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.serving.block_damage import BLOCK_DAMAGE, Damage, block_files, first_block, flip_tensor, header_of, sign


def is_residual(path: Path) -> bool:
    """Whether a block file holds residuals."""
    return b'"residual.layers.' in header_of(path)[0]


def residual_files(cache_dir: Path) -> list[Path]:
    """In order of position and group."""
    return [path for path in block_files(cache_dir) if is_residual(path)]


def damage_residuals(cache_dir: Path, damage: Damage) -> None:
    """Have `damage` find these files only, in a folder of their own."""
    alone = cache_dir / "alone"
    for path in residual_files(cache_dir):
        folder = alone / "blocks" / path.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        path.rename(folder / path.name)
    damage(alone)
    for path in (alone / "blocks").glob("*/*"):
        path.rename(cache_dir / "blocks" / path.parent.name / path.name)
    shutil.rmtree(alone / "blocks")


def nan_residuals(path: Path) -> None:
    head, tensors = header_of(path)
    begin, end = next(v for k, v in json.loads(head).items() if k.endswith("value_a.0"))["data_offsets"]
    sign(path, head, tensors[:begin] + b"\x00\x7e" * ((end - begin) // 2) + tensors[end:])


RESIDUAL_DAMAGE: dict[str, Damage] = {
    **{name: damage for name, damage in BLOCK_DAMAGE.items() if not name.startswith(("key ", "value ", "NaN"))},
    "key's residual": flip_tensor("key_a.0"),
    "value's residual": flip_tensor("value_a.0"),
    "NaN residuals": first_block(nan_residuals),
}
