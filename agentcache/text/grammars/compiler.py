"""Compiles grammars, and matches answers with them."""

from __future__ import annotations

import logging
import marshal
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import suppress

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from agentcache.errors import InvalidRequest
from agentcache.system.confined import ChildBroke, ConfinedWork, OverLimit
from agentcache.system.threads import DaemonPool, as_exception
from agentcache.text.encoder import MarkedEncoder
from agentcache.text.grammars.check_child import MAX_CHARACTERS, Reply, parser_limits
from agentcache.text.grammars.reply_grammar import Part, ReplyGrammar
from agentcache.text.work_limit import UNLIMITED, WorkLimit

GRACE = 0.05  # seconds that an answer's masks may delay other requests
QUICK = 0.0002  # CPU seconds, about the cost of using another thread
_MOST_THREADS = 8
_KEPT = 32  # agents repeat theirs every turn
_PLACE = re.compile(r"^(failed to compile JSON schema: |(text|reply|json)?\s*at \d+\(\d+\): )+")
_CODE, _OFF_CODE = "grammar_unusable", "forms_unavailable"

log = logging.getLogger("agentcache.models")


class Vocabulary:
    """A tokenizer's vocabulary for llguidance; grammars must name `control_ids` to allow them."""

    bos_token_id = None

    def __init__(
        self,
        bytes_of: Callable[[int], bytes],
        size: int,
        control_ids: Collection[int],
        eos_ids: Collection[int],
        encoder: MarkedEncoder,
    ) -> None:
        self.tokens = [bytes_of(token) for token in range(size)]
        self.special_token_ids = sorted({*control_ids, *eos_ids})
        self.eos_ids = sorted(eos_ids)
        if not self.eos_ids:  # llguidance needs one; this id has no logit
            self.eos_ids = [size]
            self.tokens.append(b"<end of text>")
            self.special_token_ids.append(size)
        self.eos_token_id = self.eos_ids[0]
        self._encoder = encoder

    def __call__(self, text: str) -> list[int]:
        return list(self._encoder.encode(text).ids)


