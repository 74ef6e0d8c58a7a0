"""Documents as token ids with loss weights, in batches by the seed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path

import jinja2
import numpy as np
from tokenizers import Tokenizer

from agentcache.training.decoder_data import random_for
from training.dialogue import Dialogue, Writer, fact_talk
from training.gossip import gossip, merging, records
from training.negotiation import negotiation
from training.small_talk import small_talk
from training.tools import tool_talk
from training.words import Words

WRITERS: Mapping[str, Writer] = {
    "facts": fact_talk,
    "negotiation": negotiation,
    "gossip": gossip,
    "records": records,
    "merging": merging,
    "tools": tool_talk,
    "small_talk": small_talk,
}
# Loss weights.
SPOKEN_WEIGHT, READ_WEIGHT = 1.0, 0.05
_INVENTED = (0.0, 0.1, 0.5)
_WRAPPED_SHARE, _WIDTHS = 0.4, (60, 80, 100, 120)


@dataclass(frozen=True)
class Batch:
    """Rows [rows, length], padded at the end: uint16 ids, float16 loss weights."""

    token_ids: np.ndarray
    weights: np.ndarray


class Corpus:
    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    @cached_property
    def _template(self) -> jinja2.Template:
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = _plain_json  # as in transformers
        return environment.from_string((self.folder / "chat_template.jinja").read_text())

    def render(self, dialogue: Dialogue) -> str:
        return self._template.render(messages=dialogue.rendered(), tools=dialogue.tools or None)

    def write(self, mixture: Mapping[str, float], length: int, *path: object) -> Dialogue:
        random = random_for(self.seed, *path)
        kind = random.choices(tuple(mixture), tuple(mixture.values()))[0]
        dialogue = WRITERS[kind](random, Words(random, random.choice(_INVENTED)), int(length * 0.95))
        if random.random() < _WRAPPED_SHARE:
            dialogue.wrap(random.choice(_WIDTHS))
        return dialogue

    def batch(self, mixture: Mapping[str, float], rows: int, length: int, index: int) -> Batch:
        token_ids = np.zeros((rows, length), np.uint16)
        weights = np.zeros((rows, length), np.float16)
        for row in range(rows):
            ids, spoken = self.encode(self.write(mixture, length, index, row))
            count = min(len(ids), length)
            token_ids[row, :count] = ids[:count]
            weights[row, :count] = np.where(spoken[:count], SPOKEN_WEIGHT, READ_WEIGHT)
        return Batch(token_ids, weights)

    def encode(self, dialogue: Dialogue) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids, and the mask of the assistant's."""
        ids = np.array(self.tokenizer.encode(self.render(dialogue), add_special_tokens=False).ids, np.uint16)
        return ids, self._spoken(ids)

    def _spoken(self, ids: np.ndarray) -> np.ndarray:
        spoken = np.zeros(len(ids), bool)
        begin, end = (self.tokenizer.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>"))
        header = self.tokenizer.encode("assistant\n", add_special_tokens=False).ids
        ends = np.flatnonzero(ids == end)
        for start in np.flatnonzero(ids == begin):
            first = start + 1 + len(header)
            if list(ids[start + 1 : first]) == header:
                last = ends[np.searchsorted(ends, first)]
                spoken[first : last + 1] = True
        return spoken

    def batches(
        self, mixture: Mapping[str, float], shapes: list[tuple[int, int]], first: int, workers: int
    ) -> Iterator[Batch]:
        """Yield batches from `first` on, written ahead by `workers` processes."""
        tasks = [(mixture, rows, length, first + index) for index, (rows, length) in enumerate(shapes)]
        if workers == 0:
            yield from (self.batch(*task) for task in tasks)
            return
        context, arguments = get_context("spawn"), (self.folder, self.seed)
        with ProcessPoolExecutor(workers, context, _start_worker, arguments) as pool:
            yield from pool.map(_write_batch, tasks)


def _plain_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


_corpus: Corpus | None = None  # one per worker process


def _start_worker(folder: Path, seed: int) -> None:
    global _corpus
    _corpus = Corpus(folder, seed)


def _write_batch(task: tuple[Mapping[str, float], int, int, int]) -> Batch:
    assert _corpus is not None
    return _corpus.batch(*task)
