"""Finds chat templates that transformers misses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentcache.compat import TokenizerWrapper, set_template, template_data
from agentcache.text.generation_config import read_object

# Vision models use these.
_FILES = ("chat_template.json", "processor_config.json")
_DEFAULT = "default"


def complete_template(wrapper: TokenizerWrapper, folder: Path) -> None:
    """Set the tokenizer's default template if the folder has any."""
    template = template_data(wrapper)
    if not wrapper.has_chat_template:
        template = next(filter(None, (_named(read_object(folder / name)) for name in _FILES)), None)
    if isinstance(template, Mapping) and template and _DEFAULT not in template:
        template = {_DEFAULT: next(iter(template.values())), **template}
    if template:
        set_template(wrapper, template)


def _named(holder: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return a template, or several by name."""
    given = holder.get("chat_template")
    if isinstance(given, list):
        named = {each.get("name"): each.get("template") for each in given if isinstance(each, dict)}
        given = {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}
    return given if isinstance(given, str | dict) else None
