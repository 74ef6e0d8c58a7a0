"""Sample tokens and compute log probabilities, lazily; no row depends on other rows of a batch."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from agentcache.api.sampling import SamplingParams

REPETITION_CONTEXT = 64  # tokens
_SMALLEST_TEMPERATURE = 1e-5  # below, log probabilities leave float32
_SMALLEST_TOP_P = 1e-6  # so that the best token stays
_BITS = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32))
_NO_TOP_P = 2.0  # above any rounded sum of probabilities


class Tally:
    """Counts of generated tokens."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._counted = 0

    def of(self, token_ids: Sequence[int], start: int, end: int) -> Mapping[int, int]:
        """Counts of `token_ids[start:end]`, valid until the next call."""
        end = max(start, end)
        if start + self._counted > end:  # tokens not yet computed were dropped
            self._counts.clear()
            self._counted = 0
        self._counts.update(token_ids[start + self._counted : end])
        self._counted = end - start
        return self._counts


class Sampler:
    """Sampling settings and random key of a request."""

    def __init__(self, params: SamplingParams, eos_ids: Iterable[int] = ()) -> None:
        self.temperature = float(params.temperature)
        self.top_p = max(float(params.top_p), _SMALLEST_TOP_P) if params.top_p < 1 else _NO_TOP_P
        self.top_k = max(int(params.top_k), 0)
        self.log_min_p = math.log(params.min_p) if params.min_p > 0 else -math.inf
        self.penalty = float(params.repetition_penalty)
        self.frequency_penalty = float(params.frequency_penalty)
        self.presence_penalty = float(params.presence_penalty)
        self.min_tokens = params.min_tokens
        self.tally = Tally()
        self._eos_ids = sorted(eos_ids)
        self._bias = {int(token): float(bias) for token, bias in params.logit_bias.items()}
        self._bias_arrays: tuple[mx.array, mx.array] | None = None
        written = str(secrets.randbits(64) if params.seed is None else params.seed).encode()
        digest = hashlib.blake2b(written, digest_size=8).digest()
        self._key = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _SMALLEST_TEMPERATURE

    @property
    def truncates(self) -> bool:
        return not self.is_greedy and (self.top_p < 1 or self.top_k > 0)

    @property
    def draws_from_all(self) -> bool:
        return not self.is_greedy and not self.truncates

    def key(self, position: int) -> tuple[int, int]:
        """Random key of a token, from seed and position only."""
        high, low = self._key
        return high, (low + position) % 2**32

    @property
    def counts_tokens(self) -> bool:
        return self.frequency_penalty != 0 or self.presence_penalty != 0

    def ends_banned(self, position: int, vocab_size: int) -> list[int]:
        return [token for token in self._eos_ids if token < vocab_size] if position < self.min_tokens else []

    @property
    def has_bias(self) -> bool:
        return bool(self._bias)

    def bias(self, vocab_size: int) -> tuple[mx.array, mx.array]:
        if self._bias_arrays is None:
            known = {token: value for token, value in self._bias.items() if 0 <= token < vocab_size}
            self._bias_arrays = mx.array(list(known), mx.int32), mx.array(list(known.values()), mx.float32)
        return self._bias_arrays


@dataclass(frozen=True)
class Row:
    """One row after `position` generated tokens; `recent` tokens and `counts` exclude the step's last."""

    sampler: Sampler
    recent: Sequence[int]
    position: int
    counts: Mapping[int, int] = field(default_factory=dict)


def choose(rows: Sequence[Row], logits: mx.array, last: mx.array) -> mx.array:
    """Choose tokens, int32 [B], from logits [B, vocabulary] after tokens `last`, int32 [B]."""
    logits = _counted(rows, _penalised(rows, logits.astype(mx.float32), last), last)
    logits = _kept_going(rows, _biased(rows, logits))
    kinds: tuple[tuple[Callable[[Sampler], bool], _Choose], ...] = (
        (lambda sampler: sampler.is_greedy, _greedy),
        (lambda sampler: sampler.draws_from_all, _drawn_from_all),
        (lambda sampler: sampler.truncates, _drawn_from_best),
    )
    order: list[int] = []
    tokens: list[mx.array] = []
    for belongs, choose_rows in kinds:
        members = [i for i, row in enumerate(rows) if belongs(row.sampler)]
        if len(members) == len(rows):
            return choose_rows(rows, logits).astype(mx.int32)
        if members:
            order += members
            tokens.append(choose_rows([rows[i] for i in members], logits[mx.array(members)]).astype(mx.int32))
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return mx.concatenate(tokens)[mx.array(inverse)]


