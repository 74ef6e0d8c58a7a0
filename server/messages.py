"""Reads chat messages and their parts as text."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

from agentcache.server.context import Call
from agentcache.server.validate import Reader
from agentcache.settings.config import Images
from agentcache.text.json_values import json_string, parse_json, write_json
from agentcache.text.messages import REASONING_KEYS

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}

_BILLING_HEADER = re.compile(r"^x-anthropic-billing-header:[^\n]*\n*", re.IGNORECASE | re.MULTILINE)

_DATA_URL = "data:"
_PLAIN = "text/plain"
# Some of Python's codecs are slow.
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

_TEXTS = ("text", "input_text", "output_text")
THOUGHTS = ("thinking", "reasoning", "reasoning_text", "redacted_thinking")
_MEDIA = {
    **dict.fromkeys(("image", "image_url", "input_image"), "image"),
    **dict.fromkeys(("document", "input_file", "file"), "document"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
}
# In unknown parts, as of server tools.
_READABLE = frozenset(
    ("text", "thinking", "refusal", "summary", "transcript", "title", "name", "tool_name", "query", "url", "source")
    + ("content", "results", "output", "stdout", "stderr", "error_code", "code", "command", "description", "uri")
    + ("value", "result", "resource", "context", "message", "error", "queries", "filename", "outputs", "logs", "action")
    + ("server_name", "server_label", "toolName", "tool_references", "json")
)
_AS_JSON = ("input", "arguments", "args")


def read_messages(call: Call) -> list[dict[str, Any]]:
    messages = [_read_message(message, call) for message in call.body.objects("messages")]
    if not messages:
        call.body.fail("messages", "must be a list of at least one message")
    return messages


def _read_message(message: Reader, call: Call) -> dict[str, Any]:
    given = message.required_string("role")
    if given not in ROLES:
        message.fail("role", f"must be one of {', '.join(ROLES)}")
    role = ROLES[given]
    message.string("name")
    message.string("tool_call_id")
    in_history = not is_newest(message, call)
    calls = [_read_call(said, in_history) for said in message.objects("tool_calls")] or _former_call(message, role)
    if calls and role != "assistant":
        message.fail("tool_calls", "belongs to assistant messages only")
    read = {name: value for name, value in message.value.items() if value is not None and name != "function_call"}
    if role == "assistant" and not any(map(read.get, REASONING_KEYS)) and (thought := _read_thoughts(message)):
        read["reasoning_content"] = thought
    content = _read_content(message, role, call)
    read |= {"role": role, "content": without_billing_header(content) if role == "system" else content}
    if given == "function" and "tool_call_id" not in read and message.string("name"):
        read["tool_call_id"] = _former_id(message)
    return read | ({"tool_calls": calls} if calls else {})


def _read_content(message: Reader, role: str, call: Call) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if role == "tool":
        return tool_text(message, "content", "", call)
    if content is None and (role == "assistant" or "content" in message.value or not is_newest(message, call)):
        return ""
    if isinstance(content, list):
        return "".join(read_parts(message, "content", role, call, without=THOUGHTS if role == "assistant" else ()))
    message.fail("content", "must be a string or a list of text parts")


def _read_thoughts(message: Reader) -> str:
    if not isinstance(message.get("content"), list):
        return ""
    parts = (part for part in message.items("content") if type(part) is dict and part.get("type") in THOUGHTS)
    return "\n".join(filter(None, map(readable, parts)))


def _former_call(message: Reader, role: str) -> list[dict[str, Any]]:
    # OpenAI's deprecated `function_call`; its result has role `function`.
    if role != "assistant" or not isinstance(message.get("function_call"), dict):
        return []
    function = message.object("function_call")
    said = {"name": function.required_string("name"), "arguments": read_arguments(function)}
    return [{"id": _former_id(function), "type": "function", "function": said}]


def _former_id(named: Reader) -> str:
    return f"call_{named.string('name')}"


def without_billing_header(text: str) -> str:
    """Remove a line that changes in every request."""
    return _BILLING_HEADER.sub("", text)


def _read_call(call: Reader, in_history: bool) -> dict[str, Any]:
    # In history the name may be missing: a refusal would end the conversation.
    if isinstance(call.get("custom"), dict):
        custom = call.object("custom")
        said = {"name": custom.required_string("name"), "arguments": {"input": custom.string("input") or ""}}
        return {"id": call.string("id"), "type": "function", "function": said}
    if call.get("function") is None and call.get("name") is not None:  # frameworks' shape
        arguments = read_arguments(call, "args" if call.get("arguments") is None else "arguments")
        said = {"name": call.required_string("name"), "arguments": arguments}
        return {"id": call.string("id"), "type": "function", "function": said}
    function = call.object("function")
    name = (function.string("name") or "") if in_history else function.required_string("name")
    return call.value | {"function": function.value | {"name": name, "arguments": read_arguments(function)}}


def read_arguments(function: Reader, name: str = "arguments") -> Any:
    """Arguments as an object; invalid ones as text: a refusal would end the conversation."""
    arguments = function.get(name)
    if isinstance(arguments, dict):
        return arguments
    if arguments is not None and not isinstance(arguments, str):
        return write_json(arguments)
    text = function.string(name) or "{}"
    try:
        value = parse_json(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def document_text(part: dict[str, Any]) -> str | None:
    """Text of a document or file part, in tags; None for other or external content."""
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
    """Decode base64 or a data URL (RFC 2397); None if not text."""
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
    """Decode any base64: with line breaks, percent-encoded, URL alphabet, unpadded."""
    if "%" in data:
        data = unquote(data)
    bare = "".join(data.split()).rstrip("=").replace("-", "+").replace("_", "/")
    return base64.b64decode(bare + "=" * (-len(bare) % 4), validate=True)


def read_parts(holder: Reader, name: str, role: str, call: Call, *, without: Collection[str] = ()) -> list[str]:
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
    """Text of a pure text part, else None. Fast: there may be thousands."""
    if type(part) is str:
        return part
    if type(part) is not dict or part.get("type") not in _TEXTS:
        return None
    text = part.get("text", part)
    return "" if text is None else text if type(text) is str else None


def read_part(part: Reader, role: str, call: Call) -> str:
    """Text of a part, or a placeholder and a note.

    Media are refused only in a user's newest message: in history, a refusal would end the conversation.
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
    value = holder.get(name)
    if value is None or isinstance(value, str):
        return holder.string(name) or ""
    if isinstance(value, list) and all(isinstance(part, dict) and "type" in part for part in value):
        return between.join(read_parts(holder, name, "tool", call))
    call.notes.add(f"{holder.param(name)}: a value that is no text was read as JSON")
    return write_json(value, ensure_ascii=False)
