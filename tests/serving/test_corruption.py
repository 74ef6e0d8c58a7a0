"""Whatever is wrong in the cache folder: the answer is the cold one, it is counted, and later turns are cached."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import xxhash

from agentcache.llm import Completion
from tests.conftest import ModelFolder
from tests.serving.conversation import TokenTalk, cold_ids, greedy, make_ids, open_llm, outcome
from tests.tokenizers_factory import byte_bpe

LENGTHS = (300, 530, 550, 580)
Damage = Callable[[Path], None]


@dataclass(frozen=True)
class Saved:
    """An agent after two turns, what its next two say, and another model's agent with the same tokens."""

    model: Path
    cache_dir: Path
    talk: TokenTalk
    third: Completion
    fourth: Completion
    other_cache_dir: Path

    def copy(self, folder: Path) -> Path:
        return Path(shutil.copytree(self.cache_dir, folder))


@pytest.fixture(scope="module")
def saved(model: Path, model_folder: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved")
    other = model_folder("mistral", seed=1, num_hidden_layers=2)
    talk, other_talk = TokenTalk(), TokenTalk()
    with open_llm(model, folder / "cache") as llm:
        talk.turn(llm, LENGTHS[0])
        talk.turn(llm, LENGTHS[1])
    with open_llm(other, folder / "other") as llm:
        other_talk.turn(llm, LENGTHS[0])
        other_talk.turn(llm, LENGTHS[1])
    with open_llm(model, Path(shutil.copytree(folder / "cache", folder / "hot"))) as llm:
        going_on = talk.fork("alice")
        third, fourth = going_on.turn(llm, LENGTHS[2]), going_on.turn(llm, LENGTHS[3])
        assert third.report.cache_state == "warm"
        assert cold_ids(llm, third.prompt_token_ids, 3) == third.token_ids
    return Saved(model, folder / "cache", talk, third, fourth, folder / "other")


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


def other_version(path: Path) -> None:
    head, tensors = header_of(path)
    version = metadata_of(path)["format_version"]
    sign(path, head.replace(f'"format_version":"{version}"'.encode(), b'"format_version":"9"'), tensors)


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
    "other version": first_block(other_version),
    "other tokens": first_block(other_tokens),
    "NaN scales": first_block(nan_scales),
    "a folder": first_block(lambda path: (path.unlink(), path.mkdir())),
    "a link": first_block(lambda path: path.symlink_to(path.rename(path.parents[2] / "elsewhere"))),
}


def check_answer(saved: Saved, cache_dir: Path, *, quarantined: bool) -> Completion:
    """The third turn says what it should; and after a restart, the fourth is warm again with nothing wrong."""
    talk = saved.talk.fork("alice")
    with open_llm(saved.model, cache_dir) as llm:
        third = talk.turn(llm, LENGTHS[2])
        assert third.token_ids == saved.third.token_ids
        assert third.report.saved
        assert (llm.stats().quarantined > 0) == quarantined
        assert bool(list((cache_dir / "quarantine").iterdir())) == quarantined
    with open_llm(saved.model, cache_dir) as llm:
        fourth = talk.turn(llm, LENGTHS[3])
        assert fourth.token_ids == saved.fourth.token_ids
        assert fourth.report.cache_state == "warm"
        assert fourth.report.computed_tokens < 60
        assert llm.stats().quarantined == 0
    return third


@pytest.mark.parametrize("damage", BLOCK_DAMAGE.values(), ids=BLOCK_DAMAGE)
def test_a_wrong_block_file(damage: Damage, saved: Saved, tmp_path: Path) -> None:
    cache_dir = saved.copy(tmp_path / "cache")
    damage(cache_dir)
    third = check_answer(saved, cache_dir, quarantined=True)
    assert third.report.computed_tokens > saved.third.report.computed_tokens


def test_a_lost_block_file(saved: Saved, tmp_path: Path) -> None:
    cache_dir = saved.copy(tmp_path / "cache")
    block_files(cache_dir)[1].unlink()
    check_answer(saved, cache_dir, quarantined=False)


def test_a_block_file_that_is_lost_while_the_engine_runs(saved: Saved, tmp_path: Path) -> None:
    cache_dir = saved.copy(tmp_path / "cache")
    with open_llm(saved.model, cache_dir) as llm:
        block_files(cache_dir)[1].unlink()
        third = saved.talk.fork("alice").turn(llm, LENGTHS[2])
        assert third.token_ids == saved.third.token_ids
        assert third.report.saved


def test_every_block_file_is_wrong(saved: Saved, tmp_path: Path) -> None:
    cache_dir = saved.copy(tmp_path / "cache")
    for path in block_files(cache_dir):
        flip(path, -1)
    third = check_answer(saved, cache_dir, quarantined=True)
    assert third.report.computed_tokens == third.report.prompt_tokens
    assert third.report.cache_state == "cold"