def masked(logits: mx.array, masks: Mapping[int, np.ndarray]) -> mx.array:
    """Logits [B, vocabulary] in float32, minus infinity for forbidden tokens.

    Masks are uint32 [n] by row: bit i of word w allows token 32 w + i.
    """
    size = logits.shape[-1]
    words = np.zeros((len(masks), -(-size // 32)), np.uint32)
    for place, mask in enumerate(masks.values()):
        words[place, : len(mask)] = mask[: words.shape[1]]
    bits = mx.bitwise_and(mx.array(words)[:, :, None], mx.array(_BITS)).reshape(len(masks), -1)
    allowed = bits[:, :size] != 0
    logits = logits.astype(mx.float32)
    if len(masks) == len(logits):
        return mx.where(allowed, logits, -mx.inf)
    rows = mx.array(list(masks))
    return _replaced(logits, rows, mx.where(allowed, logits[rows], -mx.inf))


_Choose = Callable[[Sequence[Row], mx.array], mx.array]
_categorical = mx.vmap(lambda logits, key: mx.random.categorical(logits, key=key))


def _greedy(rows: Sequence[Row], logits: mx.array) -> mx.array:
    return mx.argmax(logits, axis=-1)


def _drawn_from_all(rows: Sequence[Row], logits: mx.array) -> mx.array:
    logprobs = log_softmax(logits)
    if any(row.sampler.log_min_p > -math.inf for row in rows):
        logprobs = mx.where(logprobs < _least(rows, logprobs), -mx.inf, logprobs)
    return _draw(rows, logprobs)


def _drawn_from_best(rows: Sequence[Row], logits: mx.array) -> mx.array:
    logprobs = log_softmax(logits)
    order = mx.argsort(-logprobs, axis=-1)
    logprobs = mx.take_along_axis(logprobs, order, axis=-1)
    probabilities = mx.exp(logprobs)
    before = mx.cumsum(probabilities, axis=-1) - probabilities
    ranks = mx.arange(logprobs.shape[-1])
    size = logprobs.shape[-1]
    top_k = _column([min(row.sampler.top_k or size, size) for row in rows])
    keep = (before < _column([row.sampler.top_p for row in rows])) & (ranks < top_k)
    keep &= logprobs >= _least(rows, logprobs)
    chosen = _draw(rows, mx.where(keep, logprobs, -mx.inf))
    return mx.take_along_axis(order, chosen[:, None], axis=-1)[:, 0]


def _least(rows: Sequence[Row], logprobs: mx.array) -> mx.array:
    return logprobs.max(axis=-1, keepdims=True) + _column([row.sampler.log_min_p for row in rows])


def _draw(rows: Sequence[Row], logprobs: mx.array) -> mx.array:
    keys = mx.array([row.sampler.key(row.position) for row in rows], mx.uint32)
    return _categorical(logprobs / _column([row.sampler.temperature for row in rows]), keys)


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(values)[:, None]


def _penalised(rows: Sequence[Row], logits: mx.array, last: mx.array) -> mx.array:
    members = [i for i, row in enumerate(rows) if row.sampler.penalty != 1.0]
    if not members:
        return logits
    index = mx.array(members)
    recent = [rows[i].recent[-(REPETITION_CONTEXT - 1) :] for i in members]
    longest = max(map(len, recent))
    known = mx.array([[*ids, *[-1] * (longest - len(ids))] for ids in recent], mx.int32).reshape(len(members), longest)
    newest = last[index][:, None]
    ids = mx.concatenate([mx.where(known < 0, newest, known), newest], axis=1)
    penalties = _column([rows[i].sampler.penalty for i in members])
    seen = mx.take_along_axis(logits[index], ids, axis=-1)
    seen = mx.where(seen > 0, seen / penalties, seen * penalties)
    return _replaced(logits, index, mx.put_along_axis(logits[index], ids, seen, axis=-1))


def _counted(rows: Sequence[Row], logits: mx.array, last: mx.array) -> mx.array:
    """OpenAI's: a token generated c > 0 times loses c * frequency + presence."""
    members = [i for i, row in enumerate(rows) if row.sampler.counts_tokens and row.position > 0]
    if not members:
        return logits
    index = mx.array(members)
    counts = mx.zeros((len(members), logits.shape[-1]))
    # Counts lack `last`: the device may still be choosing it.
    counts = counts.at[mx.arange(len(members)), last[index]].add(1.0)
    known = [(member, rows[i].counts) for member, i in enumerate(members) if rows[i].counts]
    if known:
        # numpy: a Python list would take most of a step.
        sizes = [len(each) for _, each in known]
        indices = np.repeat(np.array([member for member, _ in known], np.int32), sizes)
        tokens = np.concatenate([np.fromiter(each.keys(), np.int32, len(each)) for _, each in known])
        times = np.concatenate([np.fromiter(each.values(), np.float32, len(each)) for _, each in known])
        counts = counts.at[mx.array(indices), mx.array(tokens)].add(mx.array(times))
    frequency = _column([rows[i].sampler.frequency_penalty for i in members])
    presence = _column([rows[i].sampler.presence_penalty for i in members])
    return _replaced(logits, index, logits[index] - (counts * frequency + (counts > 0) * presence))


def _kept_going(rows: Sequence[Row], logits: mx.array) -> mx.array:
    banned = [
        (i, token) for i, row in enumerate(rows) for token in row.sampler.ends_banned(row.position, logits.shape[-1])
    ]
    if not banned:
        return logits
    indices, tokens = zip(*banned, strict=True)
    logits = mx.array(logits)
    logits[mx.array(indices), mx.array(tokens)] = -mx.inf
    return logits


def _replaced(logits: mx.array, index: mx.array, rows: mx.array) -> mx.array:
    logits = mx.array(logits)
    logits[index] = rows
    return logits


def _biased(rows: Sequence[Row], logits: mx.array) -> mx.array:
    biases = [(i, row.sampler.bias(logits.shape[-1])) for i, row in enumerate(rows) if row.sampler.has_bias]
    if not biases:
        return logits
    indices = mx.concatenate([mx.full(ids.shape, i, mx.int32) for i, (ids, _) in biases])
    tokens = mx.concatenate([ids for _, (ids, _) in biases])
    return logits.at[indices, tokens].add(mx.concatenate([values for _, (_, values) in biases]))


def log_softmax(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


@dataclass(frozen=True)
class TokenScore:
    """Log probability of a token, and of the best ones."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class Scores:
    """Log probabilities of tokens [n] and of the `count` best, before temperature and truncation."""

    def __init__(self, logits: mx.array, tokens: mx.array, count: int) -> None:
        logprobs = log_softmax(logits)
        self._logprobs = mx.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
        self._top = mx.argsort(-logprobs, axis=-1)[:, :count]
        self._top_logprobs = mx.take_along_axis(logprobs, self._top, axis=-1)
        self._count = count

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """To evaluate before `read`."""
        return (self._logprobs, self._top, self._top_logprobs) if self._count else (self._logprobs,)

    def read(self) -> list[TokenScore]:
        logprobs: list[float] = self._logprobs.tolist()
        if not self._count:
            return [TokenScore(logprob, ()) for logprob in logprobs]
        found = zip(self._top.tolist(), self._top_logprobs.tolist(), strict=True)
        tops = [tuple(zip(tokens, values, strict=True)) for tokens, values in found]
        return [TokenScore(logprob, top) for logprob, top in zip(logprobs, tops, strict=True)]
