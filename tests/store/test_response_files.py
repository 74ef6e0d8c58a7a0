"""Stored responses on disk: found by their ids after a restart, bounded, gone with their agent, and never a path."""

from __future__ import annotations

import json
import stat
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache.errors import DiskBudgetExceeded, StoreError
from agentcache.store import response_files as module
from agentcache.store.response_files import ResponseFiles, StoredResponse, TooLarge, new_id
from tests.store.stored_responses import response_files, stored


def file_of(root: Path, agent: str = "alice") -> Path:
    return root.resolve() / "agents" / "model" / f"{agent}.responses"


def has(files: ResponseFiles, *responses: StoredResponse) -> list[bool]:
    return [files.find(response.id) is not None for response in responses]


def test_a_response_and_its_items_are_found_after_a_restart(tmp_path: Path) -> None:
    first = stored("alice", "one")
    second = stored("alice", "two", previous=first.id)
    files = response_files(tmp_path)
    assert files.add("alice", first) > 0 and files.add("alice", second) > 0
    for each in (files, response_files(tmp_path)):
        assert each.find(first.id) == ("alice", first)
        item = second.output[0]
        found = each.continued(second.id, [str(item["id"]), "msg_unknown"])
        assert (found.agent, found.responses, found.items) == ("alice", (first, second), {item["id"]: item})
        assert found.missing == ("msg_unknown",)
        assert list(found.history()) == [*first.input, *first.output, *second.input, *second.output]
    assert stat.S_IMODE(file_of(tmp_path).stat().st_mode) == 0o600


def test_what_responses_share_is_stored_once(tmp_path: Path) -> None:
    files, items = response_files(tmp_path), ({"role": "user", "content": "x" * 10_000},)
    for number in range(50):
        files.add("alice", replace(stored("alice"), input=items, echo={"tools": ["y" * 10_000]}, body=body(number)))
    assert file_of(tmp_path).stat().st_size < 40_000
    again = response_files(tmp_path)
    for number in range(50):
        found = again.find(str(body(number)["id"]))
        assert found is not None and found[1].input == items


def body(number: int) -> dict[str, object]:
    return {"id": new_id("resp", "alice")[:13] + f"{number:024x}", "output": []}


def test_a_response_is_deleted_where_the_disk_is_full(tmp_path: Path) -> None:
    files, (gone, kept) = response_files(tmp_path), (stored("alice", "one"), stored("alice", "two"))
    for each in (gone, kept):
        files.add("alice", each)
    full = response_files(tmp_path, budget=file_of(tmp_path).stat().st_size)
    assert full.delete(gone.id)
    assert has(response_files(tmp_path), gone, kept) == [False, True]


@pytest.mark.parametrize("damage", ["torn", "flipped", "no JSON", "foreign value"])
def test_a_damaged_line_costs_nothing_but_itself(damage: str, tmp_path: Path) -> None:
    files, responses = response_files(tmp_path), [stored("alice", str(number)) for number in range(3)]
    for response in responses:
        files.add("alice", response)
    lines = file_of(tmp_path).read_bytes().splitlines(keepends=True)
    broken = {
        "torn": lines[2][:-9],
        "flipped": lines[2].replace(b'"yes"', b'"yea"'),
        "no JSON": module._checksum(b"{") + b" {\n",
        "foreign value": lines[2].replace(b'"values":{', b'"values":[{').replace(b"}}", b"}]}", 1),
    }
    file_of(tmp_path).write_bytes(lines[0] + lines[1] + broken[damage])
    again = response_files(tmp_path)
    assert has(again, *responses) == [True, True, False]
    new = stored("alice", "new")
    again.add("alice", new)
    assert has(response_files(tmp_path), *responses, new) == [True, True, False, True]


def test_a_torn_line_costs_no_conversation_of_a_long_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, responses = response_files(tmp_path), [stored("alice", f"{number}" * 10_000) for number in range(8)]
    for response in responses:
        files.add("alice", response)
    monkeypatch.setattr(module, "MOST_BYTES", file_of(tmp_path).stat().st_size * 3 // 2)
    with file_of(tmp_path).open("ab") as file:
        file.write(b"torn")
    again, new = response_files(tmp_path), stored("alice", "x" * 10_000)
    again.add("alice", new)
    assert has(response_files(tmp_path), *responses, new) == [True] * 9


def test_an_item_is_found_without_a_look_at_every_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, response = response_files(tmp_path), stored("alice")
    for agent in ("alice", *(f"agent{number}" for number in range(20))):
        files.add(agent, response if agent == "alice" else stored(agent))
    looks: list[str] = []
    monkeypatch.setattr(module, "_tag", looks.append)
    assert files.continued(response.id, [str(response.output[0]["id"])] * 50).missing == ()
    assert not looks


@pytest.mark.parametrize(
    "line", [b"", b"\n", b"x" * 33, b"[]", b"\xff" * 100, b"{}", b'{"response": {}, "values": {}}', b"[" * 100_000]
)
def test_any_file_can_be_read(line: bytes, tmp_path: Path) -> None:
    response_files(tmp_path)
    file_of(tmp_path).write_bytes(module._checksum(line) + b" " + line + b"\n")
    files, new = response_files(tmp_path), stored("alice")
    assert files.find(new.id) is None
    files.add("alice", new)
    assert has(response_files(tmp_path), new) == [True]


@pytest.mark.parametrize(
    "unknown", ["", "x", "resp_", "../../x", "resp_../../../../etc/passwd", "resp_" + "f" * 32, "/" * 41, "\x00", "ü"]
)
def test_unknown_ids_are_not_found_and_never_paths(unknown: str, tmp_path: Path) -> None:
    files = response_files(tmp_path)
    files.add("alice", stored("alice"))
    assert files.find(unknown) is None and not files.delete(unknown)
    assert files.continued(unknown, [unknown]).missing == (unknown, unknown)


def test_a_response_that_continues_itself_ends(tmp_path: Path) -> None:
    files, response = response_files(tmp_path), stored("alice")
    files.add("alice", replace(response, body={**response.body, "previous_response_id": response.id}))
    assert len(files.continued(response.id, []).responses) == 1


def test_a_chain_with_a_gap_names_what_is_missing(tmp_path: Path) -> None:
    files, first = response_files(tmp_path), stored("alice")
    second = stored("bob", previous=first.id)
    files.add("alice", first)
    files.add("bob", second)
    assert files.continued(second.id, []).agent == "bob"
    assert len(files.continued(second.id, []).responses) == 2, "of two agents"
    assert files.delete(first.id) and not file_of(tmp_path).exists()
    assert files.continued(second.id, []).missing == (first.id,)


def test_deleting_leaves_the_others(tmp_path: Path) -> None:
    files, responses = response_files(tmp_path), [stored("alice", str(number)) for number in range(3)]
    for response in responses:
        files.add("alice", response)
    assert files.delete(responses[0].id)
    for each in (files, response_files(tmp_path)):
        assert has(each, *responses) == [False, True, True]
    assert b'"content":"0"' not in file_of(tmp_path).read_bytes(), "its words are gone"


def test_files_go_with_their_agents(tmp_path: Path) -> None:
    agents = {"alice", "bob"}
    files = response_files(tmp_path, is_saved=agents.__contains__)
    responses = [stored("alice"), stored("bob")]
    for agent, response in zip(["alice", "bob"], responses, strict=True):
        files.add(agent, response)
    files.remove("alice")
    assert has(files, *responses) == [False, True] and not file_of(tmp_path).exists()
    agents.remove("bob")
    with pytest.raises(StoreError, match="not on disk"):
        files.add("bob", stored("bob"))
    again = response_files(tmp_path, is_saved=agents.__contains__)
    again.remove_orphans()
    assert not file_of(tmp_path, "bob").exists()


def test_a_file_keeps_its_bound_and_the_latest_conversations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 40_000)
    monkeypatch.setattr(module, "MOST_LINE_BYTES", 20_000)
    files, text = response_files(tmp_path), "x" * 900
    talk, last, old = list[StoredResponse](), None, stored("alice", text)
    files.add("alice", old)
    for number in range(60):
        files.add("alice", stored("alice", f"{text}{number}"))
        if number % 6 == 0:
            last = stored("alice", f"{text} talk {number}", previous=None if last is None else last.id)
            talk.append(last)
            files.add("alice", last)
        assert file_of(tmp_path).stat().st_size <= 40_000
    assert last is not None
    for each in (files, response_files(tmp_path)):
        assert each.continued(last.id, []).responses == tuple(talk), "what is continued stays as a whole"
        assert each.find(old.id) is None
    with pytest.raises(TooLarge):
        files.add("alice", stored("alice", "y" * 20_000))
    assert has(files, last) == [True]


def test_a_conversation_beyond_the_bound_keeps_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 20_000)
    files, talk = response_files(tmp_path), [stored("alice")]
    for number in range(40):
        files.add("alice", talk[-1])
        talk.append(stored("alice", f"{'x' * 900}{number}", previous=talk[-1].id))
    files.add("alice", talk[-1])
    assert file_of(tmp_path).stat().st_size <= 20_000
    assert files.find(talk[-1].id) and files.find(talk[-2].id) and not files.find(talk[0].id)


