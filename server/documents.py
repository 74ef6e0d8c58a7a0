"""Reads plain-text documents in messages."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

from agentcache.text.json_values import json_string

_DATA_URL = "data:"
_PLAIN = "text/plain"
# By the names of the web, not Python's codecs, some of which are slow.
_CHARSETS = {
    **dict.fromkeys(("", "utf-8", "utf8", "us-ascii", "ascii"), "utf-8"),
    **dict.fromkeys(("iso-8859-1", "latin1", "latin-1", "windows-1252", "cp1252"), "cp1252"),
    **{name: name for name in ("utf-16", "utf-16le", "utf-16be")},
}
_TEXT_TYPE = re.compile(r"text/|application/(?:.*\+)?(?:json|xml|yaml|x-yaml|toml|javascript|x-sh|sql|csv|typescript)")
_TEXT_FILE = re.compile(
    r".*\.(?:txt|md|rst|csv|tsv|json|jsonl|ya?ml|toml|xml|html?|css|[jt]sx?|py|rs|go|c|h|cpp|java|rb|sh|sql|ini|cfg|log)",
    re.IGNORECASE,
)


def document_text(part: dict[str, Any]) -> str | None:
    """Return a text document in tags with title and context; None for other or external content.

    Args:
        part: Anthropic's `document`, OpenAI's `file` or `input_file`.
    """
    file = part["file"] if isinstance(part.get("file"), dict) else part
    source = part["source"] if isinstance(part.get("source"), dict) else {}
    title = next((name for name in (part.get("title"), file.get("filename")) if isinstance(name, str) and name), "")
    url = file.get("file_url")
    data = url if isinstance(url, str) and _is_data_url(url) else file.get("file_data")
    text = _of_source(source) if source else _of_data(data, "", title)
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
        case "url":
            url = source.get("url")
            return _of_data(url, "", "") if isinstance(url, str) and _is_data_url(url) else None
    return None


def _texts(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    for block in content if isinstance(content, list) else ():
        if isinstance(block, dict) and isinstance(block.get("text"), str):
            yield block["text"]


def _is_data_url(text: str) -> bool:
    return text[: len(_DATA_URL)].lower() == _DATA_URL


def _of_data(data: Any, media_type: str, name: str) -> str | None:
    """Decode base64 or a data URL (RFC 2397); None unless type or file name means text."""
    if not isinstance(data, str):
        return None
    is_base64 = True
    if _is_data_url(data):
        front, comma, data = data.partition(",")
        if not comma:
            return None
        kind, *parameters = [each.strip() for each in front[len(_DATA_URL) :].split(";")]
        is_base64 = bool(parameters) and parameters[-1].lower() == "base64"
        media_type = ";".join([kind or media_type or _PLAIN, *parameters])
    kind, *parameters = media_type.lower().split(";")
    if not (_TEXT_TYPE.match(kind) or (len(name) < 300 and _TEXT_FILE.fullmatch(name))):
        return None
    charset = next((each.partition("=")[2] for each in parameters if each.strip().startswith("charset=")), "")
    try:
        octets = _octets(data) if is_base64 else unquote_to_bytes(data)
        return octets.decode(_CHARSETS[charset.strip().strip('"')])
    except (binascii.Error, UnicodeDecodeError, KeyError, ValueError):
        return None


def _octets(data: str) -> bytes:
    """Decode base64, also with line breaks, percent-encoded, of the alphabet for URLs, or without padding."""
    if "%" in data:
        data = unquote(data)
    bare = "".join(data.split()).rstrip("=").replace("-", "+").replace("_", "/")
    return base64.b64decode(bare + "=" * (-len(bare) % 4), validate=True)
