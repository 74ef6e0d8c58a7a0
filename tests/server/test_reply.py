from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from agentcache.api.policy import Policy
from agentcache.api.report import CachedTokens, CacheState, StepDown, TokenLogprob
from agentcache.errors import BrokenInvariant
from agentcache.server.openai import accounting
from agentcache.server.reply import Completion, TextOffsets, chat_logprobs, combine, text_logprobs
from tests.server.fake_engine import REPORT


def test_several_prompts_report_their_sums_and_the_coldest_state() -> None:
    hot = replace(REPORT, cache_state=CacheState.HOT, cached_tokens=CachedTokens(own=7))
    warm = replace(REPORT, cache_state=CacheState.WARM)
    combined = combine([hot, warm])
    assert combined.cache_state is CacheState.WARM
    assert combined.cached_tokens == CachedTokens(own=10, shared=2)
    assert combined.prompt_tokens == 14
    assert combine([REPORT]) == REPORT


def test_several_residual_prompts_report_the_worst_of_them() -> None:
    near = replace(REPORT, policy=Policy.RESIDUAL, requested_policy=Policy.RESIDUAL, divergence=0.1)
    near = replace(near, cached_tokens=CachedTokens(own=3, residual=5))
    stepped = replace(REPORT, requested_policy=Policy.RESIDUAL, divergence=0.4, stepped_down=StepDown.DIVERGENCE)
    assert combine([near]) == near
    for combined in (combine([near, stepped]), combine([stepped, near])):
        assert (combined.policy, combined.requested_policy) == ("residual", "residual")
        assert (combined.stepped_down, combined.divergence) == ("divergence", 0.4)
        assert combined.cached_tokens == CachedTokens(own=6, shared=2, residual=5)


def test_impossible_tokens_are_valid_json() -> None:
    impossible = TokenLogprob(1, b"x", -math.inf, ((1, b"x", -math.inf),))
    for shown in (chat_logprobs([impossible]), text_logprobs([impossible], [0])):
        assert "-9999.0" in json.dumps(shown, allow_nan=False)


def test_the_chosen_token_is_among_the_alternatives() -> None:
    token = TokenLogprob(9, b"rare", -7.0, ((1, b"x", -0.1), (2, b"x", -3.0)))
    assert text_logprobs([token], [0])["top_logprobs"] == [{"x": -0.1, "rare": -7.0}]


def test_parts_of_a_character_are_told_apart_by_their_bytes() -> None:
    east = "東".encode()
    tokens = [
        TokenLogprob(1, east[:1], -0.1, ((1, east[:1], -0.1), (2, east[1:2], -3.0))),
        TokenLogprob(3, east[1:], -1),
    ]
    first = chat_logprobs(tokens)["content"][0]
    assert (first["token"], first["bytes"]) == ("\\xe6", [0xE6])
    assert text_logprobs(tokens, [0, 0])["top_logprobs"][0] == {"\\xe6": -0.1, "\\x9d": -3.0}


def test_offsets_point_into_the_text() -> None:
    """BOS and control tokens are not in it; a character belongs to the token that completes it."""
    east = "東".encode()
    prompt = [TokenLogprob(i, data, None) for i, data in enumerate((b"<bos>", b"The", b" sun"))]
    said = [
        TokenLogprob(9, b" in", -1),
        TokenLogprob(9, b"<end>", -1, shown=False),
        *(TokenLogprob(9, bytes([b]), -1) for b in east),
    ]
    said.append(TokenLogprob(9, b"!", -1))
    text, counted = "The sun in東!", TextOffsets(len("The sun"))
    assert TextOffsets.of_prompt(prompt, len("The sun")) == [0, 0, 3]
    assert counted.of(said[:3]) + counted.of(said[3:]) == [7, 10, 10, 10, 10, 11]
    assert (text[10:], text[11:]) == ("東!", "!")


def test_a_missing_report_is_our_bug() -> None:
    with pytest.raises(BrokenInvariant):
        _ = Completion().final_report


def test_accounting_is_json() -> None:
    assert json.loads(json.dumps(accounting([REPORT])))["agentcache"]["cache_state"] == "cold"
