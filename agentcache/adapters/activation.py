"""How a request uses its adapter: policy, and first token that the adapter acts on.

Activated LoRA (arXiv 2504.12397) acts from its last invocation, a token sequence. Shared prefill (arXiv 2602.12029)
acts from the prompt's last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agentcache.adapters.table import ServedAdapter, resolve_policy
from agentcache.api.policy import LOSSY, Policy
from agentcache.api.request import Request
from agentcache.blocks.keys import KVOrigin, pack_token_ids, residual_cache
from agentcache.errors import InvalidRequest

_TOKEN_BYTES = 4
_START_PARAM, _POLICY_PARAM = "agentcache.invocation_start", "agentcache.policy"


@dataclass(frozen=True)
class AdapterUse:
    """One request's use of an adapter.

    `start`: first position it acts on; None if it does not act. `stepped_from`: requested policy, if another is used.
    `may_share`: it may become `residual` when memory is scarce. `is_decoder`: it is a whole model.
    """

    name: str
    digest: str
    policy: Policy
    start: int | None
    groups: frozenset[int]
    is_decoder: bool = False
    family: str = ""
    stepped_from: Policy | None = None
    may_share: bool = False

    @property
    def is_residual(self) -> bool:
        return self.policy in LOSSY

    @property
    def is_family(self) -> bool:
        return self.policy is Policy.RESIDUAL_SHARED_A

    @property
    def residual_cache(self) -> str:
        return residual_cache(self.family if self.is_family else self.digest)

    @property
    def requested_policy(self) -> Policy:
        return self.stepped_from or self.policy

    @property
    def producer(self) -> KVOrigin | None:
        return None if self.start is None or self.is_residual else KVOrigin(self.digest, self.start, self.groups)

    @property
    def activated_at(self) -> int | None:
        """`start`, if it depends on the prompt."""
        return self.start if self.policy in (Policy.ACTIVATED, Policy.PREFILL_SHARE) else None

    def stepped_down(self) -> AdapterUse:
        return replace(self, policy=Policy.EXACT, stepped_from=self.requested_policy)

    def resolved(self, policy: Policy) -> AdapterUse:
        return replace(self, policy=policy, may_share=False)


def use_adapter(
    adapter: ServedAdapter, policy: Policy | None, request: Request, token_ids: Sequence[int]
) -> AdapterUse:
    """Return the request's use. Raises InvalidRequest."""
    is_open = adapter.may_share if policy is None else policy is Policy.AUTO and not adapter.residual_refusal
    policy = resolve_policy(policy or adapter.policy, adapter.source, adapter.residual_refusal, param=_POLICY_PARAM)
    if request.invocation_start is not None and policy is not Policy.ACTIVATED:
        raise InvalidRequest(f"the policy {policy.value!r} has no invocation", param=_START_PARAM)
    start = _start(adapter, policy, request, token_ids)
    use = AdapterUse(adapter.name, adapter.digest, policy, start, adapter.groups, adapter.is_decoder, adapter.family)
    if use.is_family and not adapter.is_member:
        return replace(use, policy=Policy.RESIDUAL, stepped_from=policy)
    return replace(use, may_share=is_open and policy is Policy.EXACT)


def refuse_without_adapter(request: Request) -> None:
    if request.policy in LOSSY:
        message = f"the policy {request.policy.value!r} needs an adapter, and a server with --max-divergence above 0"
        raise InvalidRequest(message, param=_POLICY_PARAM)
    if request.policy in (Policy.ACTIVATED, Policy.PREFILL_SHARE):
        raise InvalidRequest(f"the policy {request.policy.value!r} needs an adapter", param=_POLICY_PARAM)
    if request.invocation_start is not None:
        raise InvalidRequest("agentcache.invocation_start needs an adapter", param=_START_PARAM)


def _start(adapter: ServedAdapter, policy: Policy, request: Request, token_ids: Sequence[int]) -> int | None:
    if policy is Policy.EXACT or policy in LOSSY:
        return 0
    if policy is Policy.PREFILL_SHARE:
        # Base computes all without generated tokens.
        return None if request.sampling.max_tokens == 0 else max(0, len(token_ids) - 1)
    if request.invocation_start is not None:
        return _checked_start(request.invocation_start, len(token_ids))
    return _invocation(adapter, request, token_ids)


def _checked_start(start: int, num_tokens: int) -> int:
    if not 0 <= start < num_tokens:
        raise InvalidRequest(f"{start} is not a token of the prompt, which has {num_tokens}", param=_START_PARAM)
    return start


def _invocation(adapter: ServedAdapter, request: Request, token_ids: Sequence[int]) -> int | None:
    source = adapter.source
    tokens = source.invocation_tokens
    found = None if tokens is None else find_last(token_ids, tokens)
    if found is not None:
        return max(0, found + source.activation_shift)
    if request.invocation_optional:
        return None
    why = "names no invocation" if tokens is None else f"is invoked by the tokens {list(tokens)}, not in the prompt"
    hint = 'say agentcache.invocation_start, or let base answer with agentcache.invocation = "optional"'
    raise InvalidRequest(
        f"the adapter {adapter.name!r} {why}; {hint}", param=request.prompt_param, code="invocation_not_found"
    )


def find_last(token_ids: Sequence[int], wanted: Sequence[int]) -> int | None:
    """Return the last occurrence of `wanted` (not empty), even overlapping."""
    text, pattern = pack_token_ids(token_ids), pack_token_ids(wanted)
    found = text.rfind(pattern)
    while found % _TOKEN_BYTES and found >= 0:
        found = text.rfind(pattern, 0, found + len(pattern) - 1)
    return None if found < 0 else found // _TOKEN_BYTES