class GrammarCompiler:
    """Compiles and caches grammars. Thread-safe. `refusal`: why llguidance rejects the vocabulary; else empty."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self.refusal = ""
        self._made: tuple[LLTokenizer, NDArray[np.uint32]] | None = None
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._check = ConfinedWork("agentcache.text.grammars.check_child")
        # llguidance releases the GIL.
        self._finders: Executor = DaemonPool(min(_MOST_THREADS, os.cpu_count() or 1), "agentcache-masks")

    def start(self) -> None:
        """Read the vocabulary, or set `refusal`. Holds the GIL for up to a second."""
        with suppress(InvalidRequest):
            self._tokenizer("response_format")

    def close(self) -> None:
        self._check.close()

    def compile(self, reply: ReplyGrammar, limit: WorkLimit = UNLIMITED) -> Grammar:
        """Return the compiled grammar. Raises InvalidRequest for a bad or expensive part, or after a `refusal`."""
        with self._lock:
            known = self._kept.get(reply.text)
            if known is not None:
                self._kept.move_to_end(reply.text)
                return known
        param = reply.parts[0].param
        tokenizer, ends = self._tokenizer(param)
        self._try(reply, limit)
        try:
            matcher = LLMatcher(tokenizer, reply.text, log_level=0, limits=parser_limits())
        except BaseException as error:
            log.exception("llguidance has failed on a grammar")
            raise _refused(param, f"llguidance has failed on it ({type(error).__name__})") from None
        if matcher.is_error():
            raise _refused(param, matcher.get_error())
        grammar = Grammar(matcher, ends, self._finders)
        with self._lock:
            self._kept[reply.text] = grammar
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return grammar

    def _try(self, reply: ReplyGrammar, limit: WorkLimit) -> None:
        # Parts that pass are safe to compile here.
        parts = reply.parts
        if sum(len(part.source) for part in parts) > MAX_CHARACTERS:
            raise _refused(parts[0].param, f"it has more than {MAX_CHARACTERS} characters")
        request = marshal.dumps([part.whole for part in parts])
        try:
            kind, content = self._check.ask([request], go_on=limit.go_on)
        except OverLimit as error:
            raise _refused(_blamed(parts), f"it takes {error.what}") from None
        except ChildBroke:
            raise _refused(_blamed(parts), "it takes too much memory") from None
        if kind == Reply.REFUSED:
            index, reason = marshal.loads(content)
            raise _refused(parts[index].param, reason)

    def _tokenizer(self, param: str) -> tuple[LLTokenizer, NDArray[np.uint32]]:
        with self._lock:
            if self._made is None and not self.refusal:
                try:
                    self._made = _read(self._vocabulary())
                except BaseException as error:  # a token of over 255 bytes makes llguidance panic
                    log.debug("llguidance and the vocabulary", exc_info=error)
                    self.refusal = f"llguidance does not take the tokenizer's vocabulary ({type(error).__name__})"
                    log.warning("constrained answers are off: %s: %s", self.refusal, str(error)[:200])
            if self._made is None:
                raise InvalidRequest(
                    f"{param} cannot be used with this model: {self.refusal}.", param=param, code=_OFF_CODE
                )
            return self._made


def _read(vocabulary: Vocabulary) -> tuple[LLTokenizer, NDArray[np.uint32]]:
    size = len(vocabulary.tokens)
    tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=size, eos_token=vocabulary.eos_ids)
    bits = np.zeros(-(-size // 32) * 32, np.uint8)
    bits[vocabulary.eos_ids] = 1
    return tokenizer, np.packbits(bits, bitorder="little").view(np.uint32)


class Grammar:
    """A compiled, immutable grammar."""

    def __init__(self, matcher: LLMatcher, ends: NDArray[np.uint32], finders: Executor) -> None:
        self._matcher = matcher
        self._ends = ends
        self._finders = finders

    def follow(self) -> GrammarMatcher:
        return GrammarMatcher(self._matcher.deep_copy(), self._ends, self._finders)


class GrammarMatcher:
    """Matches the tokens of one answer.

    `take` starts the next mask: inline if the last took under `QUICK` and slow ones have not used up `GRACE`, else on
    a thread.
    """

    def __init__(self, matcher: LLMatcher, ends: NDArray[np.uint32], finders: Executor) -> None:
        self._matcher = matcher
        self._ends = ends
        self._finders = finders
        self._grace = GRACE
        self._seconds = QUICK  # CPU time
        self.is_over = False
        self.failure: str | None = None
        self._mask = self._start()

    def _start(self) -> Future[bytes]:
        if self._seconds >= QUICK or self._grace <= 0:
            with suppress(RuntimeError):  # no thread available
                return self._finders.submit(self._find)
        found = Future[bytes]()
        try:
            found.set_result(self._find())
        except BaseException as error:
            found.set_exception(as_exception(error))
        if self._seconds >= QUICK:
            self._grace -= self._seconds
        return found

    def _find(self) -> bytes:
        began = time.thread_time()
        mask = self._matcher.compute_bitmask()
        self._seconds = time.thread_time() - began
        return mask

    def take(self, token_id: int) -> None:
        if not self._mask.done():
            wait([self._mask])
        # Inline: the caller reads `is_over` next.
        try:
            self._matcher.consume_token(token_id)
        except BaseException as error:
            self._fail(error)
        self._note_end()
        if not self.is_over and self.failure is None:
            self._mask = self._start()

    @property
    def is_ready(self) -> bool:
        return self._mask.done()

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` plus the remaining grace. Return `is_ready`."""
        if not self.is_ready and wait([self._mask], seconds).not_done and self._grace > 0:
            began = time.perf_counter()
            wait([self._mask], self._grace)
            self._grace -= time.perf_counter() - began
        return self.is_ready

    def mask(self) -> NDArray[np.uint32]:
        """Return the allowed tokens (after a failure, end tokens), uint32: bit i of word w is token 32 w + i."""
        if (error := self._mask.exception()) is not None:
            self._fail(error)
            return self._ends
        # llguidance may add a word of padding.
        mask = np.frombuffer(self._mask.result(), np.uint32)[: len(self._ends)]
        if not (mask & ~self._ends).any():
            self.is_over = True
        self._note_end()
        return mask

    def _fail(self, error: BaseException) -> None:
        log.error("llguidance has failed in an answer", exc_info=error)
        self.failure = f"llguidance has failed ({type(error).__name__})"

    def _note_end(self) -> None:
        if self.failure is not None:
            return
        if self._matcher.is_error():
            self.failure = _told(self._matcher.get_error())
        elif self._matcher.is_stopped():
            self.is_over = True


def _blamed(parts: Sequence[Part]) -> str:
    return max(parts, key=lambda part: len(part.source)).param


def _refused(param: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{param} cannot be used: {_told(reason)}.", param=param, code=_CODE)


def _told(reason: str) -> str:
    lines = [line for line in reason.split("\n") if line.strip()] or ["it is not understood"]
    return _PLACE.sub("", lines[0].partition("<state>")[0].partition("<non-verbose/>")[0].strip()).rstrip(".:")[:300]
