from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from agentcache.errors import BrokenInvariant
from agentcache.server.logprobs import chat_logprobs, text_logprobs
from agentcache.server.reply import Completion, combine
from agentcache.server.shapes import accounting
from agentcache.serving.request import CachedTokens, CacheState, TokenLogprob
from tests.server.fake_engine import REPORT


def test_several_prompts_report_their_sums_and_the_coldest_state() -> None:
    hot = replace(REPORT, cache_state=CacheState.HOT, cached_tokens=CachedTokens(own=7))
    warm = replace(REPORT, cache_state=CacheState.WARM)
    combined = combine([hot, warm])
    assert combined.cache_state is CacheState.WARM
    assert combined.cached_tokens == CachedTokens(own=10, shared=2)
    assert combined.prompt_tokens == 14
    assert combine([REPORT]) == REPORT


def test_impossible_tokens_are_valid_json() -> None:
    impossible = TokenLogprob(1, "x", -math.inf, ((1, "x", -math.inf),))
    for shown in (chat_logprobs([impossible]), text_logprobs([impossible])):
        assert "-9999.0" in json.dumps(shown, allow_nan=False)


def test_the_chosen_token_is_among_the_alternatives() -> None:
    token = TokenLogprob(9, "rare", -7.0, ((1, "x", -0.1), (2, "x", -3.0)))
    assert text_logprobs([token])["top_logprobs"] == [{"x": -0.1, "rare": -7.0}]


def test_a_missing_report_is_our_bug() -> None:
    with pytest.raises(BrokenInvariant):
        _ = Completion().final_report


def test_accounting_is_json() -> None:
    assert json.loads(json.dumps(accounting([REPORT])))["agentcache"]["cache_state"] == "cold"
