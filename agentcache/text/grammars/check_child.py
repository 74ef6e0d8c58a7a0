"""Checks untrusted grammars, a marshalled list, in a confined process; answers `Reply`.

If refused, marshalled (index, reason) follow.
"""

from __future__ import annotations

import marshal
import random
import time

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from agentcache.system.confined_child import serve

_STEPS = 1000  # bytes of random text
_MOST_SECONDS = 0.2  # CPU time of one mask
_ENOUGH_SECONDS = 0.3  # of one grammar
_ENOUGH_FOR_ALL = 0.6  # of a request
_BYTES = 256
MAX_CHARACTERS = 1 << 20  # of all parts


class Reply:
    FITS = b"f"
    REFUSED = b"r"


def main() -> None:
    """Serve requests until the socket closes."""
    tokenizer = LLTokenizer("byte")

    def answer(request: list[bytes]) -> tuple[bytes, bytes]:
        grammars, begun = marshal.loads(request.pop()), time.thread_time()
        for index, grammar in enumerate(grammars):
            left = _ENOUGH_FOR_ALL - (time.thread_time() - begun)
            if reason := _reason_against(grammar, tokenizer, min(_ENOUGH_SECONDS, left / (len(grammars) - index))):
                return Reply.REFUSED, marshal.dumps((index, reason))
        return Reply.FITS, b""

    serve(answer)


def _reason_against(grammar: str, tokenizer: LLTokenizer, enough: float) -> str | None:
    # Tries random text for up to `enough` CPU seconds.
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    chosen, begun = random.Random(0), time.thread_time()
    for step in range(_STEPS):
        started = time.thread_time()
        if step and started - begun > enough:
            return None
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return matcher.get_error()
        if time.thread_time() - started > _MOST_SECONDS:
            return "what may come next takes too long to find"
        bits = int.from_bytes(mask[: _BYTES // 8], "little")
        allowed = [byte for byte in range(_BYTES) if bits >> byte & 1]
        if not allowed:
            return None if step or matcher.is_accepting() else "no text has this form"
        if not matcher.consume_token(chosen.choice(allowed)):
            return matcher.get_error()
    return None


def parser_limits() -> LLParserLimits:
    """Return limits: milliseconds for a mask, 40 MB for a grammar's states."""
    return LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=200_000,
        step_max_items=100_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )
