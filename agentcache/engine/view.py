"""What other threads see of the engine: frozen, and made anew when something has changed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentcache.agents.table import Agents
from agentcache.errors import ContextLengthExceeded, InvalidRequest
from agentcache.kv.precision import Precision
from agentcache.kv.spec import CacheSpec
from agentcache.memory_plan import MemoryPlan
from agentcache.models.adapters import TargetModules
from agentcache.models.residual_forms import ResidualSupport
from agentcache.models.text.tokenizer import Tokenizer
from agentcache.pressure import Level
from agentcache.store.model_names import ModelNames


@dataclass(frozen=True)
class ServedModel:
    """What stays as it is as long as the engine lives.

    Args:
        names: what its blocks and agents are named by, and which other names mean this model.
        precision: of cached keys and values.
        max_context: tokens that the model was made for.
        num_token_ids: the ids below this may be tokens; None where that is not known.
        num_embeddings: the model has an embedding for the ids below this; None where that is not known.
        modules: what of it adapters can act on.
        adapter_budget: bytes that all adapters' weights together may take.
        plan: how memory is shared out.
        residuals: which adapters can share base's cache and keep what they add to it; None where no request may.
        ranks: processes that compute it together.
        is_provisional: whether the precision serves until another one is chosen.
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
    residuals: ResidualSupport | None = None
    ranks: int = 1
    is_provisional: bool = False

    @property
    def fingerprint(self) -> str:
        """Its name, by its content."""
        return self.names.current


@dataclass(frozen=True)
class EngineView:
    """How things were when the engine was last between two steps.

    Args:
        agents: all that are known.
        max_cached_tokens: tokens of the longest context that RAM can hold.
        memory_pressure: the level that the engine works at.
    """

    model: ServedModel
    agents: Agents
    max_cached_tokens: int
    memory_pressure: Level = Level.NORMAL

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens that a prompt may have, with one at least to generate."""
        return min(self.model.max_context, self.max_cached_tokens) - 1

    def check(self, num_prompt_tokens: int, param: str = "prompt", *, counted: bool = True) -> None:
        """Refuse a prompt that cannot run, before anything is done for it.

        Args:
            param: what the wire calls the prompt.
            counted: whether all its tokens have been counted; else the number is a lower bound.

        Raises:
            InvalidRequest: it is empty, or RAM cannot hold it.
            ContextLengthExceeded: the model's context cannot.
        """
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
