"""An agent of two ranks as one file: brought in by two, byte for byte; refused by other worlds, and if damaged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from agentcache.blocks.origin_paths import chain_keys, name_blocks, spans
from agentcache.errors import Conflict, NotFound, StoreError
from agentcache.ranks.folders import folders_of_agent
from agentcache.store.archive import ArchiveFile, ArchiveRejected, ArchiveWriter, export_agent
from agentcache.store.archived_agent import read_archive
from agentcache.store.block_file import make_header
from agentcache.store.block_folder import BlockCopy, BlockWrite
from agentcache.store.manifest import AgentRecord, decode_manifest
from agentcache.store.verify import verify_folder
from tests.ranks.by_threads import ROOT, SPECS, TwoRanks
from tests.store.store_cases import MODEL, SPEC, make_data, make_record, make_transcript, open_store

Contents = list[tuple[str, bytes]]
TOKENS = 300
OTHERS = "block of rank 1"


def make_agent() -> tuple[AgentRecord, list[BlockWrite]]:
    """Two blocks of each cache group, as rank 0 has them."""
    transcript = make_transcript(TOKENS)
    layout = spans(TOKENS, None, len(SPEC.groups))
    chains = chain_keys(ROOT, transcript.ids, layout)
    blocks = list[BlockWrite]()
    for span, parent in zip(layout, (ROOT, *chains), strict=False):
        for group in SPEC.groups:
            header = make_header(parent, group.name, span.begin // 256, transcript.ids[span.begin : span.end])
            blocks.append(BlockWrite(header, make_data(SPECS[0], header, seed=span.begin)))
    return replace(make_record("anna", transcript), blocks=name_blocks(chains, layout)), blocks


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder of two ranks that had an agent."""
    folder = tmp_path_factory.mktemp("here")
    ranks = TwoRanks(folder)
    record, blocks = make_agent()
    for block in blocks:
        ranks.hold(block)
    ranks.store.write_blocks(blocks)
    ranks.store.save_agent(record)
    ranks.close()
    return folder


def exported(here: Path, file: Path) -> Path:
    own, *others = folders_of_agent(here, "anna")
    export_agent(own, "anna", file, others=others)
    return file


def block_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}


def test_both_ranks_have_their_own_bytes_again(here: Path, tmp_path: Path) -> None:
    file = exported(here, tmp_path / "file")
    there = TwoRanks(tmp_path / "there")
    try:
        archive = read_archive(file, SPECS[0], MODEL, "bea")
        for writes in archive.writes():
            there.store.write_blocks(writes)
        del writes
        there.store.save_agent(archive.records[0])
        assert archive.num_bytes < 0.6 * file.stat().st_size  # of one rank
        there.store.require_blocks([])  # by then rank 1 has heard that nobody needs what was brought
        assert not there.follower._held
        headers = [block.header for block in make_agent()[1]]
        assert None not in there.store.read_blocks(headers)
    finally:
        there.close()
    assert block_files(tmp_path / "there") == block_files(here)
    assert len(block_files(here)) == 2 * len(headers)
    reports = [verify_folder(tmp_path / "there" / f"rank-{rank}-of-2") for rank in range(2)]
    assert not any(report.problems for report in reports)
    assert (reports[0].agents, reports[0].missing_blocks) == (1, 0)


def test_a_block_that_one_rank_has_not_is_left_out(here: Path, tmp_path: Path) -> None:
    gone = next((here / "rank-1-of-2").rglob("*.safetensors"))
    own, other = folders_of_agent(here, "anna")
    kept = gone.read_bytes()
    gone.unlink()
    try:
        told = export_agent(own, "anna", tmp_path / "file", others=[other])
    finally:
        gone.write_bytes(kept)
    assert (told.blocks, told.missing_blocks) == (3, 1)
    assert len(read_archive(tmp_path / "file", SPECS[0], MODEL, "anna").names) == 3


@pytest.mark.parametrize("rank", ["", "0 of 4"])
def test_another_world_refuses_it(here: Path, tmp_path: Path, rank: str) -> None:
    file = exported(here, tmp_path / "file")
    with pytest.raises(ArchiveRejected, match="2 ranks have the agent's keys and values") as refused:
        read_archive(file, replace(SPEC, rank=rank), MODEL, "anna")
    assert refused.value.code == "other_model"


