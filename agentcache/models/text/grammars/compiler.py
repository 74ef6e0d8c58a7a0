"""Makes grammars for one tokenizer, and follows what is generated with them."""

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

from agentcache.confined import ChildBroke, ConfinedWork, OverLimit
from agentcache.errors import InvalidRequest
from agentcache.models.text.grammars.check_child import Reply
from agentcache.models.text.grammars.limits import MAX_CHARACTERS, parser_limits
from agentcache.models.text.grammars.reply_grammar import Part, ReplyGrammar
from agentcache.models.text.work_limit import UNLIMITED, WorkLimit
from agentcache.threads import DaemonPool, as_exception

GRACE = 0.05  # seconds that others may wait for the masks of one answer, in all
# Seconds of CPU. To have another thread find a mask costs about as much, and where CPUs are busy it may be much later.
QUICK = 0.0002
_MOST_THREADS = 8  # that find masks
_KEPT = 32  # grammars: agents ask for the same ones every turn
_PLACE = re.compile(r"^(failed to compile JSON schema: |(text|reply|json)?\s*at \d+\(\d+\): )+")
_CODE, _OFF_CODE = "grammar_unusable", "forms_unavailable"

log = logging.getLogger("agentcache.models")


class Vocabulary:
    """What llguidance is to know of a tokenizer.

    Args:
        bytes_of: bytes of a token alone; a control token's name.
        size: ids are below it.
        control_ids: tokens that no text is made of: a grammar names them.
        eos_ids: tokens that end a text.
        encode: the tokens of a text.
    """

    bos_token_id = None

    def __init__(
        self,
        bytes_of: Callable[[int], bytes],
        size: int,
        control_ids: Collection[int],
        eos_ids: Collection[int],
        encode: Callable[[str], Sequence[int]],
    ) -> None:
        self.tokens = [bytes_of(token) for token in range(size)]
        self.special_token_ids = sorted({*control_ids, *eos_ids})
        self.eos_ids = sorted(eos_ids)
        if not self.eos_ids:  # one is asked for; no model has a logit for this one
            self.eos_ids = [size]
            self.tokens.append(b"<end of text>")
            self.special_token_ids.append(size)
        self.eos_token_id = self.eos_ids[0]
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        return list(self._encode(text))


class Grammars:
    """The grammars of one tokenizer. From any thread.

    Args:
        vocabulary: called once, when the first grammar is made or `start` is called.

    Attributes:
        refusal: why this tokenizer can have no grammars; empty if it can, or before it was tried.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self.refusal = ""
        self._made: tuple[LLTokenizer, NDArray[np.uint32]] | None = None
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._check = ConfinedWork("agentcache.models.text.grammars.check_child")
        # llguidance releases Python's lock.
        self._finders: Executor = DaemonPool(min(_MOST_THREADS, os.cpu_count() or 1), "agentcache-masks")

    def start(self) -> None:
        """Read the vocabulary now. It holds Python's lock, a second for the largest ones.

        A vocabulary that llguidance does not take leaves a `refusal`.
        """
        with suppress(InvalidRequest):
            self._tokenizer("response_format")

    def close(self) -> None:
        """End the processes that try grammars, which come back when they are needed."""
        self._check.close()

    def compile(self, reply: ReplyGrammar, limit: WorkLimit = UNLIMITED) -> Grammar:
        """The grammar, ready to be followed.

        Raises:
            InvalidRequest: a part of it makes no sense, is more than llguidance knows, or takes too much to work with;
                or the tokenizer can have no grammars.
        """
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
        """Each part alone, where it can do no harm. What passes takes no longer here."""
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
        """The tokenizer as llguidance has it, and the mask of tokens that end a text.

        Raises:
            InvalidRequest: it has none, which is found out once.
        """
        with self._lock:
            if self._made is None and not self.refusal:
                try:
                    self._made = _read(self._vocabulary())
                except BaseException as error:  # a token of over 255 bytes makes llguidance panic
                    log.debug("llguidance and the vocabulary", exc_info=error)
                    self.refusal = f"llguidance does not take the tokenizer's vocabulary ({type(error).__name__})"
                    log.warning("answers of a form are off: %s: %s", self.refusal, str(error)[:200])
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
    """A grammar that answers can be generated by; it does not change."""

    def __init__(self, matcher: LLMatcher, ends: NDArray[np.uint32], finders: Executor) -> None:
        self._matcher = matcher
        self._ends = ends
        self._finders = finders

    def follow(self) -> Following:
        """From the beginning."""
        return Following(self._matcher.deep_copy(), self._ends, self._finders)


class Following:
    """How far a text has come in its grammar.

    What may follow is looked for from the moment at which it is known what it follows: at once if that was quick the
    last time, else on another thread. What is found at once and was not quick after all comes off the answer's grace;
    when there is none left, all is found on other threads.

    Args:
        ends: the mask of tokens that end a text.
        finders: run those threads.

    Attributes:
        is_over: nothing can follow: the text is complete.
        failure: why it is not known any more what may follow.
    """

    def __init__(self, matcher: LLMatcher, ends: NDArray[np.uint32], finders: Executor) -> None:
        self._matcher = matcher
        self._ends = ends
        self._finders = finders
        self._grace = GRACE
        self._seconds = QUICK  # of CPU that the last mask took
        self.is_over = False
        self.failure: str | None = None
        self._mask = self._start()

    def _start(self) -> Future[bytes]:
        if self._seconds >= QUICK or self._grace <= 0:
            with suppress(RuntimeError):  # the system has no thread left
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
        """Append this token, which `mask` allows, to the text."""
        if not self._mask.done():
            wait([self._mask])
        # A small part of what the next mask takes: here, because it is wanted at once whether the text is complete.
        try:
            self._matcher.consume_token(token_id)
        except BaseException as error:
            self._fail(error)
        self._note_end()
        if not self.is_over and self.failure is None:
            self._mask = self._start()

    @property
    def is_ready(self) -> bool:
        """Whether `mask` need not wait."""
        return self._mask.done()

    def wait(self, seconds: float) -> bool:
        """Wait until `mask` need not, for so long and for what is left of the answer's grace; whether it need not."""
        if not self.is_ready and wait([self._mask], seconds).not_done and self._grace > 0:
            began = time.perf_counter()
            wait([self._mask], self._grace)
            self._grace -= time.perf_counter() - began
        return self.is_ready

    def mask(self) -> NDArray[np.uint32]:
        """Which tokens may follow: bit i of word w stands for token 32 w + i."""
        if (error := self._mask.exception()) is not None:
            self._fail(error)
            return self._ends  # the answer ends, whatever is chosen
        # There may be a word more than the vocabulary needs.
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
    """The largest part's parameter: the best guess at which one it was."""
    return max(parts, key=lambda part: len(part.source)).param


def _refused(param: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{param} cannot be used: {_told(reason)}.", param=param, code=_CODE)


def _told(reason: str) -> str:
    """llguidance's words without what it quotes of the grammar."""
    lines = [line for line in reason.split("\n") if line.strip()] or ["it is not understood"]
    return _PLACE.sub("", lines[0].partition("<state>")[0].partition("<non-verbose/>")[0].strip()).rstrip(".:")[:300]
