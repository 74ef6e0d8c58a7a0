"""How much a grammar may take, of llguidance's measures; the kernel limits time and memory of the check beside them."""

from __future__ import annotations

from llguidance import LLParserLimits

MAX_CHARACTERS = 1 << 20  # of all parts together


def parser_limits() -> LLParserLimits:
    """Work for one mask is some milliseconds; the states of one grammar take up to 40 MB."""
    return LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=200_000,
        step_max_items=100_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )
