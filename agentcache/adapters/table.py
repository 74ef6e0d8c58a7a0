"""The adapters beside the base model, by name: what each is, who uses it, and whose weights have to make room.

Plain bookkeeping. Files are read by `gateway.adapter_loader`, weights on the device belong to `weights`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from agentcache.adapter_settings import LOSSY, RESIDUAL_IS_OFF, Policy
from agentcache.errors import InvalidRequest, NotFound
from agentcache.names import RULE, is_name
from agentcache.report import AdapterInfo

if TYPE_CHECKING:
    from agentcache.models.adapters import Adapter
    from agentcache.models.decoder import Decoder

    # Who an adapter is, by content, and where its weights can be read again.
    AdapterSource = Adapter | Decoder


@dataclass(frozen=True)
class ServedAdapter:
    """What a name means to the requests that come while it does.

    Args:
        source: who the adapter is, by content, and where its weights can be read again.
        policy: how requests that name none share; never `auto`.
        groups: indices of the cache groups in which keys or values can differ from base's.
        residual_refusal: why its requests cannot be `residual`; empty where they can.
        may_share: whether requests that name no policy may be `residual` where memory is scarce.
        is_member: whether there is another one with the same As.
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
        """Digest of its As; empty for a model of its own."""
        return self.source.family

    @property
    def is_decoder(self) -> bool:
        """Whether it is a model of its own, beside which no other row can be computed."""
        return _is_decoder(self.source)


def _is_decoder(source: AdapterSource) -> bool:
    return source.format == "model"


def check_adapter_name(name: str) -> str:
    """`name`, if an adapter may have it: it stands in URLs and behind `<model>:`, and is never a path.

    Raises:
        InvalidRequest: it may not.
    """
    if not is_name(name):
        raise InvalidRequest(f"{name!r:.80} is no adapter name: use {RULE}", param="name")
    return name


def settle_policy(
    policy: Policy, source: AdapterSource, residual_refusal: str = RESIDUAL_IS_OFF, *, param: str = "policy"
) -> Policy:
    """The policy itself, or what `auto` stands for.

    Args:
        residual_refusal: as in `ServedAdapter`.
        param: what the wire calls the policy.

    Raises:
        InvalidRequest: the adapter cannot be used so.
    """
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
    """Names, users, and whose weights are on the device, least recently used first. Weights go by digest: one copy,
    however many names there are.

    Args:
        budget: bytes that all weights on the device may take.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._adapters: dict[str, ServedAdapter] = {}
        self._users: Counter[str] = Counter()
        self._resident: dict[str, int] = {}  # bytes by digest; the one used last is the last one

    # -- names --------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[ServedAdapter]:
        return iter(sorted(self._adapters.values(), key=lambda adapter: adapter.name))

    def get(self, name: str, param: str = "adapter") -> ServedAdapter:
        """What the name means now. Raises NotFound."""
        if name not in self._adapters:
            raise NotFound(f"there is no adapter {name!r:.80}", param=param, code="adapter_not_found")
        return self._adapters[name]

    def put(self, adapter: ServedAdapter) -> None:
        """From now on the name means this; who runs keeps what it meant before."""
        self._adapters[adapter.name] = adapter

    def remove(self, name: str) -> None:
        """The name means nothing any more. Raises NotFound."""
        del self._adapters[self.get(name, "name").name]

    def with_family(self, adapter: ServedAdapter) -> ServedAdapter:
        """The adapter, and whether another one has the same As now."""
        others = (each for each in self._adapters.values() if each.digest != adapter.digest)
        return replace(adapter, is_member=any(each.family == adapter.family != "" for each in others))

    def info(self, adapter: ServedAdapter) -> AdapterInfo:
        """The adapter as clients see it."""
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

    # -- users --------------------------------------------------------------------------------------------------------

    def claim(self, adapter: ServedAdapter) -> None:
        """A request is going to use its weights: once on the device they stay. Counts."""
        self._users[adapter.digest] += 1
        if adapter.digest in self._resident:
            self._resident[adapter.digest] = self._resident.pop(adapter.digest)

    def release(self, adapter: ServedAdapter) -> None:
        """One `claim` is over."""
        self._users[adapter.digest] -= 1
        if self._users[adapter.digest] <= 0:
            del self._users[adapter.digest]

    # -- weights ------------------------------------------------------------------------------------------------------

    def is_resident(self, digest: str) -> bool:
        return digest in self._resident

    def set_resident(self, digest: str, nbytes: int) -> None:
        """These weights are on the device now."""
        self._resident.pop(digest, None)
        self._resident[digest] = nbytes

    def set_dropped(self, digest: str) -> None:
        """These weights are no longer on the device."""
        del self._resident[digest]

    @property
    def resident_bytes(self) -> int:
        return sum(self._resident.values())

    def victims(self, nbytes: int) -> list[str] | None:
        """Digests to drop so that `nbytes` more fit: unused ones, the least recently used first; None if those in use
        leave no room."""
        excess, chosen = self.resident_bytes + nbytes - self.budget, list[str]()
        for digest, held in self._resident.items():
            if excess <= 0:
                break
            if digest not in self._users:
                chosen.append(digest)
                excess -= held
        return chosen if excess <= 0 else None

    def orphans(self) -> list[str]:
        """Digests on the device that no name means and nobody uses."""
        named = {adapter.digest for adapter in self}
        return [digest for digest in self._resident if digest not in named and digest not in self._users]
