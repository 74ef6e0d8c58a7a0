"""Reads parts of messages as text, the served models' only input."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from agentcache.server.context import Call
from agentcache.server.documents import document_text
from agentcache.server.validate import Reader
from agentcache.settings.config import Images
from agentcache.text.json_values import write_json

_TEXTS = ("text", "input_text", "output_text")
THOUGHTS = ("thinking", "reasoning", "reasoning_text", "redacted_thinking")
_MEDIA = {
    **dict.fromkeys(("image", "image_url", "input_image"), "image"),
    **dict.fromkeys(("document", "input_file", "file"), "document"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
}
# In unknown parts, such as results of server tools.
_READABLE = frozenset(
    ("text", "thinking", "refusal", "summary", "transcript", "title", "name", "tool_name", "query", "url", "source")
    + ("content", "results", "output", "stdout", "stderr", "error_code", "code", "command", "description", "uri")
    + ("value", "result", "resource", "context", "message", "error", "queries", "filename", "outputs", "logs", "action")
    + ("server_name", "server_label", "toolName", "tool_references", "json")
)
_AS_JSON = ("input", "arguments", "args")


def read_parts(holder: Reader, name: str, role: str, call: Call, *, without: Collection[str] = ()) -> list[str]:
    """Return the non-empty texts of the parts under `name`, except types in `without`."""
    read = (
        read_part(holder.item(name, index), role, call) if (text := plain_text(part)) is None else text
        for index, part in _parts(holder, name, without)
    )
    return [text for text in read if text]


def _parts(holder: Reader, name: str, without: Collection[str]) -> Iterable[tuple[int, Any]]:
    parts = enumerate(holder.items(name))
    if not without:
        return parts
    return ((index, part) for index, part in parts if type(part) is not dict or part.get("type") not in without)


def plain_text(part: Any) -> str | None:
    """Return a pure text part's text, else None. Fast, for thousands of parts."""
    if type(part) is str:
        return part
    if type(part) is not dict or part.get("type") not in _TEXTS:
        return None
    text = part.get("text", part)
    return "" if text is None else text if type(text) is str else None


def read_part(part: Reader, role: str, call: Call) -> str:
    """Return one part's text, or a placeholder and a note.

    A refusal in the history would end the conversation. Only media in a user's newest message are refused, unless the
    setting `images` allows it: ignoring them would mislead.
    """
    kind = part.string("type")
    if kind in _TEXTS or kind is None:
        return _read_text(part, kind, role, call)
    if kind == "refusal" and role == "assistant":
        return part.required_string("refusal")
    if role == "system" and kind == "tool_addition":
        return ""  # see `read_anthropic_tools`
    if role == "system" and kind == "tool_removal":
        return f"[The tool {part.object('tool').string('name')!r:.300} is no longer available.]"
    if _MEDIA.get(kind) == "document" and (text := document_text(part.value)) is not None:
        return text
    if kind not in _MEDIA and (text := readable(part.value)):
        call.notes.add(f"{_message_of(part)}: a part of type {kind!r:.80} was read as text")
        return f"[{kind:.80}]\n{text}"
    if kind in _MEDIA and role == "user" and call.config.images is Images.REFUSE and is_newest(part, call):
        way_out = 'with the server\'s setting images = "placeholder" (--images placeholder) it would be left out'
        part.fail("type", f"is {kind!r:.80}; only text parts are supported; {way_out}")
    return _left_out(part, kind, " in a tool result" if role == "tool" else "", call)


def _read_text(part: Reader, kind: str | None, role: str, call: Call) -> str:
    """Return the text, or other readable fields."""
    text = part.get("text")
    if isinstance(text, str):
        return part.required_string("text")
    if found := readable(part.value):
        call.notes.add(f"{_message_of(part)}: a part without a text of its own was read as text")
        return found
    if role != "tool" and is_newest(part, call):
        part.fail("type" if kind is None else "text", "is required")
    return ""


def readable(value: Any) -> str:
    """Return all readable text in a part."""
    lines: list[str] = []
    rest = [value]
    while rest:
        match rest.pop():
            case str(text) if text:
                lines.append(text)
            case list(items):
                rest += reversed(items)
            case {"type": "text", "data": str(text)}:  # a document's source
                lines.append(text)
            case dict(fields):
                read = [
                    write_json(inner, ensure_ascii=False) if name in _AS_JSON and inner else inner
                    for name, inner in fields.items()
                    if name in _READABLE or name in _AS_JSON
                ]
                rest += reversed(read)
    return "\n".join(lines)


def _message_of(part: Reader) -> str:
    return part.path.partition(".")[0]


def is_newest(part: Reader, call: Call) -> bool:
    """Whether an object is in the request's last message (never in a stored response)."""
    place = _message_of(part)
    name = place.partition("[")[0]
    messages = call.body.get(name)
    return isinstance(messages, list) and place == f"{name}[{len(messages) - 1}]"


def _left_out(part: Reader, kind: str, where: str, call: Call) -> str:
    what = _MEDIA.get(kind)
    named = (
        f"a part of type {kind!r:.80}" if what is None else f"{'a' if what in ('document', 'video') else 'an'} {what}"
    )
    call.notes.add(f"{_message_of(part)}: {named}{where} was replaced by a placeholder")
    return f"[{what or kind:.80} omitted: this model reads text only]"


def tool_text(holder: Reader, name: str, between: str, call: Call) -> str:
    """Return a tool's result; other values than text as JSON."""
    value = holder.get(name)
    if value is None or isinstance(value, str):
        return holder.string(name) or ""
    if isinstance(value, list) and all(isinstance(part, dict) and "type" in part for part in value):
        return between.join(read_parts(holder, name, "tool", call))
    call.notes.add(f"{holder.param(name)}: a value that is no text was read as JSON")
    return write_json(value, ensure_ascii=False)
