"""Which format a model's replies have: found in its tokenizer's tokens and in its chat template."""

from __future__ import annotations

from collections.abc import Mapping

from agentcache.models.text.replies.dialects import DIALECTS, THOUGHTS
from agentcache.models.text.replies.format import HARMONY, HARMONY_MARKERS, MarkerToken, ReplyFormat


def find_format(template: str, tokens: Mapping[str, tuple[int, bool]], mlx_lm_parser: str | None) -> ReplyFormat:
    """The format of a model.

    Args:
        template: its chat template; all of them where there are several.
        tokens: id, and whether it is special, of each added token by its content.
        mlx_lm_parser: what mlx-lm takes for the format of its tool calls.
    """
    if all(marker in tokens for marker in ("<|start|>", "<|channel|>", "<|message|>")):
        dialect: str | None = HARMONY
        thoughts: tuple[tuple[str, str], ...] = ()
    else:
        dialect = _find_dialect(template, tokens, mlx_lm_parser)
        thoughts = tuple(pair for pair in THOUGHTS if _has_pair(pair, template, tokens))
    markers = HARMONY_MARKERS if dialect == HARMONY else DIALECTS[dialect].markers if dialect is not None else ()
    single = [name for name in tokens if any(name in marker for marker in (*markers, *sum(thoughts, ())))]
    thinks_first = any(_only_closes(pair, template) for pair in thoughts)
    return ReplyFormat(
        dialect,
        thoughts,
        thinks_first,
        tuple(MarkerToken(name, tokens[name][0], is_shown=not tokens[name][1]) for name in single),
    )


def _has_pair(pair: tuple[str, str], template: str, tokens: Mapping[str, object]) -> bool:
    if all(marker in tokens for marker in pair) or pair[1] in template:
        return True
    # Markers of several tokens are those of a model that has their first and last ones.
    return "<|channel>" in tokens and "<channel|>" in tokens and pair == ("<|channel>thought", "<channel|>")


def _only_closes(pair: tuple[str, str], template: str) -> bool:
    """Whether a template knows where a thought ends, but not where it begins, as DeepSeek-R1's first one."""
    start, end = pair
    return end in template and start not in template and end.replace("/", "") == start


def _find_dialect(template: str, tokens: Mapping[str, object], mlx_lm_parser: str | None) -> str | None:
    known = {*tokens}

    def has(marker: str) -> bool:
        return marker in known or marker in template

    if mlx_lm_parser in DIALECTS:
        return mlx_lm_parser
    if has("<｜tool▁calls▁begin｜>") or "<|tool_calls_end|>" in template:
        return "deepseek"
    if has("[TOOL_CALLS]"):
        return "mistral"
    if has("<|python_tag|>"):
        return "llama3"
    if has("<|tool_call|>"):
        return "granite"
    if has("<tool_call>"):
        return "json_tools"
    if "<function=" in template:
        return "functions"
    if '"parameters": dictionary of argument name' in template:
        return "llama3"
    return None