def test_a_restore_leaves_wrong_files_out(saved: Saved, tmp_path: Path) -> None:
    cache_dir = saved.copy(tmp_path / "cache")
    flip(block_files(cache_dir)[2], -1)
    with open_llm(saved.model, cache_dir) as llm:
        assert llm.restore("alice").restored_bytes > 0
        assert llm.stats().quarantined == 1
        third = saved.talk.fork("alice").turn(llm, LENGTHS[2])
        assert third.token_ids == saved.third.token_ids
        assert third.report.cached_tokens.own == 256


def test_blocks_of_another_model_of_equal_shape(saved: Saved, tmp_path: Path) -> None:
    """Its files under this model's names, with the same tokens at the same places."""
    cache_dir = saved.copy(tmp_path / "cache")
    others = block_files(saved.other_cache_dir)
    for mine in block_files(cache_dir):
        place = [metadata_of(mine)[key] for key in ("num_blocks", "group")]
        other = next(path for path in others if [metadata_of(path)[key] for key in ("num_blocks", "group")] == place)
        mine.write_bytes(other.read_bytes())
    check_answer(saved, cache_dir, quarantined=True)


MANIFEST_DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "emptied": lambda path: path.write_bytes(b""),
    "bit flipped at the start": lambda path: flip(path, 0),
    "bit flipped in the middle": lambda path: flip(path, path.stat().st_size // 2),
    "bit flipped near the end": lambda path: flip(path, -20),
}


@pytest.mark.parametrize("pattern", ["*/*.json", "*/*.log"])
@pytest.mark.parametrize("damage", MANIFEST_DAMAGE.values(), ids=MANIFEST_DAMAGE)
def test_a_wrong_manifest_or_log(damage: Callable[[Path], object], pattern: str, saved: Saved, tmp_path: Path) -> None:
    cache_dir = saved.copy(tmp_path / "cache")
    [path] = (cache_dir / "agents").glob(pattern)
    damage(path)
    third = check_answer(saved, cache_dir, quarantined=True)
    assert third.report.match == "NEW"
    assert third.report.computed_tokens == third.report.prompt_tokens


def test_a_renamed_manifest(saved: Saved, tmp_path: Path) -> None:
    """Another agent cannot take over a memory by its file's name."""
    cache_dir = saved.copy(tmp_path / "cache")
    [path] = (cache_dir / "agents").glob("*/*.json")
    path.rename(path.with_name("bob.json"))
    with open_llm(saved.model, cache_dir) as llm:
        assert llm.agents() == []
        assert llm.stats().quarantined == 1
        assert saved.talk.fork("bob").turn(llm, LENGTHS[2]).token_ids == saved.third.token_ids


def test_two_models_take_turns_in_one_folder(saved: Saved, model_folder: ModelFolder, tmp_path: Path) -> None:
    """Neither sees the other's agents or blocks, and both find their own again."""
    cache_dir = saved.copy(tmp_path / "cache")
    other = model_folder("mistral", seed=1, num_hidden_layers=2)
    with open_llm(other, cache_dir) as llm:
        assert llm.agents() == []
        prompt = list(saved.third.prompt_token_ids)
        cold = llm.generate(prompt, greedy(3), agent="alice")
        assert cold.report.computed_tokens == len(prompt)
    check_answer(saved, cache_dir, quarantined=False)
    with open_llm(other, cache_dir) as llm:
        [alice] = llm.agents()
        assert alice.cache_state == "warm"


@pytest.mark.parametrize("change", ["template", "no template", "tokenizer"])
def test_another_tokenizer_or_template_is_another_model(change: str, saved: Saved, tmp_path: Path) -> None:
    cache_dir, model = saved.copy(tmp_path / "cache"), Path(shutil.copytree(saved.model, tmp_path / "model"))
    if change == "tokenizer":
        path = model / "tokenizer.json"
        path.write_text(path.read_text().replace('"<think>"', '"<thinking>"'))
    elif change == "no template":
        byte_bpe(model, vocab_size=500, chat_template=None)
    else:
        path = model / "tokenizer_config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | {"chat_template": config["chat_template"] + "\n"}))
    with open_llm(model, cache_dir) as llm:
        turn = saved.talk.fork("alice").turn(llm, LENGTHS[2])
        assert turn.report.match == "NEW"
        assert turn.report.computed_tokens == turn.report.prompt_tokens
        assert llm.stats().quarantined == 0
    check_answer(saved, cache_dir, quarantined=False)


def test_the_same_model_under_another_name_hits(saved: Saved, tmp_path: Path) -> None:
    cache_dir, model = saved.copy(tmp_path / "cache"), Path(shutil.copytree(saved.model, tmp_path / "renamed"))
    with open_llm(model, cache_dir) as llm:
        turn = saved.talk.fork("alice").turn(llm, LENGTHS[2])
        assert outcome(turn) == outcome(saved.third)
        assert turn.report.cache_state == "warm"


def test_salts_do_not_share(saved: Saved, tmp_path: Path) -> None:
    ids = make_ids(300, seed=9)
    with open_llm(saved.model, tmp_path) as llm:
        costs = [llm.generate(ids, greedy(1), salt=salt).report.computed_tokens for salt in ("", "", "a", "a", "b")]
    assert [cost == 300 for cost in costs] == [True, False, True, False, True]
