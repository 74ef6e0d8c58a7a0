"""Reads plain-text documents in messages."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from typing import Any

from agentcache.models.text.json_values import json_string

_DATA_URL = "data:"
_TEXT_TYPE = re.compile(r"text/|application/(?:.*\+)?(?:json|xml|yaml|x-yaml|toml|javascript|x-sh|sql|csv|typescript)")
_TEXT_FILE = re.compile(
    r".*\.(?:txt|md|rst|csv|tsv|json|jsonl|ya?ml|toml|xml|html?|css|[jt]sx?|py|rs|go|c|h|cpp|java|rb|sh|sql|ini|cfg|log)",
    re.IGNORECASE,
)


def document_text(part: dict[str, Any]) -> str | None:
    """A text document in tags with title and context; None for other or external content.

    Args:
        part: Anthropic's `document`, OpenAI's `file` or `input_file`.
    """
    file = part["file"] if isinstance(part.get("file"), dict) else part
    source = part["source"] if isinstance(part.get("source"), dict) else {}
    title = next((name for name in (part.get("title"), file.get("filename")) if isinstance(name, str) and name), "")
    text = _of_source(source) if source else _of_data(file.get("file_data"), "", title)
    if text is None:
        return None
    named = {"title": title, "context": part.get("context")}
    front = "".join(
        f" {name}={json_string(value, ensure_ascii=False)}"
        for name, value in named.items()
        if isinstance(value, str) and value
    )
    return f"<document{front}>\n{text}\n</document>"


def _of_source(source: dict[str, Any]) -> str | None:
    match source.get("type"):
        case "text":
            return source["data"] if isinstance(source.get("data"), str) else None
        case "content":
            texts = list(_texts(source.get("content")))
            return "\n".join(texts) if texts else None
        case "base64":
            media_type = source.get("media_type")
            return _of_data(source.get("data"), media_type if isinstance(media_type, str) else "", "")
    return None


def _texts(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    for block in content if isinstance(content, list) else ():
        if isinstance(block, dict) and isinstance(block.get("text"), str):
            yield block["text"]


def _of_data(data: Any, media_type: str, name: str) -> str | None:
    """Decode base64 or a data URL; None unless type or file name means text."""
    if not isinstance(data, str):
        return None
    if data[: len(_DATA_URL)].lower() == _DATA_URL:
        front, comma, data = data.partition(",")
        if not comma:
            return None
        media_type = front[len(_DATA_URL) :].partition(";")[0] or media_type
    if not (_TEXT_TYPE.match(media_type.lower()) or (len(name) < 300 and _TEXT_FILE.fullmatch(name))):
        return None
    try:
        return base64.b64decode(data, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None
