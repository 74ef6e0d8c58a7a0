from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agentcache.agents.table import Agents
from agentcache.errors import ContextLengthExceeded, InvalidRequest
from agentcache.kv.packing import Precision
from agentcache.kv.spec import CacheSpec
from agentcache.models.adapters import Adapter, TargetModules
from agentcache.settings.memory_plan import MemoryPlan
from agentcache.store.model_files import ModelNames
from agentcache.system.memory import Level
from agentcache.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServedModel:
    """Constants of the served model, for any thread.

    `num_token_ids`: their bound; None if unknown. `check_lossy`: raises UnsupportedPolicy for an adapter that lossy
    policies cannot use; None without such policies. `is_provisional`: the precision search is unfinished.
    """

    path: Path
    names: ModelNames
    spec: CacheSpec
    precision: Precision
    tokenizer: Tokenizer
    max_context: int
    modules: TargetModules
    adapter_budget: int
    plan: MemoryPlan
    num_token_ids: int | None = None
    num_embeddings: int | None = None
    check_lossy: Callable[[Adapter], object] | None = None
    ranks: int = 1
    is_provisional: bool = False

    @property
    def fingerprint(self) -> str:
        return self.names.current


@dataclass(frozen=True)
class EngineView:
    """The engine's state between two steps, immutable, for any thread."""

    model: ServedModel
    agents: Agents
    max_cached_tokens: int
    memory_pressure: Level = Level.NORMAL

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt, with one token to generate."""
        return min(self.model.max_context, self.max_cached_tokens) - 1

    def check(self, num_prompt_tokens: int, param: str = "prompt", *, counted: bool = True) -> None:
        """Raise InvalidRequest or ContextLengthExceeded. Unless `counted`, the number is a lower bound."""
        how_many = f"the prompt has {'' if counted else 'at least '}{num_prompt_tokens} tokens"
        if num_prompt_tokens == 0:
            raise InvalidRequest("the prompt is empty", param=param)
        if num_prompt_tokens >= self.model.max_context:
            raise ContextLengthExceeded(
                f"{how_many}; with at least one to generate, the model's context of "
                f"{self.model.max_context} is exceeded",
                param=param,
            )
        if num_prompt_tokens + 1 > self.max_cached_tokens:
            raise InvalidRequest(
                f"{how_many}; the RAM budget holds {self.max_cached_tokens}", param=param, code="insufficient_memory"
            )