def test_two_ranks_refuse_one_processs(tmp_path: Path) -> None:
    with open_store(tmp_path / "alone") as store:
        store.save_agent(make_record("anna", make_transcript(3), num_saved=0))
    export_agent(tmp_path / "alone", "anna", tmp_path / "file")
    with pytest.raises(ArchiveRejected, match="here it is 2"):
        read_archive(tmp_path / "file", SPECS[0], MODEL, "anna")


def flipped(contents: Contents) -> Contents:
    kind, data = contents[-1]
    return [*contents[:-1], (kind, data[:-5] + bytes([data[-5] ^ 1]) + data[-4:])]


def swapped(contents: Contents) -> Contents:
    """Each rank's blocks are said to be the other's."""
    names = {"block": OTHERS, OTHERS: "block"}
    front = [each for each in contents if each[0] not in names]
    own, theirs = ([data for kind, data in contents if kind == name] for name in names)
    return [*front, *(("block", data) for data in theirs), *((OTHERS, data) for data in own)]


DAMAGES: dict[str, Callable[[Contents], Contents]] = {
    "a bit of rank 1's": flipped,
    "one rank's for the other's": swapped,
    "rank 0's twice": lambda contents: [
        *(each for each in contents if each[0] != OTHERS),
        *((OTHERS, data) for kind, data in contents if kind == "block"),
    ],
    "one of rank 1 missing": lambda contents: contents[:-1],
    "all of rank 1 missing": lambda contents: [each for each in contents if each[0] != OTHERS],
    "one of rank 1 twice": lambda contents: [*contents, contents[-1]],
    "a third rank": lambda contents: [*contents, ("block of rank 2", contents[-1][1])],
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_not_right_is_refused(here: Path, tmp_path: Path, name: str) -> None:
    """All digests are right: it is the contents that are looked at."""
    file = ArchiveFile(exported(here, tmp_path / "file"))
    contents = [(each.kind, file.read(each, 1 << 30)) for each in file.contents]
    with (tmp_path / "damaged").open("wb") as opened:
        archive = ArchiveWriter(opened)
        for kind, data in DAMAGES[name](contents):
            archive.add(kind, data)
        archive.finish(decode_manifest(contents[0][1]), 2)
    with pytest.raises(ArchiveRejected):
        read_archive(tmp_path / "damaged", SPECS[0], MODEL, "anna")


def test_files_of_other_caches_are_not_for_ranks(tmp_path: Path) -> None:
    ranks = TwoRanks(tmp_path)
    try:
        with pytest.raises(StoreError, match="residuals"):
            ranks.store.write_blocks([BlockCopy(make_agent()[1][0].header, b"some file")])
        assert not block_files(tmp_path)
    finally:
        ranks.close()


def test_folders_of_all_ranks_have_to_be_there(here: Path, tmp_path: Path) -> None:
    assert [folder.name for folder in folders_of_agent(here, "anna")] == ["rank-0-of-2", "rank-1-of-2"]
    with pytest.raises(NotFound, match="no agent"):
        folders_of_agent(here, "anna", 3)
    with pytest.raises(NotFound, match="no agent"):
        folders_of_agent(tmp_path, "anna")
    (tmp_path / "rank-0-of-2").symlink_to(here / "rank-0-of-2")
    with pytest.raises(NotFound, match=r"bring .*rank-1-of-2"):
        folders_of_agent(tmp_path, "anna")


def test_of_worlds_of_several_sizes_one_has_to_be_named(here: Path, tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"rank-{rank}-of-2").symlink_to(here / f"rank-{rank}-of-2")
    (tmp_path / "agents").symlink_to(here / "rank-0-of-2" / "agents")
    with pytest.raises(Conflict, match="of 1 and of 2 ranks"):
        folders_of_agent(tmp_path, "anna")
    assert folders_of_agent(tmp_path, "anna", 1) == [tmp_path]
    assert len(folders_of_agent(tmp_path, "anna", 2)) == 2
