"""`agentcache doctor` for a model: support, cache groups, memory."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from agentcache.client import Client
from agentcache.settings.config import Config
from agentcache.settings.memory_plan import state_budget

if TYPE_CHECKING:
    from agentcache.kv.group_info import CacheGroupInfo

AGENT_TOKENS = 8192  # of the agents that are counted


class Finding(NamedTuple):
    """A finding, as text and as data."""

    name: str
    detail: str
    data: Any = None


def examine_model(config: Config, url: str | None) -> list[Finding]:
    """Examine the model served at `url`, or load the configured one.

    Raises:
        AgentCacheError: unsupported or too large model, or no answer.
    """
    if url is not None:
        with Client(url, config.api_key) as client:
            models, stats = client.request("GET", "/v1/models"), client.request("GET", "/v1/cache/stats")
        return list(_served(models["data"][0], stats))
    if config.model is not None and local_folder(config.model) is None:
        return [Finding("model", f"{config.model} is not on this machine yet; `agentcache serve` fetches it")]
    with tempfile.TemporaryDirectory(prefix="agentcache-doctor-") as home:
        return list(_loaded(config, Path(home)))


def _served(model: Mapping[str, Any], stats: Mapping[str, Any]) -> Iterator[Finding]:
    from agentcache.kv.group_info import CacheGroupInfo, GroupKind

    groups = [CacheGroupInfo(**each | {"kind": GroupKind(each["kind"])}) for each in model["cache_groups"]]
    yield _model(
        model["id"], model["max_model_len"], model["kv_bits"], model.get("kv_precision"), model.get("kv_divergence")
    )
    yield _sampling(model.get("sampling", {}))
    yield _groups(groups)
    yield _forms(model.get("structured_output_refusal"))
    if (template := model.get("chat_template")) is not None:
        yield _template(template["repairs"] if template["used"] else None)
    accounts = stats["ram_accounts"]
    plan = {
        "limit": stats["memory_limit"],
        "weights": accounts["weights"]["capacity_bytes"],
        "ram_budget": stats["ram_budget"],
    }
    yield _memory(groups, model["max_model_len"], plan, accounts.get("state", {}).get("floor_bytes", 0))


def _loaded(config: Config, home: Path) -> Iterator[Finding]:
    """Load the configured model; the embedded one in `home`, since only servers make a permanent copy."""
    from agentcache.gateway.describe_model import inspect_model
    from agentcache.models.builtin.embedded import embedded_model_path

    found = inspect_model(config, config.model or str(embedded_model_path(home)))
    info = found.info
    yield _model(info.id, info.max_context, info.kv_bits, info.kv_precision, info.kv_divergence)
    yield _sampling(info.sampling.known)
    yield _groups(info.cache_groups)
    yield _forms(info.forms_refusal)
    yield _template(info.template_repairs)
    for_states = state_budget(config.state_budget, found.plan.ram_budget)
    yield _memory(info.cache_groups, info.max_context, dataclasses.asdict(found.plan), for_states)


def local_folder(model: str) -> Path | None:
    """Folder of a model, also a downloaded one; None if it must be fetched."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    folder = Path(os.path.expanduser(model))
    if model.startswith((".", "~", "/")) or model.count("/") != 1 or os.path.exists(folder):
        return folder
    try:
        return Path(snapshot_download(model, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    except HFValidationError:
        return folder  # the loader reports the invalid id


def _model(
    name: str, max_context: int, kv_bits: float | None, precision: str | None, divergence: float | None
) -> Finding:
    data = {
        "id": name,
        "max_model_len": max_context,
        "kv_bits": kv_bits,
        "kv_precision": precision,
        "kv_divergence": divergence,
    }
    bits = "no keys and values" if kv_bits is None else f"keys and values in {precision or kv_bits} bits"
    if divergence is not None:
        bits += f", which moves its logits by {divergence:.2g} nats"
    return Finding("model", f"{name} is served: context of {max_context:,} tokens, {bits}", data)


def _sampling(known: Mapping[str, Any]) -> Finding:
    values = ", ".join(f"{name} {value:g}" for name, value in known.items()) or "temperature 1"
    return Finding("sampling", f"{values}, where a request says nothing else", dict(known))


def _forms(refusal: str | None) -> Finding:
    detail = f"off: {refusal}" if refusal else "schemas, grammars and demanded tool calls are kept to"
    return Finding("forms", detail, {"structured_output": not refusal, "refusal": refusal or None})


def _template(repairs: Sequence[str] | None) -> Finding:
    if repairs is None:
        detail = "not used: the model has none, or one that refuses every chat; messages are lines with their roles"
    elif repairs:
        detail = f"chats are told to it in another way where it refuses or drops something: {', '.join(repairs)}"
    else:
        detail = "takes every chat as it is"
    return Finding("template", detail, {"used": repairs is not None, "repairs": list(repairs or ())})


def _groups(groups: Sequence[CacheGroupInfo]) -> Finding:
    """One phrase for groups that differ only in depth."""
    kinds = sorted(groups, key=_kind)
    phrases = [_phrase(list(members)) for _, members in groupby(kinds, key=_kind)]
    return Finding("cache", "; ".join(phrases), [dataclasses.asdict(group) for group in groups])


def _kind(group: CacheGroupInfo) -> tuple[str, int]:
    return group.kind, group.window or 0


def _phrase(members: Sequence[CacheGroupInfo]) -> str:
    first, layers = members[0], sum(group.layers for group in members)
    what = first.kind.value if first.window is None else f"{first.kind.value} of {first.window:,}"
    names = ", ".join(group.name for group in members)
    sizes = [
        f"{_size(sum(group.bytes_per_token for group in members))} a token",
        f"{_size(sum(group.bytes_per_snapshot for group in members))} a snapshot",
    ]
    told = [size for size in sizes if not size.startswith("0 ")]
    return f"{what} ({names}): {f'{layers} layers, ' if layers else ''}{', '.join(told)}"


def _memory(groups: Sequence[CacheGroupInfo], max_context: int, plan: Mapping[str, Any], for_states: int) -> Finding:
    """RAM's capacity; `for_states` bytes are for recurrent state only."""
    from agentcache.kv.group_info import GroupKind, tokens_within

    states = [group for group in groups if group.kind is GroupKind.STATE]
    others = [group for group in groups if group.kind is not GroupKind.STATE]
    for_others = plan["ram_budget"] - (for_states if states else 0)
    tokens = tokens_within(others, for_others, max_context)
    shares = [(others, for_others), (states, for_states)]
    agents = min(share // sum(group.bytes_for(AGENT_TOKENS) for group in kind) for kind, share in shares if kind)
    detail = (
        f"of {_size(plan['limit'])}: weights {_size(plan['weights'])}, cache {_size(plan['ram_budget'])}: "
        f"an agent of up to {tokens:,} tokens, or {agents:,} agents of {AGENT_TOKENS:,} in RAM at once"
    )
    return Finding("memory", detail, dict(plan) | {"longest_agent_tokens": tokens, "agents_of_8k": agents})


def _size(num_bytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"
