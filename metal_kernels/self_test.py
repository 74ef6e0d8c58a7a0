"""Compares kernels with their definition in a child process, which a faulty kernel can end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.metal_kernels.append import Places, append, packed_alone
from agentcache.metal_kernels.block_cases import FULL_BITS, OPEN_BITS, BlockCase, Blocks, unpacked_with_residuals
from agentcache.metal_kernels.cases import TOLERANCE, Arenas, Case, LatentCase, Latents, as_computed, as_mlx, error
from agentcache.metal_kernels.decode import decode
from agentcache.metal_kernels.definition import (
    PackedNumpy,
    packed,
    quantise_by_channel,
    row_of,
    stored,
    unpacked,
    unpacked_by_channel,
)
from agentcache.metal_kernels.latent_decode import LatentShape
from agentcache.metal_kernels.seal import seal
from agentcache.metal_kernels.tiling import HeadShape, ResidualKind
from agentcache.metal_kernels.unpack import unpack

_COMMAND = (sys.executable, "-m", "agentcache.metal_kernels.self_test")
_SECONDS = 180  # a Mac's first compilation can be slow
_APPENDED_BITS = 4
_SCALE_ROUNDING = 1e-2  # scales and biases are float16
_TIE = 2e-2  # steps
_DTYPES = {str(dtype): dtype for dtype in TOLERANCE}

Shape = HeadShape | LatentShape
_SHAPES: dict[str, type[Shape]] = {kind.__name__: kind for kind in (HeadShape, LatentShape)}


@dataclass(frozen=True)
class Verdict:
    """Whether kernels are right, or why not."""

    right: bool
    reason: str = ""


def try_kernels(shape: Shape, command: Sequence[str] = _COMMAND) -> Verdict:
    """Check all steps of a shape in a child process."""
    asked = json.dumps({"of": type(shape).__name__, **vars(shape), "dtype": str(shape.dtype)})
    try:
        done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Verdict(False, f"the self-test did not run: {error}")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Verdict(False, f"the self-test ended with code {done.returncode}: {last[:200]}")
    try:
        wrong = [str(name) for name in json.loads(done.stdout.strip().splitlines()[-1])["wrong"]]
    except (ValueError, LookupError, TypeError):
        return Verdict(False, "the self-test said nothing that can be read")
    return Verdict(False, f"wrong numbers: {', '.join(wrong)}") if wrong else Verdict(True)


def wrong_steps(shape: Shape) -> list[str]:
    return [f"{name} (off by {off:.2g})" for name, off in differences(shape) if not off <= TOLERANCE[shape.dtype]]


def differences(shape: Shape) -> Iterator[tuple[str, float]]:
    """Largest difference from the definition, by kind of step."""
    return _of_latents(shape) if isinstance(shape, LatentShape) else _of_heads(shape)


def _of_heads(shape: HeadShape) -> Iterator[tuple[str, float]]:
    for name, case in steps(shape).items():
        arenas = Arenas.of(case)
        yield name, error(arenas.decoded(), arenas.expected())
    if shape.by_channel or (shape.bits, shape.value_bits) != (_APPENDED_BITS, _APPENDED_BITS):
        return  # the other kernels have 4 bits by token
    if has_residuals(shape):
        arenas = Arenas.of(_case(shape, lengths=(300,)))
        for side in (*(["keys"] if shape.key_rank else []), *(["values"] if shape.value_rank else [])):
            out, expected = arenas.unpacked(side)
            yield f"unpack of {side} with residuals", _relative_error(out, expected)
            for form in ("full", "open"):
                out, expected = unpacked_with_residuals(arenas.case, side, form == "open")
                yield f"unpack of {side} of {form} blocks with residuals", _relative_error(out, expected)
        return  # the other kernels have no residuals
    arenas = Arenas.of(_case(shape, lengths=(300,)))
    [ids] = arenas.block_ids
    values = unpack(as_mlx(arenas.keys), mx.array(np.array(ids, np.int32)), 300, shape.dtype)
    yield "append", _pack_error(shape)
    yield from _steps_from_append(shape)
    yield "unpack", error(values[0], as_computed(row_of(arenas.keys, ids, 300), shape.dtype))
    yield from _of_full_and_open_blocks(shape)


def _of_full_and_open_blocks(shape: HeadShape) -> Iterator[tuple[str, float]]:
    yield "append in 8 bits", _pack_error(shape, OPEN_BITS)
    blocks = Blocks.of(BlockCase(shape.dim, shape.kv_heads, group=shape.group_size))
    keys, values = blocks.sides
    out = unpack(as_mlx(keys.full), mx.array(blocks.full_ids, mx.int32), 300, shape.dtype)
    yield "unpack of full blocks", error(out[0], as_computed(keys.full_row(blocks.full_ids, 300), shape.dtype))
    out = unpack(as_mlx(values.opened), mx.array(blocks.open_ids, mx.int32), 300, shape.dtype, bits=OPEN_BITS)
    yield "unpack of open blocks", error(out[0], as_computed(values.open_row(blocks.open_ids, 300), shape.dtype))
    yield "seal", seal_error(blocks)
    yield "reopen", reopen_error(blocks)
    yield "append, seal and unpack", _append_and_seal_error(shape)


def _append_and_seal_error(shape: HeadShape) -> float:
    blocks = Blocks.of(BlockCase(shape.dim, shape.kv_heads, 1, shape.group_size))
    opened, full = blocks.arrays()
    new = mx.random.normal((2, 1, shape.kv_heads, 1, shape.dim), key=mx.random.key(7)).astype(shape.dtype)
    sources, targets = (mx.array(slots, mx.int32) for slots in (blocks.open_ids, blocks.full_ids))
    last = Places(sources * BLOCK_SIZE + BLOCK_SIZE - 1, mx.array([1, 1], mx.int32))
    written = seal(opened, full, sources, targets, append([new[0], new[1]], opened, last, shape.group_size))
    out = unpack((full[0], full[1], full[2]), targets, BLOCK_SIZE, shape.dtype, written)
    mx.eval(out)
    keys = blocks.with_open(opened).keys.open_values(blocks.open_ids)
    wanted = quantise_by_channel(keys)
    values = as_computed(unpacked_by_channel(wanted), shape.dtype)
    return _beyond(np.array(out.astype(mx.float32)), values, _ties(keys, wanted, -2))


def seal_error(blocks: Blocks) -> float:
    """Largest difference of `seal` from its definition."""
    made = blocks.sealed()
    keys, values = (side.open_values(blocks.open_ids) for side in blocks.sides)
    wanted = quantise_by_channel(keys)
    of_keys = _beyond(made.keys.full_values(blocks.full_ids), unpacked_by_channel(wanted), _ties(keys, wanted, -2))
    return max(of_keys, _beyond_a_step(made.values.full_values(blocks.full_ids), values, made.case, FULL_BITS))


def reopen_error(blocks: Blocks) -> float:
    """Largest difference of `reopen` from its definition."""
    made = blocks.reopened()
    return max(
        _beyond_a_step(after.open_values(blocks.open_ids), before.full_values(blocks.full_ids), made.case, OPEN_BITS)
        for before, after in zip(blocks.sides, made.sides, strict=True)
    )


def _beyond_a_step(made: np.ndarray, values: np.ndarray, case: BlockCase, bits: int) -> float:
    # Values that were packed before are equally far apart: a group's range may be right between two scales.
    data, scales, biases = stored(values.astype(np.float32), case.group_size, bits)
    steps = np.abs(scales).repeat(case.group_size, axis=-1)
    return _beyond(made, unpacked((data, scales, biases), bits), steps + _SCALE_ROUNDING)


def _relative_error(out: mx.array, expected: np.ndarray) -> float:
    return error(out, expected) / max(1.0, float(np.nanmax(np.abs(expected))))


def _pack_error(shape: HeadShape, bits: int = _APPENDED_BITS) -> float:
    x = as_computed(np.random.default_rng(0).standard_normal((2, shape.kv_heads, 5, shape.dim)), shape.dtype)
    made = packed_alone(mx.array(x.astype(np.float32)).astype(shape.dtype), shape.group_size, bits)
    data, scales, biases = (np.array(part) for part in made)
    wanted = unpacked(stored(x, shape.group_size, bits), bits)
    return _beyond(unpacked((data, scales, biases), bits), wanted, _ties(x, packed(x, shape.group_size, bits), -1))


def _ties(x: np.ndarray, wanted: PackedNumpy, axis: int) -> np.ndarray:
    """Accepted differences: a step for values between two, since either is right."""
    _, scales, biases = wanted
    count = x.shape[axis] // scales.shape[axis]
    steps = scales.repeat(count, axis)
    places = (x - biases.repeat(count, axis)) / steps
    accepted: np.ndarray = np.where(np.abs(places % 1 - 0.5) < _TIE, np.abs(steps), 0.0) + _SCALE_ROUNDING
    return accepted


def _beyond(made: np.ndarray, wanted: np.ndarray, accepted: np.ndarray) -> float:
    """Largest difference that is not accepted."""
    difference = np.abs(made - wanted)
    return float(np.where(difference <= accepted, 0.0, difference).max())


def _steps_from_append(shape: HeadShape) -> Iterator[tuple[str, float]]:
    arenas = Arenas.of(_case(shape, lengths=(300,)))
    [ids], [length] = arenas.block_ids, arenas.case.lengths
    place = ids[length // BLOCK_SIZE] * BLOCK_SIZE + length % BLOCK_SIZE
    places = Places(mx.array([place], mx.int32), mx.array([1, 1], mx.int32))
    new = mx.random.normal((2, 1, shape.kv_heads, 1, shape.dim), key=mx.random.key(7)).astype(shape.dtype)
    for by in ("decode", "unpack"):
        keys, values = as_mlx(arenas.keys), as_mlx(arenas.values)
        written = append([new[0], new[1]], [*keys, *values], places, shape.group_size)
        if by == "decode":
            out = decode(
                arenas.computed_queries(), keys, values, arenas.plan(), scale=arenas.case.scale, written=written
            )
        else:
            out = unpack(keys, mx.array(ids, mx.int32), length + 1, shape.dtype, written)
        mx.eval(out)
        after = arenas.holding(place, new, shape.group_size)
        expected = after.expected() if by == "decode" else as_computed(row_of(after.keys, ids, length + 1), shape.dtype)
        yield f"append and {by}", error(out, expected if by == "decode" else expected[None])


def _of_latents(shape: LatentShape) -> Iterator[tuple[str, float]]:
    for name, case in latent_steps(shape).items():
        latents = Latents.of(case)
        yield name, error(latents.decoded(), latents.expected())
    if shape.bits != _APPENDED_BITS:
        return
    yield "append", _pack_error(HeadShape(shape.dim, 1, shape.heads, shape.group_size, shape.dtype))
    latents = Latents.of(_latent_case(shape, lengths=(300,)))
    [ids], [length] = latents.block_ids, latents.case.lengths
    place = ids[length // BLOCK_SIZE] * BLOCK_SIZE + length % BLOCK_SIZE
    places = Places(mx.array([place], mx.int32), mx.array([1, 1], mx.int32))
    new = mx.random.normal((1, 1, 1, shape.dim), key=mx.random.key(7)).astype(shape.dtype)
    after = latents.holding(place, new)
    for by in ("latent decode", "unpack"):
        arrays = as_mlx(latents.packed)
        written = append([new], arrays, places, shape.group_size)
        if by == "unpack":
            out = unpack(arrays, mx.array(ids, mx.int32), length + 1, shape.dtype, written)
            expected = as_computed(row_of(after.packed, ids, length + 1), shape.dtype)[None]
        else:
            out, expected = latents.decoded_from(arrays, written), after.expected()
        yield f"append and {by}", error(out, expected)


def latent_steps(shape: LatentShape) -> dict[str, LatentCase]:
    """Steps of this shape; the first compiles all kernels."""
    return {
        "latent decode": _latent_case(shape, lengths=(300, 17)),
        "latent decode of several tokens": _latent_case(shape, lengths=(40,), num_tokens=3),
    }


def _latent_case(shape: LatentShape, **of_step: object) -> LatentCase:
    of_shape = {"rank": shape.rank, "rope": shape.rope, "heads": shape.heads, "bits": shape.bits}
    return LatentCase(**of_shape, dtype=shape.dtype, group=shape.group_size, **of_step)  # type: ignore[arg-type]


def steps(shape: HeadShape) -> dict[str, Case]:
    """Steps that use all kernels of this shape."""
    # The first block that is read by channel is block 1.
    prefix, length = (2, 300 + BLOCK_SIZE) if shape.by_channel else (1, 300)
    if has_residuals(shape):
        return {
            "decode with residuals": _case(shape, lengths=(length, 17)),
            "decode with residuals, window, softcap and sinks": _case(
                shape, lengths=(length, 17), window=64, softcap=20.0, sinks=True
            ),
            "decode of several tokens with residuals": _case(shape, lengths=(length, 250), num_tokens=16),
        }
    return {
        "decode": _case(shape, lengths=(length, 17)),
        "decode with window, softcap and sinks": _case(
            shape, lengths=(length, 17), window=64, softcap=20.0, sinks=True
        ),
        "decode of several tokens": _case(shape, lengths=(length, 250), num_tokens=16),
        "decode of a shared prefix": _case(shape, lengths=(length, length - 10, 20), prefix=prefix),
    }


def has_residuals(shape: HeadShape) -> bool:
    return bool(shape.value_rank or shape.key_rank)


def _case(shape: HeadShape, **of_step: object) -> Case:
    heads = {"dim": shape.dim, "kv_heads": shape.kv_heads, "gqa": shape.queries_per_head}
    kept = {"dtype": shape.dtype, "group": shape.group_size, "by_channel": shape.by_channel}
    kept |= {"first_is_open": shape.by_channel}
    kept |= {"bits": shape.bits, "value_bits": shape.value_bits}
    residuals = {name: getattr(shape, name) for name in ResidualKind._fields}
    return Case(**heads, **kept, **residuals, **of_step)  # type: ignore[arg-type]


def main() -> None:
    asked = json.load(sys.stdin)
    shape = _SHAPES[asked.pop("of")](**asked | {"dtype": _DTYPES[asked["dtype"]]})
    print(json.dumps({"wrong": wrong_steps(shape)}))


if __name__ == "__main__":
    main()
