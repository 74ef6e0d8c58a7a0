"""An agent exported to one file and brought in elsewhere: warm, the same words; or refused, and nothing changed."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from agentcache.agents.disk_jobs import DiskJobs
from agentcache.errors import Conflict, NotFound, RequestError, StoreError
from agentcache.gateway.operations import CreateAgent
from agentcache.store.archive import _MAGIC, ArchiveFile, ArchiveRejected, export_agent
from agentcache.store.manifest import _signed, decode_manifest, encode_manifest
from agentcache.store.model_files import LABEL
from agentcache.store.verify import verify_folder
from tests.conftest import ModelFolder
from tests.marks import slow
from tests.memos import BESIDE
from tests.serving import inside
from tests.serving.conversation import TokenTalk, cold_ids, greedy, make_ids, open_llm
from tests.serving.saved import LENGTHS, Saved


@pytest.fixture(scope="module")
def archive(saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("archive") / "alice"
    export_agent(saved.cache_dir, "alice", file)
    return file


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- there and back ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_elsewhere_the_agent_is_warm_and_says_the_same(saved: Saved, archive: Path, tmp_path: Path) -> None:
    with open_llm(saved.model, tmp_path / "there") as llm:
        imported = llm.import_agent("alice", archive)
        assert (imported.cache_state, imported.tokens) == ("warm", LENGTHS[1])
        talk = saved.talk.fork("alice")
        third = talk.turn(llm, LENGTHS[2])
        assert third.token_ids == saved.third.token_ids
        assert third.report.cache_state == "warm" and third.report.match == "EXTEND" and third.report.saved
        assert third.report.computed_tokens == saved.third.report.computed_tokens
        assert third.report.lost_tokens == 0
    with open_llm(saved.model, tmp_path / "there") as llm:
        fourth = talk.turn(llm, LENGTHS[3])
        assert (fourth.token_ids, fourth.report.cache_state) == (saved.fourth.token_ids, "warm")
    assert verify_folder(tmp_path / "there").problems == ()


@pytest.mark.slow
def test_the_file_is_nobody_elses_and_replaces_none(saved: Saved, archive: Path, tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        exported = export_agent(saved.cache_dir, "alice", tmp_path / "file")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    assert exported.num_bytes == (tmp_path / "file").stat().st_size and exported.missing_blocks == 0
    assert (tmp_path / "file").read_bytes() == archive.read_bytes()
    with pytest.raises(Conflict):
        export_agent(saved.cache_dir, "alice", tmp_path / "file")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(Conflict):
        export_agent(saved.cache_dir, "alice", tmp_path / "link")
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["file", "link"]


def test_a_job_that_cannot_be_queued_pins_nothing(
    saved: Saved, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **fields: object) -> None:
        raise StoreError("the writer has ended")

    with open_llm(saved.model, tmp_path / "there") as llm:
        with monkeypatch.context() as patch:
            patch.setattr(DiskJobs, "submit", refuse)
            with pytest.raises(StoreError):
                llm.import_agent("alice", archive)
            with pytest.raises(StoreError):
                inside.on_loop(llm, inside.async_engine(llm).call(CreateAgent("carol")))
        assert inside.pinned(inside.engine_of(llm)) == []
        assert llm.import_agent("alice", archive).tokens == LENGTHS[1]


@pytest.mark.parametrize("agent", ["bob", "../alice", "*", ""])
def test_an_agent_that_is_not_there(agent: str, saved: Saved, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        export_agent(saved.cache_dir, agent, tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_an_agent_of_several_models(saved: Saved, tmp_path: Path) -> None:
    folder = saved.copy(tmp_path / "cache")
    for path in (saved.other_cache_dir / "agents").rglob("*"):
        target = folder / "agents" / path.relative_to(saved.other_cache_dir / "agents")
        target.mkdir(exist_ok=True) if path.is_dir() else target.write_bytes(path.read_bytes())
    with pytest.raises(Conflict, match="2 models"):
        export_agent(folder, "alice", tmp_path / "file")
    model = next((saved.cache_dir / "agents").iterdir()).name
    assert export_agent(folder, "alice", tmp_path / "file", fingerprint=model).blocks > 0
    assert ArchiveFile(tmp_path / "file").model[:16] == model


@pytest.mark.slow
def test_all_conversations_under_another_name(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path / "here") as llm:
        first = llm.generate(make_ids(700, seed=1), greedy(3), agent="alice")
        second = llm.generate(make_ids(300, seed=2), greedy(3), agent="alice", salt="s")
        assert len(llm.agent("alice").lineages) == 2
    assert export_agent(tmp_path / "here", "alice", tmp_path / "file").lineages == 2
    with open_llm(model, tmp_path / "there") as llm:
        assert len(llm.import_agent("bob", tmp_path / "file").lineages) == 2
        for done, seed, salt in ((first, 1, ""), (second, 2, "s")):
            prompt = [*make_ids(700 if seed == 1 else 300, seed=seed), *done.token_ids, *make_ids(9)]
            again = llm.generate(prompt, greedy(3), agent="bob", salt=salt)
            assert (again.report.match, again.report.cache_state) == ("EXTEND", "warm")
            assert again.token_ids == cold_ids(llm, prompt, 3)
        assert [agent.id for agent in llm.agents()] == ["bob"]


@pytest.mark.parametrize("architecture", [slow("gemma3_text"), "deepseek_v2"])
def test_windows_and_latents(architecture: str, model_folder: ModelFolder, tmp_path: Path) -> None:
    model, talk = model_folder(architecture), TokenTalk()
    with open_llm(model, tmp_path / "here") as llm:
        talk.turn(llm, 900)
    export_agent(tmp_path / "here", "alice", tmp_path / "file")
    with open_llm(model, tmp_path / "there") as llm:
        llm.import_agent("alice", tmp_path / "file")
        turn = talk.turn(llm, 930)
        assert turn.report.cache_state == "warm" and turn.report.computed_tokens < 60
        assert turn.token_ids == cold_ids(llm, turn.prompt_token_ids, 3)


def test_blocks_that_are_gone_are_computed_again(saved: Saved, tmp_path: Path) -> None:
    folder = saved.copy(tmp_path / "cache")
    for path in sorted((folder / "blocks").rglob("*.safetensors"))[:2]:
        path.unlink()
    assert export_agent(folder, "alice", tmp_path / "file").missing_blocks == 2
    with open_llm(saved.model, tmp_path / "there") as llm:
        llm.import_agent("alice", tmp_path / "file")
        assert saved.talk.fork("alice").turn(llm, LENGTHS[2]).token_ids == saved.third.token_ids


@pytest.mark.slow
def test_beside_an_engine_that_is_at_work(model: Path, tmp_path: Path) -> None:
    """Whatever moment it is read at, the file is the agent after some turn."""
    talk, ended = TokenTalk(), threading.Event()
    lengths: list[int] = []

    def export() -> None:
        while not ended.is_set():
            file = tmp_path / f"file{len(lengths)}"
            lengths.append(export_agent(tmp_path / "here", "alice", file).tokens)

    with open_llm(model, tmp_path / "here") as llm:
        talk.turn(llm, 100)
        exporting = threading.Thread(target=export)
        exporting.start()
        turns = [100, *range(160, 160 + 12 * 60, 60)]
        for length in turns[1:]:
            talk.turn(llm, length)
        ended.set()
        exporting.join()
    assert set(lengths) <= set(turns) and lengths == sorted(lengths)
    with open_llm(model, tmp_path / "there") as llm:
        for number in range(len(lengths)):
            assert llm.import_agent(f"a{number}", tmp_path / f"file{number}").tokens == lengths[number]


# -- refused ----------------------------------------------------------------------------------------------------------


@dataclass
class Parts:
    """An archive taken apart; `sealed` puts it together with digests that are right."""

    agent: str
    model: str
    contents: list[tuple[str, bytes]]

    @classmethod
    def of(cls, path: Path) -> Parts:
        file = ArchiveFile(path)
        return cls(file.agent, file.model, [(each.kind, file.read(each, 1 << 30)) for each in file.contents])

    def sealed(self) -> bytes:
        described = [
            {"kind": kind, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for kind, data in self.contents
        ]
        return seal(b"".join(data for _, data in self.contents), self.agent, self.model, described)

    def manifest(self, **changes: Any) -> bytes:
        self.contents[0] = ("manifest", encode_manifest(replace(decode_manifest(self.contents[0][1]), **changes)))
        return self.sealed()


def seal(contents: bytes, agent: Any, model: Any, described: Any) -> bytes:
    index = json.dumps({"agent": agent, "model": model, "contents": described}).encode()
    length = len(index).to_bytes(8, "little")
    return _MAGIC + contents + index + length + hashlib.sha256(_MAGIC + index + length).digest()


def flipped(data: bytes, at: int) -> bytes:
    at %= len(data)
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def with_block_flipped(parts: Parts, at: int) -> bytes:
    kind, data = parts.contents[-1]
    parts.contents[-1] = kind, flipped(data, at)
    return parts.sealed()


def without(parts: Parts, number: int) -> bytes:
    del parts.contents[number]
    return parts.sealed()


def doubled(parts: Parts, *numbers: int) -> bytes:
    parts.contents[2:2] = [parts.contents[number] for number in numbers]
    return parts.sealed()


def with_log_of(parts: Parts, other: Parts) -> bytes:
    parts.contents[1] = other.contents[1]
    return parts.sealed()


def with_block_of(parts: Parts, other: Parts) -> bytes:
    parts.contents[-1] = other.contents[-1]
    return parts.sealed()


def renamed(parts: Parts, number: int, kind: str) -> bytes:
    parts.contents[number] = kind, parts.contents[number][1]
    return parts.sealed()


def with_spec(parts: Parts, **changes: Any) -> bytes:
    base = replace(decode_manifest(parts.contents[0][1]).base, **changes)
    return parts.manifest(caches=(base,))


DAMAGES: dict[str, Callable[[bytes, Parts, Parts], bytes]] = {
    "empty": lambda data, parts, other: b"",
    "something else": lambda data, parts, other: b"PK\3\4" + data,
    "another version": lambda data, parts, other: data.replace(b"agent 1\n", b"agent 2\n", 1),
    "cut off": lambda data, parts, other: data[:-1],
    "cut in half": lambda data, parts, other: data[: len(data) // 2],
    "nothing but its end": lambda data, parts, other: data[len(data) // 2 :],
    "something added": lambda data, parts, other: data + b"\0",
    "something put in": lambda data, parts, other: data[:100] + b"\0" + data[100:],
    "a bit of the manifest": lambda data, parts, other: flipped(data, len(_MAGIC) + 50),
    "a bit of the log": lambda data, parts, other: flipped(data, len(_MAGIC) + len(parts.contents[0][1]) + 90),
    "a bit of a block": lambda data, parts, other: flipped(data, len(data) // 2),
    "a bit of the index": lambda data, parts, other: flipped(data, -60),
    "a bit of the length": lambda data, parts, other: flipped(data, -40),
    "a bit of the digest": lambda data, parts, other: flipped(data, -1),
    "a huge index": lambda data, parts, other: data[:-40] + b"\xff" * 8 + data[-32:],
    "zeros": lambda data, parts, other: bytes(len(data)),
    "an index that is none": lambda data, parts, other: seal(b"", "alice", parts.model, 5),
    "an index with lengths below zero": lambda data, parts, other: seal(
        b"", "alice", parts.model, [{"kind": "log", "bytes": -1, "sha256": ""}]
    ),
    "no contents": lambda data, parts, other: seal(b"", "alice", parts.model, []),
    # From here on all digests are right.
    "a block whose bytes were changed": lambda data, parts, other: with_block_flipped(parts, -1),
    "a block whose header was changed": lambda data, parts, other: with_block_flipped(parts, 60),
    "a block twice": lambda data, parts, other: doubled(parts, -1),
    "a block of another model": lambda data, parts, other: with_block_of(parts, other),
    "a lineage twice": lambda data, parts, other: doubled(parts, 0, 1),
    "no log": lambda data, parts, other: without(parts, 1),
    "no manifest": lambda data, parts, other: without(parts, 0),
    "the log of another model": lambda data, parts, other: with_log_of(parts, other),
    "a content of an unknown kind": lambda data, parts, other: renamed(parts, -1, "script"),
    "a manifest among the blocks": lambda data, parts, other: renamed(parts, -1, "manifest"),
    "the manifest of another agent": lambda data, parts, other: parts.manifest(id="bob"),
    "a path as the agent's id": lambda data, parts, other: replace(parts, agent="../../x").manifest(id="../../x"),
    "a path as the lineage's id": lambda data, parts, other: parts.manifest(lineage="../x"),
    "another model in the manifest": lambda data, parts, other: parts.manifest(model=other.model),
    "another salt": lambda data, parts, other: parts.manifest(salt="x"),
    "more tokens saved than there are": lambda data, parts, other: with_spec(parts, num_saved=10**6),
    "another cache": lambda data, parts, other: with_spec(parts, spec="0" * 40),
    "other groups": lambda data, parts, other: with_spec(parts, groups=("a", "b")),
    "another model": lambda data, parts, other: other.sealed(),
    "another model that says it is this one": lambda data, parts, other: replace(other, model=parts.model).sealed(),
}


@pytest.fixture(scope="module")
def other_parts(saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> Parts:
    file = tmp_path_factory.mktemp("archive") / "other"
    export_agent(saved.other_cache_dir, "alice", file)
    return Parts.of(file)


def test_what_is_taken_apart_and_put_together_is_the_same(archive: Path) -> None:
    """So each of the damages below is the only one."""
    assert Parts.of(archive).sealed() == archive.read_bytes()


@pytest.mark.slow
def test_a_file_that_is_not_right_changes_nothing(
    saved: Saved, archive: Path, other_parts: Parts, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    assert len(DAMAGES) >= 22
    with open_llm(saved.model, tmp_path / "there") as llm:
        TokenTalk("carol").turn(llm, 300)
        before, stats = everything(tmp_path / "there"), llm.stats()
        for name, damage in DAMAGES.items():
            with subtests.test(name):
                file = tmp_path / "damaged"
                others = replace(other_parts, contents=list(other_parts.contents))
                file.write_bytes(damage(archive.read_bytes(), Parts.of(archive), others))
                with pytest.raises(ArchiveRejected):
                    llm.import_agent("alice", file)
                assert everything(tmp_path / "there") == before
                assert [agent.id for agent in llm.agents()] == ["carol"]
        assert llm.stats() == stats
        assert llm.import_agent("alice", archive).cache_state == "warm"


def test_paths_that_lead_to_no_file(saved: Saved, archive: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with open_llm(saved.model, tmp_path / "there") as llm:
        for path in (tmp_path / "nothing", tmp_path, tmp_path / "pipe", "/dev/zero", "a\0b", "/dev/null"):
            with pytest.raises(ArchiveRejected):
                llm.import_agent("alice", path)
        assert llm.agents() == []


def test_a_name_that_is_taken(saved: Saved, archive: Path, tmp_path: Path) -> None:
    with open_llm(saved.model, tmp_path / "there") as llm:
        llm.import_agent("alice", archive)
        before = everything(tmp_path / "there")
        for name in ("alice", "ALICE"):
            with pytest.raises(Conflict):
                llm.import_agent(name, archive)
        assert everything(tmp_path / "there") == before


@pytest.mark.parametrize("name", ["alice", "ALICE"])
def test_the_name_of_an_agent_that_is_unavailable(name: str, saved: Saved, archive: Path, tmp_path: Path) -> None:
    """A newer release has written it: it stays as it is."""
    folder = saved.copy(tmp_path / "cache")
    manifest = next((folder / "agents").glob("*/alice.json"))
    fields = json.loads(manifest.read_bytes())
    manifest.write_bytes(_signed({**fields, "format_version": "3"}))
    before = everything(folder)
    with open_llm(saved.model, folder) as llm:
        with pytest.raises(RequestError):
            llm.import_agent(name, archive)
        assert llm.import_agent("bob", archive).cache_state == "warm"
    assert {file: everything(folder)[file] for file in before if file not in BESIDE} == {
        file: data for file, data in before.items() if file not in BESIDE
    }


def test_a_file_that_changes_while_it_is_brought_in(
    saved: Saved, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verified and read again later: what is written is verified once more, and the beginning of it goes."""
    file = tmp_path / "file"
    file.write_bytes(archive.read_bytes())
    monkeypatch.setattr("agentcache.store.archived_agent._CHUNK_BYTES", 1)
    with open_llm(saved.model, tmp_path / "there") as llm:
        from agentcache.store.store import Store

        write = Store.write_blocks

        def damage_then_write(self: Store, blocks: Any) -> int:
            data = file.read_bytes()
            with file.open("r+b") as opened:  # in place: another file under that name would not be seen
                opened.seek(len(data) // 2)
                opened.write(bytes(len(data) // 4))
            return write(self, blocks)

        with monkeypatch.context() as patch:
            patch.setattr(Store, "write_blocks", damage_then_write)
            with pytest.raises(StoreError, match="damaged"):
                llm.import_agent("alice", file)
        left = everything(tmp_path / "there").keys() - BESIDE
        assert [name for name in left if Path(name).name != LABEL] == []
        assert llm.agents() == []
        llm.import_agent("alice", archive)


def test_an_agent_that_the_disk_budget_cannot_hold(saved: Saved, archive: Path, tmp_path: Path) -> None:
    """Nobody else's blocks go for it."""
    with open_llm(saved.model, tmp_path / "there", disk_budget=archive.stat().st_size * 3 // 4) as llm:
        TokenTalk("carol").turn(llm, 300)
        before = everything(tmp_path / "there")
        with pytest.raises(StoreError, match="budget"):
            llm.import_agent("alice", archive)
        assert everything(tmp_path / "there") == before


def test_others_make_room_for_it(saved: Saved, archive: Path, tmp_path: Path) -> None:
    with open_llm(saved.model, tmp_path / "there", disk_budget=archive.stat().st_size * 5 // 4) as llm:
        llm.generate(make_ids(300, seed=99), greedy(3), agent="carol")
        assert llm.import_agent("alice", archive).cache_state == "warm"
        assert saved.talk.fork("alice").turn(llm, LENGTHS[2]).token_ids == saved.third.token_ids
