"""Encoding of commands and answers as messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from agentcache.ranks.adapter_commands import DropAdapter, LoadAdapter
from agentcache.ranks.arena_commands import BringBytes, CopyBlocks, Fit, Forget, GiveBack, PutBytes, TakeBytes
from agentcache.ranks.file_commands import Delete, KeepOnly, Question
from agentcache.ranks.step_commands import Forward, Start
from agentcache.ranks.words import Numbers, WordReader, WordWriter


@dataclass(frozen=True)
class Stop(Numbers):
    """Finish pending writes and end."""

    code: ClassVar = 3


Command = (
    Forward
    | Start
    | Stop
    | GiveBack
    | Fit
    | CopyBlocks
    | TakeBytes
    | PutBytes
    | BringBytes
    | Forget
    | LoadAdapter
    | DropAdapter
    | Delete
    | KeepOnly
    | Question
)
_BY_CODE: dict[int, type[Command]] = {kind.code: kind for kind in Command.__args__}


def write_commands(commands: Sequence[Command]) -> bytes:
    words = WordWriter()
    for command in commands:
        words.put(command.code)
        command.put(words)
    return words.bytes


def read_commands(message: bytes) -> Iterator[Command]:
    """Inverse of `write_commands`."""
    words = WordReader(message)
    while not words.is_at_end:
        yield _BY_CODE[words.get()].get(words)


def write_answers(answers: Mapping[int, bytes]) -> bytes:
    """Encode answers by question number."""
    words = WordWriter()
    for number, answer in answers.items():
        words.put(number)
        words.put_bytes(answer)
    return words.bytes


def read_answers(message: bytes) -> dict[int, bytes]:
    """Inverse of `write_answers`."""
    words, answers = WordReader(message), {}
    while not words.is_at_end:
        number = words.get()
        answers[number] = words.get_bytes()
    return answers
