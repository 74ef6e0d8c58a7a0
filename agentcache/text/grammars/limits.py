"""llguidance's limits for a grammar; the kernel also limits the check's time and memory."""

from __future__ import annotations

from llguidance import LLParserLimits

MAX_CHARACTERS = 1 << 20  # of all parts together


def parser_limits() -> LLParserLimits:
    """Return limits that keep a mask within milliseconds and a grammar's states within 40 MB."""
    return LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=200_000,
        step_max_items=100_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )
