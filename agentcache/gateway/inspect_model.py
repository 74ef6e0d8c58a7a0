"""Loads a model to report how it would be served, without serving it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from agentcache.config import Config
from agentcache.engine.open import DIVERGENCES, check_weights, plan_for, wishes_of
from agentcache.gateway.describe_model import describe_model
from agentcache.memory_plan import MemoryPlan
from agentcache.models.footprint import Footprint
from agentcache.models.loader import load
from agentcache.report import ModelInfo
from agentcache.store.precision_file import read_precision


@dataclass(frozen=True)
class InspectedModel:
    info: ModelInfo
    plan: MemoryPlan


def inspect_model(config: Config, model_path: str) -> InspectedModel:
    """Load and verify a model as a server does. Precision measurements stay for later starts.

    Raises:
        UnsupportedModel: it cannot be served.
        ConfigError: it does not fit.
    """
    wishes = wishes_of(config)
    loaded = load(
        model_path,
        max_context=config.max_context,
        check_weights=partial(check_weights, wishes),
        kv=config.kv,
        kept=partial(read_precision, config.cache_dir),
        measured=config.cache_dir / DIVERGENCES,
    )
    loaded.tokenizer.grammars.start()
    footprint = Footprint.of(loaded.spec, loaded.config, is_half=loaded.is_half)
    plan = plan_for(wishes, loaded, footprint, config.prefill_chunk)
    return InspectedModel(describe_model(loaded, config), plan)
