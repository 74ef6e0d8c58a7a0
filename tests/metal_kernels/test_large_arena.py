"""Arenas of more than 2^31 words: places in them fit into no int."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from agentcache.metal_kernels.block_cases import BlockCase, Blocks
from agentcache.metal_kernels.cases import Arenas, Case, LatentCase, Latents, as_mlx, error
from agentcache.metal_kernels.decode import decode
from agentcache.metal_kernels.decode_text import DECODE
from agentcache.metal_kernels.kernel_text import KernelText
from agentcache.metal_kernels.latent_text import LATENT_DECODE
from agentcache.metal_kernels.seal import REOPEN, SEAL, reopen, seal
from agentcache.metal_kernels.unpack import UNPACK, unpack
from tests.marks import slow
from tests.metal_kernels.conftest import Emulate
from tests.metal_kernels.emulator.capture import Launch
from tests.metal_kernels.emulator.marks import needs_clang
from tests.metal_kernels.emulator.run import PLAIN, EmulatedKernel, KernelFindings

pytestmark = needs_clang

CASE = Case(64, lengths=(40,))
SLOT = (1 << 20) + 5  # whose data begin behind 2^31 words


def far(part: np.ndarray, slot: int) -> np.ndarray:
    """An arena that has one block, far behind; the rest of its memory is never touched, so it takes none."""
    count = SLOT + 1
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = mmap.mmap(-1, count * part[0].nbytes, flags=flags)
    arena = np.frombuffer(memory, part.dtype).reshape(count, *part.shape[1:])
    arena[SLOT] = part[slot]
    return arena


def lazy(part: np.ndarray) -> mx.array:
    """Stands for the arena while the launch is captured; never evaluated."""
    return mx.zeros((SLOT + 1, *part.shape[1:]), mx.uint32 if part.dtype == np.uint32 else mx.float16)


def as_it_is(launch: Launch) -> Launch:
    return launch


def install(
    kernel: KernelText,
    memory: dict[int, np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
    edit: Callable[[Launch], Launch],
) -> None:
    made = EmulatedKernel(PLAIN, kernel=replace(kernel).metal, edit=edit, memory=memory)
    monkeypatch.setitem(kernel.__dict__, "metal", made)


def decoded(monkeypatch: pytest.MonkeyPatch, edit: Callable[[Launch], Launch]) -> float:
    arenas = Arenas.of(CASE)
    [[slot]] = arenas.block_ids
    parts = [*arenas.keys, *arenas.values]
    install(DECODE, {1 + index: far(part, slot) for index, part in enumerate(parts)}, monkeypatch, edit)
    expected = arenas.expected()
    arenas.block_ids = [[SLOT]]
    queries = mx.array(arenas.queries.astype(np.float32))
    keys, values = (tuple(map(lazy, side)) for side in (arenas.keys, arenas.values))
    return error(decode(queries, keys, values, arenas.plan(), scale=CASE.scale), expected)


def decoded_by_channel(monkeypatch: pytest.MonkeyPatch, edit: Callable[[Launch], Launch]) -> float:
    arenas = Arenas.of(replace(CASE, lengths=(300,), by_channel=True))
    assert arenas.open_blocks is not None
    [[slot]] = arenas.block_ids
    parts = [*arenas.keys, *arenas.values]
    install(DECODE, {1 + index: far(part, slot) for index, part in enumerate(parts)}, monkeypatch, edit)
    expected = arenas.expected()
    arenas.block_ids = [[SLOT]]
    full = [tuple(map(lazy, side)) for side in (arenas.keys, arenas.values)]
    opened = [as_mlx(side) for side in (arenas.open_blocks.keys, arenas.open_blocks.values)]
    out = decode(
        arenas.computed_queries(),
        *(full[0], full[1], arenas.plan()),
        scale=CASE.scale,
        open_keys=opened[0],
        open_values=opened[1],
    )
    return error(out, expected)


def unpacked(monkeypatch: pytest.MonkeyPatch, edit: Callable[[Launch], Launch]) -> float:
    arenas = Arenas.of(CASE)
    [[slot]] = arenas.block_ids
    near = unpack(tuple(map(mx.array, arenas.keys)), mx.array([slot], mx.int32), 40, mx.float32)
    memory = {index: far(part, slot) for index, part in enumerate(arenas.keys)}
    install(UNPACK, memory, monkeypatch, edit)
    out = unpack(tuple(map(lazy, arenas.keys)), mx.array([SLOT], mx.int32), 40, mx.float32)
    return error(out, np.array(near).astype(np.float64))


def latents_decoded(monkeypatch: pytest.MonkeyPatch, edit: Callable[[Launch], Launch]) -> float:
    latents = Latents.of(LatentCase(lengths=(40,)))
    [[slot]] = latents.block_ids
    memory = {2 + index: far(part, slot) for index, part in enumerate(latents.packed)}
    install(LATENT_DECODE, memory, monkeypatch, edit)
    expected = latents.expected()
    latents.block_ids = [[SLOT]]
    data, scales, biases = map(lazy, latents.packed)
    return error(latents.decoded_from((data, scales, biases), None), expected)


def sealed(monkeypatch: pytest.MonkeyPatch, edit: Callable[[Launch], Launch]) -> float:
    return _changed(SEAL, monkeypatch, edit)


def reopened(monkeypatch: pytest.MonkeyPatch, edit: Callable[[Launch], Launch]) -> float:
    return _changed(REOPEN, monkeypatch, edit)


def _changed(kernel: KernelText, monkeypatch: pytest.MonkeyPatch, edit: Callable[[Launch], Launch]) -> float:
    """Largest difference of blocks from far behind from those from near."""
    is_seal = kernel is SEAL
    change = seal if is_seal else reopen
    blocks = Blocks.of(BlockCase(64, 1, 1))
    near, made = blocks.arrays(), blocks.arrays()
    sources, targets = (
        mx.array(slots, mx.int32) for slots in (blocks.open_ids, blocks.full_ids)[:: 1 if is_seal else -1]
    )
    mx.eval(change(*near, sources, targets))
    parts = [part for side in blocks.sides for part in (side.opened if is_seal else side.full)]
    [slot] = sources.tolist()
    first = kernel.inputs.index("open_kq" if is_seal else "kq")
    memory = {first + index: far(part, slot) for index, part in enumerate(parts)}
    emulated = EmulatedKernel(
        PLAIN,
        kernel=replace(kernel).metal,
        edit=edit,
        memory=memory,
        changed=[kernel.inputs.index(name) for name in kernel.changed],
    )
    monkeypatch.setitem(kernel.__dict__, "metal", emulated)
    arrays = (list(map(lazy, parts)), made[1]) if is_seal else (made[0], list(map(lazy, parts)))
    mx.eval(change(*arrays, mx.array([SLOT], mx.int32), targets))
    pairs = zip(made[is_seal], near[is_seal], strict=True)
    return max(float(np.nanmax(np.abs(np.array(one).astype(float) - np.array(other)))) for one, other in pairs)


@pytest.mark.parametrize(
    "compute", [decoded, decoded_by_channel, slow(unpacked), latents_decoded, sealed, slow(reopened)]
)
def test_a_block_behind_two_to_the_31_words(
    compute: Callable[..., float], emulate: Emulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate()
    assert compute(monkeypatch, as_it_is) <= 1e-5


@pytest.mark.parametrize(
    ("compute", "old", "new"),
    [
        (decoded, "data + at * WORDS", "data + int(at) * WORDS"),
        slow(unpacked, "data + ((row + t * RUNS) * (D", "data + ((int(row) + t * RUNS) * (D"),
        (sealed, "open_kq + ((from + 8 * t)", "open_kq + ((int(from) + 8 * t)"),
        slow(reopened, "data + (from + 8 * t)", "data + (int(from) + 8 * t)"),
        (latents_decoded, "(row * (D / 32) + part) * BITS", "int(row * (D / 32) + part) * BITS"),
        (decoded_by_channel, "data[(rows.row + token) * WORDS", "data[int(rows.row + token) * WORDS"),
    ],
)
def test_a_place_that_overflows_is_found(
    compute: Callable[..., float], old: str, new: str, emulate: Emulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate()
    with pytest.raises(KernelFindings) as found:
        compute(monkeypatch, lambda launch: launch.edited(old, new))
    assert "undefined" in found.value.kinds
