"""Extras of a block: small named tensors and texts in its file's header, e.g. the quantisation error.

Canonical JSON under the file's checksum; not part of the block's address, and not read by attention.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from agentcache.errors import BlockRejected, StoreError
from agentcache.kv.block_layout import Array
from agentcache.kv.spec import DTYPES

Extra: TypeAlias = "str | Array"
Extras: TypeAlias = "Mapping[str, Extra]"

MAX_EXTRAS_BYTES = 1 << 16
_NAME = re.compile(r"[a-z0-9][a-z0-9_.]{0,63}")
_SAFETENSORS_NAMES = {dtype: name for name, dtype in DTYPES.items() if name != "BF16"}


def encode_extras(extras: Extras) -> str:
    """The extras as text; empty if there are none.

    Raises:
        StoreError: invalid name, type or dtype, a float that is not finite, or over `MAX_EXTRAS_BYTES`.
    """
    if not extras:
        return ""
    if bad := [name for name in extras if not _NAME.fullmatch(name)]:
        raise StoreError(f"{bad[0]!r:.80} cannot name an extra of a block")
    text = _dump({name: _encode(name, value) for name, value in extras.items()})
    if len(text) > MAX_EXTRAS_BYTES:
        raise StoreError(f"the block's extras take {len(text)} bytes, at most {MAX_EXTRAS_BYTES} are allowed")
    return text


def decode_extras(text: str) -> dict[str, Extra]:
    """Parse the extras. Raises BlockRejected unless `text` is output of `encode_extras`."""
    try:
        extras = {name: _decode(value) for name, value in json.loads(text).items()}
        if encode_extras(extras) == text:
            return extras
    except (StoreError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise BlockRejected(f"the block's extras are unreadable: {error!r:.100}") from None
    raise BlockRejected("the block's extras are not as they were written")


def _dump(extras: Mapping[str, Any]) -> str:
    return json.dumps(extras, sort_keys=True, separators=(",", ":"))


def _encode(name: str, value: Extra) -> Any:
    if isinstance(value, str):
        return value
    if value.dtype not in _SAFETENSORS_NAMES or not np.isfinite(value).all():
        raise StoreError(f"extra {name} has values that are not finite, or of type {value.dtype}")
    data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
    return {"dtype": _SAFETENSORS_NAMES[value.dtype], "shape": list(value.shape), "data": data}


def _decode(value: Any) -> Extra:
    if isinstance(value, str):
        return value
    data = base64.b64decode(value["data"], validate=True)
    return np.frombuffer(data, DTYPES[value["dtype"]]).reshape(value["shape"])
