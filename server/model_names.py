"""Resolves clients' model names."""

from __future__ import annotations

import re

from agentcache.api.model import AdapterInfo, ModelInfo
from agentcache.errors import NotFound
from agentcache.server.context import Call
from agentcache.settings.config import Config

_UNKNOWN = "model_not_found"
# Names built into coding agents.
_BUILT_IN = re.compile(r"(?:[\w.-]+/)*(claude|gpt)-.", re.IGNORECASE)
# Placeholders of clients that must name a model.
_PLACEHOLDER = re.compile(
    r"\s*(?:(?:any|auto|current|custom|default|dummy|empty|llm|loaded|local|localhost|my|none|null|placeholder|served|test"
    r"|undefined|unknown|your)?[-_ ]?(?:model|llm|name|ai)?(?:[-_ ](?:model|name|here))*)\s*",
    re.IGNORECASE,
)
_NEWEST = "latest"  # Ollama
_LONGEST_PLACEHOLDER = 40


def check_model(call: Call) -> None:
    if (name := call.body.string("model")) is not None:
        adapter_in(name, call.model, call.config)


def read_adapter(call: Call) -> str | None:
    body = call.body
    name, target = body.string("adapter"), body.string("model")
    by_model = None if target is None else adapter_in(target, call.model, call.config)
    if name is None:
        return by_model
    if by_model not in (None, name):
        body.fail("adapter", f"is another one than that of the model {target!r:.80}")
    return known_adapter(name, call.model, body.param("adapter")).name


def adapter_in(name: str, model: ModelInfo, config: Config) -> str | None:
    """The adapter that a model name means; None for base. Raises NotFound.

    Order: served names, aliases, placeholders, other spellings, names built into clients.
    """
    try:
        return _served(name, model)
    except NotFound as unknown:
        if name in config.aliases:
            return _aliased(name, model, config)
        if config.strict_model_names or unknown.code != _UNKNOWN:
            raise
        if len(name) <= _LONGEST_PLACEHOLDER and _PLACEHOLDER.fullmatch(name):
            return None
        if (spelled := _spelled(name, model)) != name:
            return _served(spelled, model)
        if _BUILT_IN.match(name):
            adapter = model.adapter(name.rpartition(":")[2])
            return None if adapter is None else adapter.name
        raise unknown


def _spelled(name: str, model: ModelInfo) -> str:
    # In other case, with a provider in front (`openai/`) or `:latest` behind.
    bare = name.lower().removesuffix(f":{_NEWEST}")
    known = [model.id, model.name, *(adapter.name for adapter in model.adapters)]
    return next((each for each in known if bare == each.lower() or bare.endswith("/" + each.lower())), name)


def _served(name: str, model: ModelInfo) -> str | None:
    if model.is_called(name):
        return None
    base, _, adapter = name.rpartition(":")
    if adapter and model.is_called(base):
        if adapter == _NEWEST and model.adapter(_NEWEST) is None:
            return None
        return known_adapter(adapter, model, "model").name
    if model.adapter(name) is not None:
        return name
    message = f"The model {name!r:.80} is not served here; this is {model.id!r}."
    raise NotFound(message, param="model", code=_UNKNOWN)


def _aliased(alias: str, model: ModelInfo, config: Config) -> str | None:
    try:
        return _served(config.aliases[alias], model)
    except NotFound as error:
        message = f"The alias {alias!r} of the settings leads nowhere: {error.message}"
        raise NotFound(message, param="model", code=error.code) from error


def known_adapter(name: str, model: ModelInfo, param: str) -> AdapterInfo:
    adapter = model.adapter(name)
    if adapter is None:
        known = ", ".join(adapter.name for adapter in model.adapters) or "none"
        message = f"The adapter {name!r:.80} is unknown; loaded: {known}."
        raise NotFound(message, param=param, code="adapter_not_found")
    return adapter
