"""Put a model on the paged cache: inspect its caches, adapt its modules, prove the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from agentcache.kv.packing import LayerBits, Precision
from agentcache.kv.spec import CacheSpec
from agentcache.models import mla, softcap
from agentcache.models.inspection import Inspection, inspect_model
from agentcache.models.interception import intercept
from agentcache.models.proof import Proof


@dataclass(frozen=True)
class Hosted:
    """Result for a model on the paged cache."""

    inspection: Inspection
    spec: CacheSpec


ChoosePrecision = Callable[[nn.Module, Inspection], Precision]
"""Says in how many bits the keys and values of a model are kept that runs on the paged cache."""


@dataclass(frozen=True)
class Everywhere:
    """The same bits in all layers."""

    bits: LayerBits = LayerBits()

    def __call__(self, model: nn.Module, inspection: Inspection) -> Precision:
        return Precision((self.bits,) * len(inspection.layers))


IN_FOUR_BITS = Everywhere()


def host(
    model: nn.Module,
    model_type: str,
    config: dict[str, Any],
    *,
    check: bool = True,
    choose: ChoosePrecision = IN_FOUR_BITS,
    within: Callable[[nn.Module], AbstractContextManager[None]] = lambda model: nullcontext(),
    adapted: Inspection | None = None,
) -> Hosted:
    """Make a model of mlx-lm run on step caches.

    Args:
        check: whether to prove that it computes mlx-lm's numbers.
        within: context of measurement and proof, such as `in_float32`.
        adapted: inspection of a model that runs on step caches already, and is to keep other bits.

    Raises:
        UnsupportedModel: an unknown kind of cache, or other numbers than mlx-lm's.
    """
    seen = _adapted(model) if adapted is None else adapted
    with within(model):
        *_, hosted = _in_pieces(model, seen, model_type, config, check=check, choose=choose)
    assert hosted is not None  # the last item
    return hosted


def host_in_pieces(
    model: nn.Module,
    model_type: str,
    config: dict[str, Any],
    *,
    check: bool = True,
    choose: ChoosePrecision = IN_FOUR_BITS,
) -> Iterator[Hosted | None]:
    """`host` in pieces: None after each, at last the result."""
    return _in_pieces(model, _adapted(model), model_type, config, check=check, choose=choose)


def _adapted(model: nn.Module) -> Inspection:
    seen = inspect_model(model)
    for layer in model.layers:
        mla.adapt(layer)
        softcap.adapt(layer)
    intercept(model)
    return seen


def _in_pieces(
    model: nn.Module,
    seen: Inspection,
    model_type: str,
    config: dict[str, Any],
    *,
    check: bool,
    choose: ChoosePrecision,
) -> Iterator[Hosted | None]:
    seen = seen.kept_in(choose(model, seen))
    spec = seen.spec(model_type, config)
    if check:
        for _ in Proof(model, seen).pieces():
            yield None
    yield Hosted(seen, spec)
