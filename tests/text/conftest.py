"""Tokenizers for the tests of everything between text and tokens."""

from __future__ import annotations

import pytest

from agentcache.text.tokenizer import Tokenizer
from tests.conftest import StyledTokenizer
from tests.tokenizers_factory import STYLES


@pytest.fixture(scope="module", params=sorted(STYLES))
def tokenizer(request: pytest.FixtureRequest, styled_tokenizer: StyledTokenizer) -> Tokenizer:
    """One of each kind."""
    return styled_tokenizer(request.param)
