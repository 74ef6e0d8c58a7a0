"""Repairs of the thoughts in a conversation."""

from __future__ import annotations

from agentcache.text.messages import THOUGHT
from agentcache.text.repairs.kinds import Message, ThoughtField, Work


def named_thoughts(work: Work) -> None:
    """Must follow the steps that expect content as a string, and thoughts under their usual name."""
    field = work.repairs.thoughts
    if field is not ThoughtField.USUAL:
        work.messages = [_named(message, field) if THOUGHT in message else message for message in work.messages]


def _named(message: Message, field: ThoughtField) -> Message:
    rest = {key: value for key, value in message.items() if key != THOUGHT}
    thought, content = message[THOUGHT], message.get("content")
    if field is not ThoughtField.BLOCKS:
        return rest | dict.fromkeys(field.value, thought)
    if not thought:
        return rest
    words = [{"type": "text", "text": content}] if content else []
    return {**rest, "content": [{"type": "thinking", "thinking": thought}, *words]}
