"""Parts of a message's content as text: the served models read nothing else."""

from __future__ import annotations

from typing import Any

from agentcache.config import Images
from agentcache.server.context import Call
from agentcache.server.validate import Reader

_TEXTS = ("text", "input_text", "output_text")
_PICTURES = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "document": "document",
    "input_file": "document",
}


def read_parts(holder: Reader, name: str, role: str, call: Call) -> list[str]:
    """The texts of the parts in the list under `name`, as `read_part` reads each. Empty ones add nothing."""
    read = (
        read_part(holder.item(name, index), role, call) if (text := plain_text(part)) is None else text
        for index, part in enumerate(holder.items(name))
    )
    return [text for text in read if text]


def plain_text(part: Any) -> str | None:
    """The text of a part that is nothing but text; None for all else. Quick, since there may be thousands."""
    if type(part) is not dict or part.get("type") not in _TEXTS:
        return None
    text = part.get("text")
    return text if type(text) is str else None


def read_part(part: Reader, role: str, call: Call) -> str:
    """The text of one part, or what stands in its place; that is noted in `call`.

    A refusal of what a tool has brought would end the conversation for good, since it stays in the history. Pictures of
    the user's are refused unless the setting `images` says otherwise: an answer that ignores them would mislead.

    Args:
        role: of the message, as chat templates call it.
    """
    kind = part.required_string("type")
    if kind in _TEXTS:
        return part.required_string("text")
    if kind == "refusal" and role == "assistant":
        return part.required_string("refusal")
    if role == "system" and kind == "tool_addition":
        return ""  # read with the other tools
    if role == "system" and kind == "tool_removal":
        return f"[The tool {part.object('tool').string('name')!r:.300} is no longer available.]"
    if role == "tool":
        return _left_out(part, kind, " in a tool result", call)
    if role != "user" or kind not in _PICTURES:
        part.fail("type", f"is {kind!r:.80}; only text parts are supported")
    if call.config.images is Images.REFUSE:
        way_out = 'with the server\'s setting images = "placeholder" (--images placeholder) it would be left out'
        part.fail("type", f"is {kind!r:.80}; only text parts are supported; {way_out}")
    return _left_out(part, kind, "", call)


def _left_out(part: Reader, kind: str, where: str, call: Call) -> str:
    what = _PICTURES.get(kind)
    named = f"a part of type {kind!r:.80}" if what is None else f"{'an' if what == 'image' else 'a'} {what}"
    message = part.path.partition(".")[0]
    call.notes.add(f"{message}: {named}{where} was replaced by a placeholder")
    return f"[{what or kind:.80} omitted: this model reads text only]"
