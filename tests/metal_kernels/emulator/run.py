"""Runs captured launches and reports what the runtime found."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tests.metal_kernels.emulator.build import build, load
from tests.metal_kernels.emulator.capture import Launch, capture

_RED_ZONE = 4096  # runtime.cpp knows it, too
_TEXT = 1 << 15
_LARGE = 1 << 28  # bytes of an input that is not copied


@dataclass(frozen=True)
class Schedule:
    """How the threads go on.

    Args:
        order: of threads and threadgroups: "forward", "reverse" or "random".
        jitter: results of exp, tanh and the like are off by up to so many units in the last place.
        flush_to_zero: subnormal numbers are zero.
        whole_threadgroups: the grid is rounded up, as CUDA does.
    """

    order: str = "forward"
    seed: int = 0
    jitter: int = 0
    flush_to_zero: bool = False
    whole_threadgroups: bool = False
    check: bool = True


PLAIN = Schedule()
#: Each way to run that may show what others do not.
SCHEDULES = (
    PLAIN,
    Schedule("reverse", whole_threadgroups=True),
    Schedule("random", seed=1, jitter=2),
    Schedule("random", seed=2, flush_to_zero=True, whole_threadgroups=True),
)


@dataclass(frozen=True)
class Traffic:
    """Bytes that a kernel loaded from a buffer and stored to it, each access counted."""

    read: int
    written: int


@dataclass(frozen=True)
class Finding:
    kind: str
    text: str


class KernelFindings(AssertionError):
    """What the runtime found in a launch."""

    def __init__(self, findings: Sequence[Finding], total: int) -> None:
        lines = [f"{finding.kind}: {finding.text}" for finding in findings]
        super().__init__(f"{total} finding(s)\n" + "\n".join(lines))
        self.kinds = [finding.kind for finding in findings]


@dataclass
class Result:
    outputs: list[mx.array]
    traffic: dict[str, Traffic] = field(default_factory=dict)


class _Options(ctypes.Structure):
    _fields_ = (
        ("order", ctypes.c_int),
        ("seed", ctypes.c_uint),
        ("jitter", ctypes.c_int),
        ("flush_to_zero", ctypes.c_int),
        ("check", ctypes.c_int),
        ("most_edges", ctypes.c_uint64),
    )


@dataclass
class _Buffer:
    """An array between two zones that hold rubbish, so that what reads beside it gets wrong numbers, too."""

    memory: np.ndarray
    begin: int
    array: np.ndarray

    @classmethod
    def of(cls, array: np.ndarray) -> _Buffer:
        memory = np.full(array.nbytes + 2 * _RED_ZONE + 64, 0xA5, np.uint8)
        begin = _RED_ZONE + -(memory.ctypes.data + _RED_ZONE) % 64
        memory[begin : begin + array.nbytes] = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
        return cls(memory, begin, array)

    @classmethod
    def in_place(cls, array: np.ndarray) -> _Buffer:
        """Without a copy, for what is too large."""
        return cls(array.reshape(-1).view(np.uint8), 0, array)

    @property
    def address(self) -> int:
        return self.memory.ctypes.data + self.begin

    def contents(self) -> np.ndarray:
        held = self.memory[self.begin : self.begin + self.array.nbytes]
        return held.view(self.array.dtype).reshape(self.array.shape)


def run(
    launch: Launch,
    inputs: Sequence[mx.array | np.ndarray | None],
    schedule: Schedule = PLAIN,
    *,
    strict: bool = True,
    most_edges: int = 300_000_000,
    changed: Collection[int] = (),
) -> Result:
    """Run one launch.

    Args:
        inputs: None where the kernel takes an output among them; the other outputs come last.
        strict: the text must pass the lint, too.
        changed: numbers of inputs, arrays of mlx, that the kernel writes to. What it leaves there is theirs.

    Raises:
        KernelSyntaxError: it does not compile.
        KernelFindings: the runtime found something.
    """
    if schedule.whole_threadgroups:
        launch = launch.rounded_up()
    path = build(launch.source, strict)
    library = load(path)
    names = re.findall(r"(\w+) \[\[buffer\(\d+\)\]\]", launch.source)
    outputs = [_Buffer.of(_before(launch, output.shape, output.dtype)) for output in launch.outputs]
    left = iter(outputs)
    passed = _arguments(launch, inputs)
    views = {index: np.array(inputs[index], copy=False) for index in changed}
    arguments = [
        (next(left), True) if array is None else (_held(views.get(index, array)), index in views)
        for index, array in enumerate(passed)
    ]
    # An array that is passed twice is written to under the first of its names.
    kept = {view.ctypes.data: (view, arguments[index][0]) for index, view in reversed(views.items())}
    arguments += [(buffer, True) for buffer in left]
    slots = (ctypes.c_void_p * 32).in_dll(library, "emulator_buffers")
    for index, ((buffer, writable), name) in enumerate(zip(arguments, names, strict=True)):
        slots[index] = buffer.address
        initialised = not writable or launch.init_value is not None or index in views
        size = ctypes.c_size_t(buffer.array.nbytes)
        library.emulator_buffer(ctypes.c_void_p(buffer.address), size, name.encode(), int(writable), int(initialised))
    traffic = (ctypes.c_uint64 * (2 * len(arguments)))()
    text = ctypes.create_string_buffer(_TEXT)
    order = ("forward", "reverse", "random").index(schedule.order)
    options = _Options(
        order, schedule.seed, schedule.jitter, schedule.flush_to_zero, schedule.check, ctypes.c_uint64(most_edges)
    )
    total = library.emulator_run(
        library.emulator_entry,
        _three(launch.grid),
        _three(launch.threadgroup),
        ctypes.byref(options),
        text,
        _TEXT,
        traffic,
    )
    if total:
        raise KernelFindings(list(_findings(text.value.decode(), path)), total)
    moved = {name: Traffic(traffic[2 * i], traffic[2 * i + 1]) for i, name in enumerate(names)}
    for view, buffer in kept.values():
        view[...] = buffer.contents()
    pairs = zip(outputs, launch.outputs, strict=True)
    return Result([_to_mlx(buffer.contents(), output.dtype) for buffer, output in pairs], moved)


def _held(array: np.ndarray) -> _Buffer:
    return _Buffer.of(array) if array.nbytes < _LARGE else _Buffer.in_place(array)


def _three(numbers: tuple[int, int, int]) -> Any:
    return (ctypes.c_int * 3)(*numbers)


def _arguments(launch: Launch, inputs: Sequence[mx.array | np.ndarray | None]) -> Iterator[np.ndarray | None]:
    """What the kernel is passed for its inputs: data and, where its text asks for them, shapes and strides."""
    infos = launch.shape_infos or ((False, False, False),) * len(inputs)
    for array, (shape, strides, ndim) in zip(inputs, infos, strict=True):
        if array is None:
            yield None
            continue
        data = array if isinstance(array, np.ndarray) else to_numpy(array)
        yield data
        if not data.ndim:
            continue
        if shape:
            yield np.array(array.shape, np.int32)
        if strides:
            yield np.array([stride // data.itemsize for stride in data.strides], np.int64)
        if ndim:
            yield np.array(data.ndim, np.int32)


def _before(launch: Launch, shape: tuple[int, ...], dtype: mx.Dtype) -> np.ndarray:
    """An output before the kernel: NaN everywhere, or what it is to begin with."""
    if launch.init_value is not None:
        return to_numpy(mx.full(shape, launch.init_value, dtype))
    kind = to_numpy(mx.zeros((1,), dtype)).dtype
    return np.full(int(np.prod(shape)) * kind.itemsize, 0xFF, np.uint8).view(kind).reshape(shape)


def to_numpy(array: mx.array) -> np.ndarray:
    """numpy has no bfloat16: its bits, then."""
    return np.array(array.view(mx.uint16)) if array.dtype == mx.bfloat16 else np.array(array)


def _to_mlx(array: np.ndarray, dtype: mx.Dtype) -> mx.array:
    return mx.array(array).view(mx.bfloat16) if dtype == mx.bfloat16 else mx.array(array)


def _findings(text: str, library: Path) -> Iterator[Finding]:
    mapped = Path("/proc/self/maps").read_text().splitlines()
    base = next((int(line.split("-")[0], 16) for line in mapped if str(library) in line), 0)
    for line in text.splitlines():
        kind, pc, who, what = line.split("|", 3)
        where = "" if pc == "(nil)" else _line_of(library, int(pc, 16) - base - 1)
        yield Finding(kind, f"{what} ({who}) {where}")


def _line_of(library: Path, offset: int) -> str:
    command = ["addr2line", "-i", "-e", str(library), hex(offset)]
    said = subprocess.run(command, capture_output=True, text=True).stdout
    return next((line.split("/")[-1] for line in said.splitlines() if ".metal:" in line), "")


class EmulatedKernel:
    """What `mx.fast.metal_kernel` returns, on a CPU: runs when called.

    Args:
        kernel: what it did return.
        log: gets every launch's result.
        edit: applied to every launch before it runs.
        memory: what is passed for some inputs, by their number: they are too large to be evaluated.
        changed: as for `run`.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        kernel: Callable[..., Any],
        strict: bool = True,
        log: list[Result] | None = None,
        edit: Callable[[Launch], Launch] = lambda launch: launch,
        memory: Mapping[int, np.ndarray] | None = None,
        changed: Collection[int] = (),
    ) -> None:
        self._changed = changed
        self._memory = memory or {}
        self._kernel = kernel
        self._schedule = schedule
        self._strict = strict
        self._log = log
        self._edit = edit

    def __call__(self, *, inputs: Sequence[Any], init_value: float | None = None, **how: Any) -> list[mx.array]:
        arrays = [item if isinstance(item, mx.array) else mx.array(item) for item in inputs]
        how.pop("stream", None)
        [launch] = capture(lambda *args: self._kernel(inputs=list(args), init_value=init_value, **how), *arrays)
        launch = self._edit(replace(launch, init_value=init_value))
        passed = [self._memory.get(index, array) for index, array in enumerate(arrays)]
        result = run(launch, passed, self._schedule, strict=self._strict, changed=self._changed)
        if self._log is not None:
            self._log.append(result)
        return result.outputs
