from __future__ import annotations

from pathlib import Path

import pytest

from agentcache.errors import ConfigError, StoreError
from agentcache.settings import sizes
from agentcache.settings.memory_plan import NO_WIRED_LIMIT
from agentcache.settings.sizes import parse_bytes, parse_disk_budget, parse_share_of_ram, parse_wired_limit


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GB", 8 * 10**9), ("512MB", 512 * 10**6), ("1.5GiB", 3 * 2**29), ("2 kib", 2048), ("1t", 10**12), ("7", 7)],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_bytes(text, key="ram_budget") == size


def test_large_byte_counts_are_exact() -> None:
    assert parse_bytes("9007199254740993", key="ram_budget") == 9007199254740993


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "8XB", "8 8GB", "0x10", "1e9", "nan", "٣GB"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match="ram_budget"):
        parse_share_of_ram(text, key="ram_budget")


def test_percentages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sizes, "total_ram", lambda: 1000)
    assert parse_share_of_ram("20%", key="ram_budget") == 200
    monkeypatch.setattr(sizes, "disk_room", lambda cache_dir: sizes.DiskRoom(size=5000, free=10, held=10))
    assert parse_disk_budget("12.5%", tmp_path) == 625, "of the disk, whatever other programs have written"
    assert parse_disk_budget("Auto", tmp_path) is None
    with pytest.raises(ConfigError, match="over 100"):
        parse_share_of_ram("101%", key="ram_budget")


def test_a_ram_budget_beyond_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "total_ram", lambda: 10**9)
    assert parse_share_of_ram("1GB", key="ram_budget") == 10**9
    with pytest.raises(ConfigError, match="ram_budget = '2GB' is more than the 1.0 GB"):
        parse_share_of_ram("2GB", key="ram_budget")


def test_what_depends_on_the_model_is_left_open() -> None:
    assert parse_share_of_ram(" Auto", key="memory_limit") is None and parse_wired_limit("auto") is None
    assert (parse_wired_limit("off"), parse_wired_limit("1MB")) == (NO_WIRED_LIMIT, 10**6)
    with pytest.raises(ConfigError, match="memory_limit = 'off'"):
        parse_share_of_ram("off", key="memory_limit")


def test_the_disk_of_a_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        total, free = 5000, 1000

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    (tmp_path / "cache" / "blocks" / "ab").mkdir(parents=True)
    (tmp_path / "cache" / "blocks" / "ab" / "x.safetensors").write_bytes(b"1" * 500)
    assert sizes.disk_room(tmp_path / "cache") == sizes.DiskRoom(size=5000, free=1000, held=500)
    assert sizes.disk_room(tmp_path / "not" / "there" / "yet") == sizes.DiskRoom(size=5000, free=1000, held=0)


def test_a_folder_that_there_can_be_none(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot use the cache folder .*: File name too long"):
        sizes.disk_room(tmp_path / ("x" * 300))
