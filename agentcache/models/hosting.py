"""Put a model on the paged cache: look at what it caches, adapt what computes with cached keys itself, and prove it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from agentcache.kv.spec import CacheSpec
from agentcache.models import mla, softcap
from agentcache.models.interception import intercept
from agentcache.models.proof import Proof
from agentcache.models.survey import Survey, survey


@dataclass(frozen=True)
class Hosted:
    """What a model on the paged cache caches, and where."""

    survey: Survey
    spec: CacheSpec


def host(model: nn.Module, model_type: str, config: dict[str, Any], *, check: bool = True) -> Hosted:
    """Have a model of mlx-lm run on step caches.

    Raises:
        UnsupportedModel: a layer keeps something that is not understood, or gives other numbers than mlx-lm's own.
    """
    *_, hosted = host_in_pieces(model, model_type, config, check=check)
    assert hosted is not None  # it comes last
    return hosted


def host_in_pieces(
    model: nn.Module, model_type: str, config: dict[str, Any], *, check: bool = True
) -> Iterator[Hosted | None]:
    """`host`, for a thread that has other things to do between two pieces: None for each, the result at last."""
    seen = survey(model)
    spec = seen.spec(model_type, config)
    for layer in model.layers:
        mla.adapt(layer)
        softcap.adapt(layer)
    intercept(model)
    if check:
        for _ in Proof(model, seen).pieces():
            yield None
    yield Hosted(seen, spec)
