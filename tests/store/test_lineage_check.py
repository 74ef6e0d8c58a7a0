"""Files of agents whose checksums are right and whose values are not: refused as archives, set aside at start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentcache.errors import BlockRejected
from agentcache.store.archive import ArchiveRejected, export_agent
from agentcache.store.archived_agent import read_archive
from agentcache.store.transcript_log import EMPTY, Content, LogEnd, _checksum_of, _line, parse_log, start_log
from agentcache.store.verify import verify_folder
from tests.growth import units
from tests.store.forge import FORGERIES, OF_A_MODEL, Forgery
from tests.store.store_cases import MODEL, SPEC, load_agents, make_record, make_transcript, make_turn, open_store

NUM_TOKEN_IDS = 150_000


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forged")
    with open_store(folder / "cache") as store:
        record = make_record("alice", make_transcript(300))
        store.write_blocks(make_turn(record))
        store.save_agent(record)
    export_agent(folder / "cache", "alice", folder / "file")
    return folder / "file"


def forged(archive: Path, *, numbered: bool = False) -> Iterator[tuple[str, Forgery]]:
    """Each of `FORGERIES`, of an agent of its own if `numbered`."""
    for number, (name, change) in enumerate(FORGERIES.items()):
        forgery = Forgery.of(archive)
        if numbered:
            forgery.renamed(f"a{number}")
        change(forgery)
        yield name, forgery


def test_what_is_not_changed_is_read(archive: Path, tmp_path: Path) -> None:
    """So each forgery is refused for what is changed in it."""
    assert Forgery.of(archive).archive() == archive.read_bytes()
    (tmp_path / "file").write_bytes(Forgery.of(archive).archive())
    assert len(read_archive(tmp_path / "file", SPEC, MODEL, "bob", NUM_TOKEN_IDS).names) == 4


def test_an_archive_with_values_that_make_no_sense_is_refused(
    archive: Path, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    for name, forgery in forged(archive):
        with subtests.test(name):
            (tmp_path / "file").write_bytes(forgery.archive())
            with pytest.raises(ArchiveRejected):
                read_archive(tmp_path / "file", SPEC, MODEL, "bob", NUM_TOKEN_IDS)


def test_lineages_with_values_that_make_no_sense_are_set_aside_at_start(archive: Path, ram_path: Path) -> None:
    """But for what a sound log proves, and for fields of a newer release."""
    alice = make_transcript(300)
    with open_store(ram_path) as store:
        record = make_record("carol", make_transcript(300, seed=1))
        store.write_blocks(make_turn(record))
        store.save_agent(record)
    [agents] = (ram_path / "agents").iterdir()
    for number, (_, forgery) in enumerate(forged(archive, numbered=True)):
        forgery.write_to(agents, f"a{number}")
    report = verify_folder(ram_path)
    assert len(report.unavailable) == 1 and "more" in report.unavailable[0]
    assert len(report.problems) == len(FORGERIES) - len(OF_A_MODEL) - 1
    for quarantined in (len(FORGERIES) - 1, 0):
        with open_store(ram_path, num_token_ids=NUM_TOKEN_IDS) as store:
            *rebuilt, carol = load_agents(store)
            assert carol == record and len(store.unavailable) == 1
            assert len(rebuilt) >= len([name for name in FORGERIES if is_of_the_manifest(name)])
            assert all(each.transcript == alice and each.adapter is None for each in rebuilt)
            assert store.usage.quarantine.count == quarantined
            store.collect_orphans()
            assert len(store.blocks.keys()) == len(make_turn(record))


def is_of_the_manifest(name: str) -> bool:
    """Whether the log is sound, and of the agent that the file's name says."""
    return name.startswith(
        ("created", "last_used", "salt", "adapter", "policy", "lineage", "caches", "format_v", "base's", "log ")
    )


def test_a_log_of_many_changes_is_read_in_linear_time() -> None:
    """Each of 20,000 records keeps nearly all of a text of a megabyte."""
    content = Content(make_transcript(300_000), {}, None)
    log, end = start_log("a", MODEL, 1, content)
    keep = [300_000, len(content.transcript.text) - 1, 1]
    change = {"keep": keep, "ids": "", "ends": "", "text": content.transcript.text[-1], "spans": [], "chains": {}}
    lines, checksum = [log], end.checksum
    for _ in range(20_000):
        lines.append(_line(checksum, change))
        checksum = _checksum_of(lines[-1])
    log = b"".join(lines)
    found = []
    assert units(lambda: found.append(parse_log(log, "a", MODEL, LogEnd(1, len(log), checksum))), 300) < 300
    assert found[0] == content


def test_an_empty_log_is_no_log() -> None:
    with pytest.raises(BlockRejected):
        parse_log(b"", "a", MODEL, LogEnd(1, 0, ""))
    log, end = start_log("a", MODEL, 1, EMPTY)
    assert parse_log(log, "a", MODEL, end) == EMPTY
