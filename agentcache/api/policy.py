from __future__ import annotations

from enum import StrEnum

from agentcache.errors import InvalidRequest


class Policy(StrEnum):
    """How an adapter shares the KV cache (docs/adapters.md)."""

    AUTO = "auto"
    EXACT = "exact"
    ACTIVATED = "activated"
    PREFILL_SHARE = "prefill-share"
    # Lossy: refused unless `max_divergence` is above 0. `auto` uses the first if memory is scarce.
    RESIDUAL = "residual"
    RESIDUAL_SHARED_A = "residual-shared-a"


RESIDUAL_IS_OFF = "the policy 'residual' is not exact; --max-divergence above 0 allows it, and is 0"
LOSSY = frozenset({Policy.RESIDUAL, Policy.RESIDUAL_SHARED_A})
# Published, but lossy.
REFUSED_POLICIES = ("full-reuse",)


def parse_policy(text: str, param: str = "policy") -> Policy:
    """Parse a policy's name. Raises InvalidRequest."""
    if text in REFUSED_POLICIES:
        raise InvalidRequest(f"{param} {text!r} is not supported", param=param)
    if text not in list(Policy):
        raise InvalidRequest(f"{param} must be one of {', '.join(Policy)}", param=param)
    return Policy(text)
