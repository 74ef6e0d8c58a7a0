"""Many agents over one prompt: one base, and what each adapter adds to it. By stats, and again by the files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from agentcache.api.request import Request, TokenPrompt
from agentcache.api.stats import CacheStats
from agentcache.blocks.block_tables import BlockTables
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.blocks.search import Cached
from agentcache.errors import OutOfBlocks
from agentcache.llm import LLM
from tests.adapters_factory import ATTENTION
from tests.conftest import ModelFolder
from tests.marks import slow
from tests.serving import inside
from tests.serving.adapter_cases import ask, at_once
from tests.serving.conversation import greedy, make_ids
from tests.serving.residual_cases import open_residual, residual_folders, say

RANK = 4
AGENTS = tuple(f"agent{number}" for number in range(8))
ANSWER = 1  # which nobody has computed yet: base's blocks are those of the prompt


@dataclass(frozen=True)
class Held:
    """Bytes that hold something: of base and of residuals, in RAM and in files."""

    base: int
    residual: int
    base_files: int
    residual_files: int

    @classmethod
    def of(cls, stats: CacheStats) -> Held:
        used = stats.ram_used
        return cls(
            used["base"] or 0,
            used["residual"] or 0,
            stats.disk_bytes_by.get("base", 0),
            stats.disk_bytes_by.get("residual", 0),
        )


def talk(llm: LLM, agents: tuple[str, ...], prompt: list[int], policy: str) -> list[Held]:
    """What is held after each agent's turn."""
    found = []
    for agent in agents:
        if policy == "residual":
            say(llm, prompt, agent, ANSWER, agent=agent)
        else:
            ask(llm, prompt, agent, ANSWER, agent=agent, policy=policy)
        found.append(Held.of(llm.stats()))
    return found


@pytest.mark.parametrize("num_tokens", [slow(1000), slow(4080)])
def test_eight_agents_take_one_base_and_eight_residuals(
    model_folder: ModelFolder, tmp_path: Path, num_tokens: int
) -> None:
    model = model_folder("qwen3", num_hidden_layers=2)
    folders = residual_folders(tmp_path / "adapters", model, AGENTS, rank=RANK, targets=ATTENTION)
    prompt = make_ids(num_tokens)
    with open_residual(model, tmp_path / "exact", folders) as llm:
        spec = inside.loaded_model(inside.engine_of(llm)).spec
        two_blocks = 2 * sum(group.bytes_per_block for group in spec.groups)
        exact = talk(llm, AGENTS[:4], prompt, "exact")
        assert exact[-1].base - exact[0].base > two_blocks, "each of them has a cache of its own"
    with open_residual(model, tmp_path / "residual", folders) as llm:
        held = talk(llm, AGENTS, prompt, "residual")
    blocks = -(-(num_tokens + ANSWER) // BLOCK_SIZE)
    ranks = 2 * spec.num_layers * RANK  # of keys and of values
    norms = sum(2 * layer.num_kv_heads for group in spec.groups for layer in group.layers)
    residuals = len(AGENTS) * blocks * BLOCK_SIZE * 2 * (ranks + norms)
    assert held[-1].base - held[0].base <= two_blocks
    assert held[-1].base_files - held[0].base_files <= two_blocks
    assert held[0].base > 0 < held[0].residual
    assert held[-1].residual <= 1.05 * residuals
    # A file says of its block what it is, whatever that takes: as in base's, a few hundred bytes and its tokens.
    heads = len(AGENTS) * blocks * len(spec.groups) * 8192
    assert 0.9 * residuals * num_tokens / (blocks * BLOCK_SIZE) < held[-1].residual_files <= 1.05 * residuals + heads


def test_base_is_closed_if_the_residuals_cannot_be_opened(
    model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a running request, the refused one waits and is opened again."""
    model = model_folder("qwen3", num_hidden_layers=2)
    folders = residual_folders(tmp_path / "adapters", model, AGENTS[:1], rank=RANK)
    live, refused = list[int](), list[PrefixCache]()
    prompt = make_ids(300, seed=1)
    with open_residual(model, tmp_path / "cache", folders) as llm:
        say(llm, prompt, AGENTS[0], ANSWER)
        base, take = inside.engine_of(llm).cache, PrefixCache.open

        def refuse_residuals(cache: PrefixCache, root: str, cached: Cached) -> BlockTables:
            if cache is base:
                live.append(base.count_blocks().live)
            elif len(refused) < 2:
                refused.append(cache)
                raise OutOfBlocks("no residuals now")
            return take(cache, root, cached)

        monkeypatch.setattr(PrefixCache, "open", refuse_residuals)
        running = Request("running", TokenPrompt(make_ids(10)), greedy(60))
        waiting = Request("waiting", TokenPrompt(prompt), greedy(ANSWER), adapter=AGENTS[0], policy="residual")
        _, said = at_once(llm, [running, waiting])
    assert said.report.policy == "residual" and len(refused) == 2
    assert live == [0, 2, 2, 2], "blocks of the running request, before each opening"
