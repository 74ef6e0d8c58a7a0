"""Adapters by name: meanings, users, weights to drop."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from agentcache.api.model import AdapterInfo
from agentcache.api.names import RULE, is_name
from agentcache.api.policy import LOSSY, RESIDUAL_IS_OFF, Policy
from agentcache.errors import InvalidRequest, NotFound

if TYPE_CHECKING:
    from agentcache.models.adapters import Adapter
    from agentcache.models.decoder import Decoder

    AdapterSource = Adapter | Decoder


@dataclass(frozen=True)
class ServedAdapter:
    """Meaning of an adapter's name.

    Args:
        policy: default; never `auto`.
        groups: indices of cache groups whose KV can differ from base's.
        residual_refusal: why its requests cannot be `residual`, or empty.
        may_share: requests without policy may become `residual` when memory is scarce.
        is_member: another adapter has the same A matrices.
    """

    name: str
    source: AdapterSource
    policy: Policy
    groups: frozenset[int]
    residual_refusal: str = RESIDUAL_IS_OFF
    may_share: bool = False
    is_member: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def digest(self) -> str:
        return self.source.digest

    @property
    def family(self) -> str:
        """Digest of the A matrices; empty for a whole model."""
        return self.source.family

    @property
    def is_decoder(self) -> bool:
        return _is_decoder(self.source)


def _is_decoder(source: AdapterSource) -> bool:
    return source.format == "model"


def check_adapter_name(name: str) -> str:
    """Return a valid name, for URLs and `<model>:NAME`; else raise InvalidRequest."""
    if not is_name(name):
        raise InvalidRequest(f"{name!r:.80} is no adapter name: use {RULE}", param="name")
    return name


def resolve_policy(
    policy: Policy, source: AdapterSource, residual_refusal: str = RESIDUAL_IS_OFF, *, param: str = "policy"
) -> Policy:
    """Resolve `auto`. Raises InvalidRequest if the adapter does not support the policy."""
    if policy in LOSSY and residual_refusal:
        raise InvalidRequest(residual_refusal, param=param, code="policy_unsupported")
    if _is_decoder(source):
        if policy not in (Policy.AUTO, Policy.PREFILL_SHARE):
            raise InvalidRequest(f"a decoder that is a whole model cannot be {policy.value!r}", param=param)
        return Policy.PREFILL_SHARE
    if policy is not Policy.AUTO:
        return policy
    return Policy.EXACT if source.invocation_tokens is None else Policy.ACTIVATED


class AdapterTable:
    """Adapters by name; users and weights by digest."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._adapters: dict[str, ServedAdapter] = {}
        self._users: Counter[str] = Counter()
        self._resident: dict[str, int] = {}  # bytes by digest, least recently used first

    def __iter__(self) -> Iterator[ServedAdapter]:
        return iter(sorted(self._adapters.values(), key=lambda adapter: adapter.name))

    def get(self, name: str, param: str = "adapter") -> ServedAdapter:
        if name not in self._adapters:
            raise NotFound(f"there is no adapter {name!r:.80}", param=param, code="adapter_not_found")
        return self._adapters[name]

    def put(self, adapter: ServedAdapter) -> None:
        """Running requests keep the name's old meaning."""
        self._adapters[adapter.name] = adapter

    def remove(self, name: str) -> None:
        del self._adapters[self.get(name, "name").name]

    def with_family(self, adapter: ServedAdapter) -> ServedAdapter:
        others = (each for each in self._adapters.values() if each.digest != adapter.digest)
        return replace(adapter, is_member=any(each.family == adapter.family != "" for each in others))

    def info(self, adapter: ServedAdapter) -> AdapterInfo:
        source = adapter.source
        return AdapterInfo(
            name=adapter.name,
            path=str(source.path),
            format=source.format,
            digest=source.digest,
            policy=adapter.policy,
            ram_bytes=self._resident.get(source.digest, 0),
            resident=source.digest in self._resident,
            running=self._users[source.digest],
            max_rank=max(source.ranks.values(), default=None),
            first_layer=source.first_layer,
            invocation_tokens=source.invocation_tokens,
            created=adapter.created,
        )

    def claim(self, adapter: ServedAdapter) -> None:
        """Add a user: weights stay on the device."""
        self._users[adapter.digest] += 1
        if adapter.digest in self._resident:
            self._resident[adapter.digest] = self._resident.pop(adapter.digest)

    def release(self, adapter: ServedAdapter) -> None:
        self._users[adapter.digest] -= 1
        if self._users[adapter.digest] <= 0:
            del self._users[adapter.digest]

    def is_resident(self, digest: str) -> bool:
        return digest in self._resident

    def set_resident(self, digest: str, nbytes: int) -> None:
        self._resident.pop(digest, None)
        self._resident[digest] = nbytes

    def set_dropped(self, digest: str) -> None:
        del self._resident[digest]

    @property
    def resident_bytes(self) -> int:
        return sum(self._resident.values())

    def victims(self, nbytes: int) -> list[str] | None:
        """Return unused digests to drop for `nbytes` more, least recently used first, or None."""
        excess, chosen = self.resident_bytes + nbytes - self.budget, list[str]()
        for digest, held in self._resident.items():
            if excess <= 0:
                break
            if digest not in self._users:
                chosen.append(digest)
                excess -= held
        return chosen if excess <= 0 else None

    def orphans(self) -> list[str]:
        """Digests on the device without names or users."""
        named = {adapter.digest for adapter in self}
        return [digest for digest in self._resident if digest not in named and digest not in self._users]
