"""Memory for a few caches of one adapter each, and more adapters than that: what is computed, turn after turn.

Without files: nobody names an agent, so what has lost its place is computed again, as where the papers measure it.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from agentcache.api.policy import Policy
from agentcache.api.request import Request, TokenPrompt
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.llm import LLM, Completion
from tests.adapters_factory import make_adapter
from tests.conftest import ModelFolder
from tests.serving import inside
from tests.serving.adapter_cases import all_ids, at_once, open_adapters
from tests.serving.conversation import check_idle, greedy, make_ids
from tests.serving.residual_cases import UNLIMITED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NAMES = tuple(f"a{number}" for number in range(6))
CONTEXT = make_ids(4 * BLOCK_SIZE)
TURNS = 4
NEW = 60  # tokens of a prompt behind what has been said
FITTING = 3  # exact caches


@dataclass(frozen=True)
class Found:
    computed: int
    preempted: int
    answers: list[Completion]

    def answered(self, policy: str) -> int:
        return sum(each.report.policy == policy for each in self.answers)


def talk(llm: LLM, policy: Policy | None) -> Found:
    """All conversations at once, a turn each."""
    histories = dict.fromkeys(NAMES, CONTEXT)
    answers = []
    for turn in range(TURNS):
        prompts = {
            name: [*ids, *make_ids(NEW, seed=100 * turn + number + 1)]
            for number, (name, ids) in enumerate(histories.items())
        }
        requests = [
            Request(f"{name}.{turn}", TokenPrompt(ids), greedy(3), adapter=name, policy=policy)
            for name, ids in prompts.items()
        ]
        inside.hold_until(llm, len(requests))
        said = at_once(llm, requests)
        histories = dict(zip(NAMES, map(all_ids, said), strict=True))
        answers += said
    check_idle(llm)
    stats = llm.stats()
    return Found(stats.computed_tokens, stats.preemptions, answers)


@pytest.fixture(scope="module")
def found(model_folder: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    model, root = model_folder("qwen3", num_hidden_layers=2), tmp_path_factory.mktemp("scarce")
    values = ("self_attn.q_proj", "self_attn.v_proj")
    folders = {
        name: make_adapter(root / name, model, rank=4, seed=i, strength=0.3, targets=values)
        for i, name in enumerate(NAMES)
    }
    with open_adapters(model, root / "look", folders, max_divergence=UNLIMITED) as llm:
        block = sum(group.bytes_per_block for group in inside.loaded_model(inside.engine_of(llm)).spec.groups)
        weights = llm.stats().adapter_ram_bytes
    blocks = -(-(len(CONTEXT) + TURNS * (NEW + 3)) // BLOCK_SIZE)
    settings = {"max_divergence": UNLIMITED, "trunk_budget": 0, "ram_budget": FITTING * blocks * block + 2 * weights}
    made = {}
    for policy in ("exact", "residual", "auto"):
        with open_adapters(model, root / policy, folders, **settings) as llm:
            made[policy] = talk(llm, None if policy == "auto" else Policy(policy))
    return made


def test_exact_reads_contexts_again(found: dict[str, Found]) -> None:
    assert found["exact"].computed > 0.8 * TURNS * len(NAMES) * len(CONTEXT)


def test_sharing_computes_less_than_half(found: dict[str, Found]) -> None:
    """Base's pass over the context, one of each adapter, and twice what is new."""
    new = len(NAMES) * TURNS * (NEW + 3)
    assert found["residual"].computed < 1.1 * ((1 + len(NAMES)) * len(CONTEXT) + 2 * new)
    assert found["exact"].computed > 2 * found["residual"].computed


def test_auto_comes_to_share_and_stays_so(found: dict[str, Found]) -> None:
    auto = found["auto"]
    assert 0 < auto.answered("exact") < FITTING < auto.answered("residual")
    assert auto.computed < found["residual"].computed + FITTING * (len(CONTEXT) + NEW)


def test_nobody_takes_anothers_place(found: dict[str, Found]) -> None:
    assert {policy: each.preempted for policy, each in found.items()} == dict.fromkeys(found, 0)
