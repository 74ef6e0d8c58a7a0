"""What libraries throw that is no plain `Exception`, for tests of what a thread's boundary makes of it."""

from __future__ import annotations


class PanicException(BaseException):
    """Derives from `BaseException` as pyo3's does, which a Rust library raises when it panics."""


THROWN: tuple[type[BaseException], ...] = (
    PanicException,
    SystemExit,
    KeyboardInterrupt,
    GeneratorExit,
    StopIteration,
    MemoryError,
    RuntimeError,
)
