"""One batch of requests of all policies: each says what it says alone, and they are computed together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentcache.api.policy import Policy
from agentcache.api.request import Request, TokenPrompt
from agentcache.api.sampling import SamplingParams
from agentcache.llm import LLM
from tests.adapters_factory import ATTENTION, make_adapter
from tests.conftest import ModelFolder
from tests.serving import inside
from tests.serving.adapter_cases import INVOKE_A, at_once
from tests.serving.conversation import check_same, make_ids
from tests.serving.residual_cases import UNLIMITED, open_residual

TOKENS = 20
# Prompts go before decoding, however long they take here: so the rows meet, on a busy machine too.
PROMPTS_FIRST = {"max_stall_ms": 1e6, "decode_share": 1e-6}
ADAPTERS: dict[str, dict[str, Any]] = {
    "four": {"rank": 4, "seed": 1, "targets": ATTENTION},
    "sixteen": {"rank": 16, "seed": 2, "targets": ATTENTION},
    "values": {"rank": 3, "seed": 3, "targets": ["self_attn.q_proj", "self_attn.v_proj"]},
    "active": {"rank": 3, "seed": 4, "config": {"alora_invocation_tokens": INVOKE_A}},
}
WHO: list[tuple[str | None, Policy | None, int]] = [
    (None, None, 270),
    ("four", Policy.RESIDUAL, 300),
    ("sixteen", Policy.RESIDUAL, 40),
    ("values", Policy.RESIDUAL, 513),
    ("four", Policy.EXACT, 90),
    ("active", Policy.ACTIVATED, 120),
    ("sixteen", Policy.PREFILL_SHARE, 60),
    ("four", Policy.RESIDUAL, 7),
]


def requests(salt: str = "", tokens: int = TOKENS) -> list[Request]:
    """The same requests whenever asked; with a salt, none finds what another has computed."""
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=1)
    made = []
    for number, (adapter, policy, length) in enumerate(WHO):
        ids = make_ids(length, seed=number)
        if policy is Policy.ACTIVATED:
            ids[-20:-17] = INVOKE_A
        made.append(
            Request(
                f"{salt}{number}",
                TokenPrompt(ids),
                sampling,
                adapter=adapter,
                policy=policy,
                salt=salt,
            )
        )
    return made


@pytest.fixture
def llm(model_folder: ModelFolder, tmp_path: Path) -> Iterator[LLM]:
    model = model_folder("qwen3", num_hidden_layers=2)
    folders = {name: make_adapter(tmp_path / name, model, strength=0.3, **recipe) for name, recipe in ADAPTERS.items()}
    settings = {"max_divergence": UNLIMITED, **PROMPTS_FIRST}
    with open_residual(model, tmp_path / "cache", folders, **settings) as llm:
        yield llm


@pytest.mark.slow
def test_each_row_says_what_it_says_alone_and_rows_meet(llm: LLM) -> None:
    alone = [at_once(llm, [request])[0] for request in requests("alone")]
    at_once(llm, requests(tokens=1))  # prompts are read: what follows is decoding
    before = llm.stats()
    inside.hold_until(llm, len(WHO))
    together = at_once(llm, requests())
    stats = llm.stats()
    rows, steps = stats.decode_rows - before.decode_rows, stats.decode_steps - before.decode_steps
    assert 0.9 * len(WHO) <= rows / steps <= len(WHO), "companions of residual rows do not count"
    for mine, theirs, (_, policy, _) in zip(together, alone, WHO, strict=True):
        check_same(mine, theirs)
        assert mine.report.policy is theirs.report.policy
        assert policy in (None, mine.report.policy)
