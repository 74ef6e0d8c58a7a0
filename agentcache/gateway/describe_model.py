"""Describes a model to clients."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from agentcache.api.model import ModelInfo
from agentcache.engine.open import DIVERGENCES, STEPS_PROBED, check_weights, plan_for, wishes_of
from agentcache.engine.view import ServedModel
from agentcache.kv.group_info import describe_group
from agentcache.models.footprint import Footprint
from agentcache.models.loader import LoadedModel, load
from agentcache.models.probe import Probe
from agentcache.settings.config import Config
from agentcache.settings.memory_plan import MemoryPlan
from agentcache.store.precision_file import read_precision
from agentcache.text.model_folder import sampling_defaults

_EMBEDDED_NAME = "agentcache-embedded"


def describe_model(served: ServedModel | LoadedModel, config: Config) -> ModelInfo:
    """Data for `/v1/models` and `agentcache doctor`."""
    name = served.path.name if config.model else _EMBEDDED_NAME
    return ModelInfo(
        id=config.model if config.model and not Path(config.model).is_dir() else name,
        name=name,
        path=str(served.path),
        fingerprint=served.fingerprint,
        model_type=served.spec.model_type,
        max_context=served.max_context,
        vocab_size=served.tokenizer.vocab_size,
        created=int(time.time()),
        has_chat_template=served.tokenizer.has_template_file,
        template_repairs=served.tokenizer.template_repairs(),
        reply_format=served.tokenizer.reply_format,
        thinking=served.tokenizer.thinking,
        kv_bits=served.spec.bits,
        ranks=served.ranks,
        kv_precision=str(served.precision),
        kv_divergence=served.precision.divergence,
        forms_refusal=served.tokenizer.grammars.refusal,
        sampling=config.sampling.over(sampling_defaults(served.path)),
        cache_groups=tuple(describe_group(group) for group in served.spec.all_groups),
    )


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
    probe = Probe(config.cache_dir / STEPS_PROBED, loaded, config.prefill_chunk)
    footprint = replace(Footprint.of(loaded), needs=probe.needs)
    plan = plan_for(wishes, loaded, footprint, config.prefill_chunk)
    return InspectedModel(describe_model(loaded, config), plan)
