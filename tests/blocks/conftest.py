"""Tokenizers for the tests of matching."""

from __future__ import annotations

import pytest

from agentcache.text.tokenizer import Tokenizer
from tests.conftest import StyledTokenizer
from tests.tokenizers_factory import STYLES, STYLES_WITHOUT_TEMPLATE


@pytest.fixture(scope="module", params=sorted(STYLES | STYLES_WITHOUT_TEMPLATE))
def tokenizer(request: pytest.FixtureRequest, styled_tokenizer: StyledTokenizer) -> Tokenizer:
    """One of each kind, with and without a chat template."""
    return styled_tokenizer(request.param)