def test_ram_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_RAM_BYTES", 3_000)
    files = response_files(tmp_path)
    responses = {f"agent{number}": stored(f"agent{number}", "x" * 1000) for number in range(9)}
    for agent, response in responses.items():
        files.add(agent, response)
    assert 0 < len(files._contents) < 4
    assert has(files, *responses.values()) == [True] * 9


ODD = {  # values that take most of RAM by their length
    "lists": "[]",
    "objects": "{}",
    "entries": '{"":0}',
    "nested": '{"":{"":{"":[]}}}',
    "texts": '"ab"',
    "wide": '"a\\ud83d\\ude00"',
}


@pytest.mark.parametrize("odd", ODD)
def test_values_take_a_few_times_their_weight_of_ram(odd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would take more is refused before it is written, and left out before it is read."""
    files, responses = response_files(tmp_path), [stored("alice", str(number)) for number in range(6)]
    values = json.loads(f"[{','.join([ODD[odd]] * 4_000)}]")
    whole = [
        replace(each, input=({"role": "user", "content": [number, values]},)) for number, each in enumerate(responses)
    ]
    for each in whole:
        files.add("alice", each)
    size = most = file_of(tmp_path).stat().st_size
    monkeypatch.setattr(module, "MOST_BYTES", most)
    monkeypatch.setattr(module, "MOST_LINE_BYTES", most // 2)
    del files, values
    tracemalloc.start()
    found = has(response_files(tmp_path), *whole)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The file, a line as bytes and as text, and what was read of it.
    assert peak < size + 2 * size / 6 + 5 * 2 * most + 100_000, (peak, size)
    if odd in ("lists", "objects", "nested"):
        assert not all(found)
    again = response_files(tmp_path)
    big = replace(stored("alice"), input=({"role": "user", "content": [[]] * 100_000},))
    with pytest.raises(TooLarge, match="values"):
        again.add("alice", big)


def test_the_disk_budget_holds(tmp_path: Path) -> None:
    files = response_files(tmp_path, budget=2_500)
    first = stored("alice", "x" * 1000)
    files.add("alice", first)
    for text in ("y" * 1000, "z" * 3000):
        with pytest.raises(DiskBudgetExceeded):
            files.add("alice", stored("alice", text))
    assert has(files, first) == has(response_files(tmp_path), first) == [True]


@pytest.mark.parametrize("step", ["before-append", "appended", "synced", "before-temp", "before-replace", "replaced"])
def test_a_write_that_fails_leaves_what_was_there(step: str, tmp_path: Path) -> None:
    def fault(name: str) -> None:
        if name == f"responses-{step}" and is_on:
            raise OSError(5, "an error")

    is_on, first, second = False, stored("alice", "1"), stored("alice", "2")
    files = response_files(tmp_path, fault=fault)
    files.add("alice", first)
    files.add("alice", second)
    is_on = True
    with pytest.raises(OSError, match="an error"):
        files.delete(first.id) if "replace" in step or "temp" in step else files.add("alice", stored("alice"))
    is_on = False
    assert has(files, first, second) == has(response_files(tmp_path), first, second) == [step != "replaced", True]
    files.add("alice", new := stored("alice"))
    assert has(files, new) == has(response_files(tmp_path), new) == [True]


def test_a_file_that_was_removed_is_written_anew(tmp_path: Path) -> None:
    files, responses = response_files(tmp_path), [stored("alice", "1"), stored("alice", "2")]
    files.add("alice", responses[0])
    file_of(tmp_path).unlink()
    files.add("alice", responses[1])
    assert has(response_files(tmp_path), *responses) == [True, True]


@settings(max_examples=15, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from("ard"), st.integers(0, 9), st.text(max_size=5)), max_size=25))
def test_any_order_of_changes(steps: list[tuple[str, int, str]], tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("responses")
    files, known = response_files(root), dict[str, tuple[str, StoredResponse]]()
    for step, number, text in steps:
        agent, ids = f"agent{number % 2}", list(known)
        if step == "a":
            previous = ids[number % len(ids)] if ids else None
            response = stored(agent, text, previous=previous, said=text)
            files.add(agent, response)
            known[response.id] = agent, response
        elif step == "r":
            files = response_files(root)
        elif ids:
            assert files.delete(ids[number % len(ids)])
            del known[ids[number % len(ids)]]
    assert {each: files.find(each) for each in known} == known
    lines = [line for path in root.glob("agents/*/*") for line in path.read_bytes().splitlines()]
    assert sorted(json.loads(line[33:])["response"]["id"] for line in lines) == sorted(known)
