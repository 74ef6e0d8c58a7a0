"""How large a prompt's chunks are while nobody decodes: by what the device does, and beside windows too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentcache.blocks.allocator import window_blocks, windows_bytes
from agentcache.engine import open as opening
from agentcache.metal_kernels.kernel_text import NO_DEVICE
from tests.conftest import ModelFolder
from tests.marks import slow
from tests.serving import inside
from tests.serving.by_hand import by_hand
from tests.serving.conversation import greedy, make_ids

STALL = 0.1  # seconds, as `max_stall_ms` is by default
WINDOW = 512
WINDOWED = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
}


@pytest.fixture
def accelerated(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done where there is a GPU: nothing of it depends on one."""
    monkeypatch.setattr(opening, "device_kind", lambda: "metal")


def rates(cache_dir: Path) -> dict[str, str]:
    written: dict[str, str] = json.loads((cache_dir / "prefill.json").read_text())
    return written


@pytest.mark.usefixtures("accelerated")
def test_later_starts_cut_prompts_as_the_first_one_did(model: Path, tmp_path: Path) -> None:
    with by_hand(model, tmp_path) as hand:
        first = inside.largest_chunk(hand.engine)
        stats = hand.engine.stats()
        assert (hand.live_blocks, stats.computed_tokens) == (0, 0), "nothing is left of measuring"
        assert not inside.resident_nodes(hand.engine)
    [(model_and_device, seconds)] = rates(tmp_path).items()
    assert 0 < float(seconds) < 1
    assert (tmp_path / "prefill.json").stat().st_mode & 0o777 == 0o600
    for token_seconds, chunk in ((seconds, first), (repr(4 * STALL / 600), 512), ("1.0", 256)):
        (tmp_path / "prefill.json").write_text(json.dumps({model_and_device: token_seconds, "another model": "2.0"}))
        with by_hand(model, tmp_path) as hand:
            assert inside.largest_chunk(hand.engine) == chunk
        assert rates(tmp_path) == {model_and_device: token_seconds, "another model": "2.0"}


@pytest.mark.usefixtures("accelerated")
@pytest.mark.parametrize("damage", ["soon", *map(slow, ["nan", "inf", "-1.0", "0", ""])])
def test_what_is_no_rate_is_measured_again(damage: str, model: Path, tmp_path: Path) -> None:
    with by_hand(model, tmp_path):
        [model_and_device] = rates(tmp_path)
    for content in (json.dumps({model_and_device: damage}), damage):
        (tmp_path / "prefill.json").write_text(content)
        with by_hand(model, tmp_path):
            assert 0 < float(rates(tmp_path)[model_and_device]) < 1


def test_on_a_cpu_chunks_stay_small_and_nothing_is_measured(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "device_kind", lambda: NO_DEVICE)
    with by_hand(model, tmp_path) as hand:
        assert inside.largest_chunk(hand.engine) == 256
    assert not (tmp_path / "prefill.json").exists()


def test_windows_are_computed_in_large_chunks_within_what_was_reckoned(
    model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As much at once as without windows; the answer is that of small chunks."""
    model, said = model_folder("mistral_sliding", **WINDOWED), []
    monkeypatch.setattr(opening, "device_kind", lambda: "metal")
    monkeypatch.setattr(opening, "agreed_token_seconds", lambda *_: 1e-6)
    for chunk in (256, 2048):
        with by_hand(model, tmp_path / str(chunk), ram_budget=1 << 30) as hand:
            assert inside.largest_chunk(hand.engine) == 2048
            if chunk == 256:
                inside.set_chunk(hand.engine, chunk)
            receiver, held = hand.submit(make_ids(1400), greedy(4)), 0
            while not receiver.is_done:
                hand.step()
                blocks = inside.most_blocks_held(hand.engine)
                held = max([held, *(count for name, count in blocks.items() if name.startswith("window"))])
            said.append(receiver.token_ids)
            assert window_blocks(WINDOW, 256) - 2 <= held <= window_blocks(WINDOW, chunk)
            assert (held > window_blocks(WINDOW)) is (chunk == 2048)
    assert said[0] == said[1]


@pytest.mark.slow
def test_where_memory_is_short_windows_are_computed_in_smaller_chunks(
    model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_folder("mistral_sliding", **WINDOWED)
    monkeypatch.setattr(opening, "device_kind", lambda: "metal")
    monkeypatch.setattr(opening, "agreed_token_seconds", lambda *_: 1e-6)
    with by_hand(model, tmp_path / "look") as hand:
        groups = inside.loaded_model(hand.engine).spec.groups
    for most in (1024, 512, 256):
        budget = 8 * windows_bytes(groups, most) if most > 256 else 2 * windows_bytes(groups)
        with by_hand(model, tmp_path / str(most), ram_budget=budget) as hand:
            assert inside.largest_chunk(hand.engine) == most
            longest = inside.max_cached_tokens(hand.engine)
            receiver = hand.submit(make_ids(min(longest, 1800) - 4), greedy(4))
            hand.run(receiver)
            assert len(receiver.token_ids) == 4, "what is said to fit does"


def test_prompts_that_begin_alike_are_computed_once_in_large_chunks_too(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    """Those who wait take a chunk's blocks before its windows are left."""
    model = model_folder("mistral_sliding", **WINDOWED)
    common, own, computed, said = make_ids(1300), 20, [], []
    for chunk in (256, 2048):
        with by_hand(model, tmp_path / str(chunk)) as hand:
            inside.set_chunk(hand.engine, chunk)
            receivers = [hand.submit([*common, *make_ids(own, seed=seed)], greedy(3)) for seed in (1, 2, 3)]
            hand.run(*receivers)
            computed.append(hand.engine.stats().computed_tokens)
            said.append([receiver.token_ids for receiver in receivers])
    assert said[0] == said[1]
    behind_the_last_block = 3 * (1300 % 256 + own + 2)
    assert max(computed) <= 1300 + behind_the_last_block


def test_a_chunk_for_which_there_is_no_memory_is_computed_in_parts(model_folder: ModelFolder, tmp_path: Path) -> None:
    """What is there suffices for small chunks: nobody is sent away for the sake of a large one."""
    model = model_folder("mistral_sliding", **WINDOWED | {"sliding_window": 32})
    with by_hand(model, tmp_path) as hand:
        hand.engine.cache.allocator.give_back()  # to what a short sequence needs
        hand.engine.cache.allocator.headroom = lambda: 0
        inside.set_chunk(hand.engine, 2048)
        receiver = hand.submit(make_ids(1000), greedy(3))
        hand.run(receiver)
        assert len(receiver.token_ids) == 3
