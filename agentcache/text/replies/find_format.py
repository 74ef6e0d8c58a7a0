"""Detect a model's reply format from its tokens and chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from agentcache.api.model import HARMONY, HARMONY_MARKERS, MarkerToken, ReplyFormat
from agentcache.text.replies.dialects import DIALECTS, THOUGHTS
from agentcache.text.replies.written import WrittenReply, find_dialect


def find_format(
    template: str,
    tokens: Mapping[str, tuple[int, bool]],
    mlx_lm_parser: str | None,
    written: Sequence[WrittenReply] = (),
) -> ReplyFormat:
    """Return a model's reply format.

    Args:
        template: text of all its chat templates.
        tokens: (id, is special) of each added token by content.
        written: rendered replies with calls.
    """
    all_text = "\n".join([template, *(reply.prompt + reply.text for reply in written)])
    if all(marker in tokens for marker in ("<|start|>", "<|channel|>", "<|message|>")):
        dialect: str | None = HARMONY
        thoughts: tuple[tuple[str, str], ...] = ()
    else:
        dialect = _find_dialect(template, tokens, mlx_lm_parser, written)
        thoughts = tuple(pair for pair in THOUGHTS if _has_pair(pair, all_text, tokens))
    markers = HARMONY_MARKERS if dialect == HARMONY else DIALECTS[dialect].markers if dialect is not None else ()
    single = [name for name in tokens if any(name in marker for marker in (*markers, *sum(thoughts, ())))]
    thinks_first = any(_only_closes(pair, all_text) for pair in thoughts)
    return ReplyFormat(
        dialect,
        thoughts,
        thinks_first,
        tuple(MarkerToken(name, tokens[name][0], is_shown=not tokens[name][1]) for name in single),
    )


def _has_pair(pair: tuple[str, str], text: str, tokens: Mapping[str, object]) -> bool:
    start, end = pair
    if all(marker in tokens or marker in text for marker in pair) or (end in text and _is_tag(pair)):
        return True
    # It is several tokens.
    return "<|channel>" in tokens and "<channel|>" in tokens and start == "<|channel>thought"


def _is_tag(pair: tuple[str, str]) -> bool:
    return pair[1].replace("/", "") == pair[0]


def _only_closes(pair: tuple[str, str], text: str) -> bool:
    """Whether replies begin with unmarked reasoning: the template has only the closing marker."""
    start, end = pair
    if end not in text or start in text or not _is_tag(pair):
        return False
    # A template that tests `end in reply` expects replies without reasoning: the model writes both markers.
    return re.search(rf"""["']{re.escape(end)}["']\s+in\b""", text) is None


def _find_dialect(
    template: str, tokens: Mapping[str, object], mlx_lm_parser: str | None, written: Sequence[WrittenReply]
) -> str | None:
    for reply in written:
        if reply.shows_calls and (found := find_dialect(reply, mlx_lm_parser)) is not None:
            return found
    if mlx_lm_parser in DIALECTS:
        return mlx_lm_parser
    told = [name for name, dialect in DIALECTS.items() if any(sign in template for sign in dialect.signs)]
    if told:
        return told[0]
    return next((name for name, dialect in DIALECTS.items() if any(sign in tokens for sign in dialect.signs)), None)
