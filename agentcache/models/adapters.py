"""Adapters fitted to a model."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from agentcache.errors import UnsupportedAdapter
from agentcache.kv.spec import CacheSpec
from agentcache.models.adapter_files import MAX_BYTES, LowRank, ModuleName, read_folder
from agentcache.models.attention import activation_dtype
from agentcache.models.inspection import Inspection
from agentcache.models.layers import in_dim
from agentcache.models.mla import is_expanded
from agentcache.models.residual.spec import KEYS, VALUES, AdapterSides, Side, find_side, is_split

_MAKE_KEYS = ("k_proj", "qkv_proj", "kv_a_proj_with_mqa")
_QUERIES = {"q_proj", "q_a_proj", "q_b_proj"}


@dataclass(frozen=True)
class LinearShape:
    """A linear module that adapters can act on."""

    in_dim: int
    out_dim: int
    item_bytes: int

    @property
    def bytes_a_rank(self) -> int:
        return (self.in_dim + self.out_dim) * self.item_bytes


@dataclass(frozen=True)
class Target:
    """Columns of a module's output; `makes_kv` if the layer's keys or values use them."""

    module: ModuleName
    start: int
    stop: int
    makes_kv: bool


@dataclass(frozen=True)
class TargetModules:
    """Modules that adapters can act on, for any thread; `absorbed` ones are never called."""

    num_layers: int
    linears: Mapping[ModuleName, LinearShape]
    targets: Mapping[ModuleName, Target]
    absorbed: frozenset[ModuleName]

    def target(self, name: ModuleName) -> Target:
        """Raises UnsupportedAdapter if there is none."""
        if name in self.absorbed:
            raise UnsupportedAdapter(f"{name} cannot be adapted: attention has absorbed its weights")
        if name.layer >= self.num_layers:
            raise UnsupportedAdapter(f"{name} is not in the model, which has {self.num_layers} layers")
        if name not in self.targets:
            raise UnsupportedAdapter(f"{name!s:.100} is not a linear module of the model")
        return self.targets[name]


def target_modules(layers: Sequence[nn.Module], inspection: Inspection) -> TargetModules:
    linears: dict[ModuleName, LinearShape] = {}
    targets: dict[ModuleName, Target] = {}
    absorbed = set()
    for index, layer in enumerate(layers):
        modules = dict(layer.named_modules())
        recurrent = any(spec.index == index for spec in inspection.recurrent)
        kv_dim = sum(spec.num_kv_heads * spec.key_dim for spec in inspection.layers if spec.index == index)
        for path, module in modules.items():
            name, parent = ModuleName(index, path), modules.get(path.rpartition(".")[0], layer)
            if (index, path) not in inspection.linears:
                continue
            if path.endswith("kv_b_proj") and is_expanded(parent):
                absorbed.add(name)
                continue
            linears[name] = LinearShape(in_dim(module), module.weight.shape[0], activation_dtype(module).size)
            # A module called before the layer writes its cache may make KV, unless it makes queries.
            makes_queries = not recurrent and any(part in parent for part in _MAKE_KEYS)
            makes_kv = not inspection.linears[index, path]
            targets |= _named_targets(name, linears[name].out_dim, kv_dim, makes_kv, makes_queries)
    return TargetModules(len(layers), linears, targets, frozenset(absorbed))


def _named_targets(
    name: ModuleName, out_dim: int, kv_dim: int, makes_kv: bool, makes_queries: bool
) -> dict[ModuleName, Target]:
    before, _, leaf = name.path.rpartition(".")
    spans = {leaf: (0, out_dim), **_fused_spans(leaf, out_dim, kv_dim)}
    return {
        ModuleName(name.layer, f"{before}.{part}" if before else part): Target(
            name, *span, makes_kv=makes_kv and not (makes_queries and part in _QUERIES)
        )
        for part, span in spans.items()
    }


def _fused_spans(leaf: str, out_dim: int, kv_dim: int) -> dict[str, tuple[int, int]]:
    if leaf == "qkv_proj":
        q_end, k_end = out_dim - 2 * kv_dim, out_dim - kv_dim
        return {"q_proj": (0, q_end), "k_proj": (q_end, k_end), "v_proj": (k_end, out_dim)}
    if leaf == "gate_up_proj":
        return {"gate_proj": (0, out_dim // 2), "up_proj": (out_dim // 2, out_dim)}
    return {}


@dataclass(frozen=True)
class Adapter:
    """Identity and sizes of an adapter, without its weights.

    Args:
        digest: of modules, matrices and effective scale; 40 hex digits.
        first_kv_layer: lowest layer whose keys or values can differ from base's; number of layers if none.
        invocation_tokens: of an activated LoRA (arXiv 2504.12397).
        family: digest of A matrices and of the components that make keys and values.
    """

    digest: str
    path: Path
    format: str
    ranks: Mapping[ModuleName, int]
    first_layer: int
    first_kv_layer: int
    nbytes: int
    invocation_tokens: tuple[int, ...] | None
    activation_shift: int
    sides: AdapterSides = AdapterSides()
    family: str = ""


@dataclass(frozen=True)
class AdapterContent:
    """An adapter and its float32 numpy matrices."""

    adapter: Adapter
    matrices: Mapping[ModuleName, LowRank]


def read_adapter(folder: Path, modules: TargetModules, max_bytes: int = MAX_BYTES) -> AdapterContent:
    """Read an adapter, on any thread, in up to four times its file's bytes. Raises UnsupportedAdapter."""
    try:
        return _read_adapter(folder, modules, max_bytes)
    except UnsupportedAdapter as error:
        raise type(error)(f"the adapter in {folder} cannot be served: {error.message}") from None


def read_again(adapter: Adapter, modules: TargetModules, max_bytes: int = MAX_BYTES) -> AdapterContent:
    """Read a dropped adapter again. Raises UnsupportedAdapter if its folder has changed."""
    content = read_adapter(adapter.path, modules, max_bytes)
    if content.adapter.digest != adapter.digest:
        raise UnsupportedAdapter(f"the adapter in {adapter.path} has changed since it was loaded; load it anew")
    return content


def _read_adapter(path: Path, modules: TargetModules, max_bytes: int) -> AdapterContent:
    folder = read_folder(path, max_bytes)
    targets = {name: modules.target(name) for name in folder.matrices}
    matrices = _fit(folder.matrices, targets, modules)
    sides = _sides(matrices, targets, modules)
    adapter = Adapter(
        digest=_digest(b"agentcache.lora", _fields(matrices)),
        path=path,
        format=folder.format,
        ranks={name: pair.rank for name, pair in matrices.items()},
        first_layer=min(name.layer for name in targets),
        first_kv_layer=min(name.layer + (not target.makes_kv) for name, target in targets.items()),
        nbytes=sum(pair.rank * modules.linears[name].bytes_a_rank for name, pair in matrices.items()),
        invocation_tokens=folder.config.invocation_tokens,
        activation_shift=folder.config.activation_shift,
        sides=sides,
        family=_digest(b"agentcache.as", _family_fields(matrices, sides)),
    )
    return AdapterContent(adapter, matrices)


def _sides(
    matrices: Mapping[ModuleName, LowRank], targets: Mapping[ModuleName, Target], modules: TargetModules
) -> AdapterSides:
    found: dict[str, dict[int, Side]] = {KEYS: {}, VALUES: {}}
    for name, target in modules.targets.items():
        leaf = name.path.rpartition(".")[2]
        if leaf in found and target.makes_kv and target.module in matrices:
            side = find_side(target.module, target.start, target.stop, matrices[target.module])
            if side is not None:
                found[leaf][name.layer] = side
    unsplit = [name for name, target in sorted(targets.items()) if target.makes_kv and not is_split(target.module)]
    return AdapterSides(found[KEYS], found[VALUES], next(iter(unsplit), None))


def _fit(
    matrices: Mapping[ModuleName, LowRank], targets: Mapping[ModuleName, Target], modules: TargetModules
) -> dict[ModuleName, LowRank]:
    parts: dict[ModuleName, list[tuple[Target, LowRank]]] = defaultdict(list)
    for name, pair in sorted(matrices.items()):
        target = targets[name]
        expected = (modules.linears[target.module].in_dim, target.stop - target.start)
        if (pair.a.shape[0], pair.b.shape[1]) != expected:
            raise UnsupportedAdapter(
                f"{name} is made for {pair.a.shape[0]} inputs and {pair.b.shape[1]} outputs; the model's has "
                f"{expected[0]} and {expected[1]}"
            )
        parts[target.module].append((target, pair))
    return {module: _join(parts[module], modules.linears[module].out_dim) for module in sorted(parts)}


def _join(parts: Sequence[tuple[Target, LowRank]], out_dim: int) -> LowRank:
    if len(parts) == 1 and parts[0][1].b.shape[1] == out_dim:
        return parts[0][1]
    b = np.zeros((sum(pair.rank for _, pair in parts), out_dim), np.float32)
    done = 0
    for target, pair in parts:
        b[done : done + pair.rank, target.start : target.stop] = pair.b
        done += pair.rank
    return LowRank(np.concatenate([pair.a for _, pair in parts], axis=1), b)


def _digest(tag: bytes, fields: Iterable[bytes]) -> str:
    state = hashlib.blake2b(digest_size=20, person=tag)
    for field in fields:
        state.update(len(field).to_bytes(8, "little"))
        state.update(field)
    return state.hexdigest()


def _fields(matrices: Mapping[ModuleName, LowRank]) -> Iterator[bytes]:
    for name, pair in sorted(matrices.items()):
        yield str(name).encode()
        yield from _matrix_fields(pair.a)
        yield from _matrix_fields(pair.b)


def _family_fields(matrices: Mapping[ModuleName, LowRank], sides: AdapterSides) -> Iterator[bytes]:
    for name, pair in sorted(matrices.items()):
        yield str(name).encode()
        yield from _matrix_fields(pair.a)
    # In a fused module B decides which columns of A keys and values use.
    for side in (sides.keys, sides.values):
        yield repr([(layer, each.components) for layer, each in sorted(side.items())]).encode()


def _matrix_fields(matrix: Any) -> Iterator[bytes]:
    yield repr(matrix.shape).encode()
    yield np.ascontiguousarray(matrix, "<f4").tobytes()


def trunk_cut(adapter: Adapter, spec: CacheSpec) -> int:
    """Layer at which an adapter can continue from base's hidden states; 0 if none."""
    if spec.recurrent:
        return 0  # lower layers' state would be missing
    own = producer_groups(adapter, spec)
    cut = min((layer.index for index in own for layer in spec.groups[index].layers), default=0)
    others = [layer.index for index, group in enumerate(spec.groups) if index not in own for layer in group.layers]
    return cut if cut <= adapter.first_layer and max(others, default=-1) < cut else 0


def producer_groups(adapter: Adapter, spec: CacheSpec) -> frozenset[int]:
    """Cache groups that can differ from base's."""
    changed = {
        index
        for index, group in enumerate(spec.groups)
        if any(layer.index >= adapter.first_kv_layer for layer in group.layers)
    }
    # Recurrent layers share the last group; an adapter may change its layer's state.
    has_own_state = any(each.index >= adapter.first_layer for each in spec.recurrent)
    return frozenset(changed | {len(spec.groups)} if has_own_state else changed)


@dataclass(frozen=True, eq=False)
class AdapterWeights:
    """An adapter's matrices on the device, in each module's type."""

    adapter: Adapter
    matrices: Mapping[ModuleName, LowRank]

    @property
    def nbytes(self) -> int:
        return sum(pair.a.nbytes + pair.b.nbytes for pair in self.matrices.values())


@dataclass(frozen=True)
class RowAdapter:
    """A row's adapter, which acts on positions from `start`."""

    weights: AdapterWeights
    start: int = 0


@dataclass(frozen=True)
class RowParts:
    """Each adapter's rows, int32; each row's index in their concatenation, int32 [B]."""

    rows: Sequence[mx.array]
    indices: mx.array


class AdapterRows:
    """Adapters of a step's rows; `adapters` act on at least one token."""

    def __init__(self, rows: Sequence[RowAdapter | None], lengths: Sequence[int], num_tokens: int) -> None:
        self.shape = (len(lengths), num_tokens)
        self.adapters: list[AdapterWeights] = []
        self._users: list[int | None] = []
        self._firsts: list[int] = []
        self._masks: dict[tuple[bool, ...], mx.array | None] = {}
        self._indices: dict[tuple[int, ...], mx.array] = {}
        self._parts: dict[tuple[bool, ...], RowParts] = {}
        for row, length in zip(rows, lengths, strict=True):
            self._add(row, num_tokens if row is None else max(0, row.start - length))

    def _add(self, row: RowAdapter | None, first: int) -> None:
        self._firsts.append(first)
        if row is None or first >= self.shape[1]:
            self._users.append(None)
            return
        if row.weights not in self.adapters:
            self.adapters.append(row.weights)
        self._users.append(self.adapters.index(row.weights))

    def mask(self, present: tuple[bool, ...]) -> mx.array | None:
        """Tokens on which adapters marked in `present` act, bool [B, n, 1]; None if all."""
        if present not in self._masks:
            self._masks[present] = self._mask(present)
        return self._masks[present]

    def _mask(self, present: tuple[bool, ...]) -> mx.array | None:
        num_tokens = self.shape[1]
        users = zip(self._users, self._firsts, strict=True)
        firsts = [first if user is not None and present[user] else num_tokens for user, first in users]
        if not any(firsts):
            return None
        return (mx.arange(num_tokens)[None] >= mx.array(firsts)[:, None])[..., None]

    def index(self, in_stack: tuple[int, ...]) -> mx.array:
        """Each row's index in a stack, int32 [B]."""
        if in_stack not in self._indices:
            rows = [0 if user is None else in_stack[user] for user in self._users]
            self._indices[in_stack] = mx.array(rows, dtype=mx.int32)
        return self._indices[in_stack]

    def parts(self, present: tuple[bool, ...]) -> RowParts:
        if present not in self._parts:
            marked = [user for user, is_present in enumerate(present) if is_present]
            rows = [[row for row, user in enumerate(self._users) if user == each] for each in marked]
            order = [row for part in rows for row in part]
            indices = [order.index(row) if row in order else 0 for row in range(self.shape[0])]
            self._parts[present] = RowParts([mx.array(part, mx.int32) for part in rows], mx.array(indices, mx.int32))
        return self._parts[present]
