"""Lists of cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from agentcache.metal_kernels.block_cases import BlockCase
from agentcache.metal_kernels.cases import Case, LatentCase


def lengths_of(length: int, rows: int) -> tuple[int, ...]:
    """Rows before the step so that the longest holds `length` tokens behind it; the others are a little shorter."""
    return tuple(max(0, length - 1 - 3 * row) for row in range(rows))


def ids(cases: Sequence[Case | LatentCase], plain: Case | LatentCase = Case()) -> list[str]:  # noqa: B008
    """Names for pytest: what differs from a plain case."""
    return [
        "-".join(
            f"{name}={value}".replace("mlx.core.", "")
            for name, value in case.__dict__.items()
            if value != getattr(plain, name)
        )
        or "plain"
        for case in cases
    ]


_LENGTHS = (1, 255, 256, 257, 4095)
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
_DIMS = (64, 96, 128, 192, 256)
#: All shapes, lengths and numbers of rows; for a device.
DECODE_CASES = [
    *(Case(dim, 2, gqa, dtype, lengths_of(257, 3)) for dim in _DIMS for gqa in (1, 3, 4, 7, 8, 16) for dtype in DTYPES),
    *(
        Case(dim=dim, dtype=dtype, lengths=lengths_of(length, rows))
        for length in _LENGTHS
        for rows in (1, 3, 16)
        for dtype in DTYPES
        for dim in (64, 128)
    ),
    *(
        Case(dim=dim, kv_heads=2, dtype=dtype, lengths=(700, 300, 20), num_tokens=tokens, window=window)
        for dim in _DIMS
        for dtype in (mx.float32, mx.float16)
        for tokens, window in ((1, 100), (1, 256), (3, 300), (8, None))
    ),
    *(
        Case(dtype=dtype, lengths=(40, 700), softcap=20.0, sinks=sinks, num_tokens=tokens)
        for dtype in DTYPES
        for sinks in (False, True)
        for tokens in (1, 5)
    ),
    *(
        Case(dim, 2, gqa, dtype, (600, 777, 512, 1023, 513), prefix=2, num_tokens=tokens)
        for dim in _DIMS
        for gqa in (1, 4, 16)
        for dtype in DTYPES
        for tokens in (1, 2)
    ),
]
RESIDUAL_CASES = [
    *(
        Case(dim, 2, gqa, dtype, lengths_of(257, 3), value_rank=rank)
        for dim in (64, 128, 256)
        for gqa in (1, 4, 7, 16)
        for dtype in DTYPES
        for rank in (1, 8, 12, 16, 64)
    ),
    *(
        Case(dtype=dtype, lengths=lengths_of(length, rows), value_rank=16)
        for length in _LENGTHS
        for rows in (1, 3, 16)
        for dtype in DTYPES
    ),
    *(
        Case(dtype=dtype, lengths=(300, 700), num_tokens=tokens, window=window, sinks=True, softcap=20.0, value_rank=8)
        for dtype in DTYPES
        for tokens, window in ((1, 100), (5, 256), (16, None))
    ),
]
KEY_RESIDUAL_CASES = [
    *(
        Case(dim, 2, gqa, dtype, lengths_of(257, 3), value_rank=8, key_rank=rank, pairs=pairs, **of_keys)
        for dim, pairs in ((64, 32), (96, 16), (128, 64), (192, 96), (256, 128))
        for gqa in (1, 4, 7, 16)
        for dtype in DTYPES
        for rank, of_keys in ((1, {"normed": True}), (16, {}), (64, {"interleaved": True}))
    ),
    *(
        Case(dtype=dtype, lengths=lengths_of(length, rows), value_rank=16, key_rank=16, pairs=64)
        for length in _LENGTHS
        for rows in (1, 3, 16)
        for dtype in DTYPES
    ),
    *(
        Case(64, 2, 4, dtype, (300, 700), tokens, window, 20.0, True, key_rank=8, pairs=24, normed=True)
        for dtype in DTYPES
        for tokens, window in ((1, 100), (5, 256), (16, None))
    ),
]
#: Keys of full blocks by channel, and keys and values in 8 bits.
FORM_CASES = [
    *(
        Case(dim, 2, gqa, dtype, (300, 513, 40), by_channel=True)
        for dim in (32, *_DIMS)
        for gqa in (1, 4, 7, 16)
        for dtype in DTYPES
    ),
    *(
        Case(dtype=dtype, lengths=lengths_of(length, rows), by_channel=True)
        for length in (*_LENGTHS, 272, 321)
        for rows in (1, 16)
        for dtype in DTYPES
    ),
    *(
        Case(dim, 2, 4, dtype, (700, 300, 250), tokens, window, 20.0, True, by_channel=True)
        for dim in (64, 128, 256)
        for dtype in DTYPES
        for tokens, window in ((1, 100), (3, 300), (8, None), (32, None))
    ),
    *(
        Case(dim, 2, gqa, dtype, (600, 777, 512, 1023, 513), prefix=2, num_tokens=tokens, by_channel=True)
        for dim in (64, 128, 256)
        for gqa in (1, 4, 16)
        for dtype in DTYPES
        for tokens in (1, 2)
    ),
    *(
        Case(dim, 2, 4, dtype, (300, 700), value_rank=rank, key_rank=rank, pairs=pairs, by_channel=True, **of_keys)
        for dim, pairs in ((64, 32), (128, 64), (256, 128))
        for dtype in DTYPES
        for rank, of_keys in ((1, {"normed": True}), (16, {}), (64, {"interleaved": True}))
    ),
    *(
        Case(dim, 2, gqa, dtype, (300, 700), bits=8, value_bits=value_bits, prefix=prefix)
        for dim in (64, 96, 128, 256)
        for gqa in (1, 4, 16)
        for dtype in DTYPES
        for value_bits, prefix in ((8, 0), (8, 1), (4, 0))
    ),
]
#: Those by channel, with block 0 in its open form.
FIRST_CASES = [replace(case, first_is_open=True) for case in FORM_CASES if case.by_channel]
UNPACK_RESIDUAL_CASES = [
    Case(dim, 2, dtype=dtype, lengths=(length,), value_rank=rank, key_rank=rank, pairs=pairs, **of_keys)
    for dim, pairs, rank, length in ((64, 32, 5, 257), (96, 16, 8, 40), (128, 64, 16, 259), (256, 128, 64, 21))
    for dtype in DTYPES
    for of_keys in ({"normed": True}, {"interleaved": True})
]
UNPACK_CASES = [
    Case(dim=dim, kv_heads=2, dtype=dtype, lengths=(length,))
    for dim in _DIMS
    for dtype in DTYPES
    for length in (1, 257)
]
BLOCK_CASES = [BlockCase(dim, 2, 3, group) for dim, group in ((32, 32), *((dim, None) for dim in _DIMS), (128, 32))]
#: Of latents: the sizes that models have, and those of the tests' models.
LATENT_SHAPES = [
    LatentCase(512, 64, 16, mx.bfloat16, (300,)),
    LatentCase(512, 64, 3, mx.float32, (257,)),
    LatentCase(512, 64, 20, mx.float16, (40,), bits=8),
    LatentCase(64, 32, 3, mx.float32, (40, 256)),
    LatentCase(128, 64, 9, mx.float16, (40, 256), num_tokens=3),
    LatentCase(512, 64, 128, mx.bfloat16, (256,)),
    LatentCase(512, 64, 64, mx.float16, (300,)),
    LatentCase(512, 64, 16, mx.float32, (300, 90), bits=8),
    LatentCase(256, 64, 8, mx.float32, (257,), num_tokens=2),
    LatentCase(64, 32, 1, mx.bfloat16, (257,), bits=8),
    LatentCase(64, 64, 17, mx.float16, (257,)),
    LatentCase(256, 32, 40, mx.bfloat16, (40, 257)),
]
#: And all lengths and numbers of rows, of the size that is served most; for a device.
LATENT_CASES = [
    *LATENT_SHAPES,
    *(
        LatentCase(512, 64, 16, dtype, lengths_of(length, rows), bits=bits)
        for length in _LENGTHS
        for rows in (1, 3, 16)
        for dtype in DTYPES
        for bits in (4, 8)
    ),
]
