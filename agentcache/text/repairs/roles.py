"""Repairs of roles and thoughts."""

from __future__ import annotations

from collections.abc import Sequence

from agentcache.text.messages import THOUGHT
from agentcache.text.repairs.kinds import (
    GAP,
    NO_ANSWER,
    PLACEHOLDER,
    SYSTEM_ROLES,
    Message,
    ThoughtField,
    Work,
    num_leading,
)


def rename_developer(work: Work) -> None:
    work.messages = [
        {**message, "role": "system"} if message.get("role") == "developer" else message for message in work.messages
    ]


def join_systems(work: Work) -> None:
    leading = num_leading(work.messages)
    if leading > 1:
        work.note("messages: the leading system messages are sent as one")
        text = GAP.join(str(message["content"]) for message in work.messages[:leading])
        work.messages = [{**work.messages[0], "content": text}, *work.messages[leading:]]


def move_later_systems(work: Work) -> None:
    """Messages between a call and its results move behind these."""
    leading = num_leading(work.messages)
    later = any(message.get("role") in SYSTEM_ROLES for message in work.messages[leading:])
    if not later:
        return
    work.note("messages: later system messages are sent as marked user text in place")
    told, held, is_calling = work.messages[:leading], list[Message](), False
    for message in work.messages[leading:]:
        role = message.get("role")
        if role in SYSTEM_ROLES:
            (held if is_calling else told).append(_marked(message))
            continue
        if role != "tool":
            told += held
            held, is_calling = [], bool(message.get("tool_calls"))
        told.append(message)
    work.messages = told + held


def _marked(message: Message) -> Message:
    return {"role": "user", "content": f"<system>\n{message['content']}\n</system>"}


def system_in_user(work: Work) -> None:
    leading = num_leading(work.messages)
    if leading:
        work.note(
            "messages: the model's chat template has no system role; system messages are sent as marked user text"
        )
        work.messages = [*map(_marked, work.messages[:leading]), *work.messages[leading:]]
        if leading == len(work.messages) or work.messages[leading].get("role") == "user":
            run = work.messages[: leading + 1]
            text = GAP.join(str(message.get("content") or "") for message in run)
            work.messages[: leading + 1] = [{**run[-1], "content": text}]


def user_first(work: Work) -> None:
    leading = num_leading(work.messages)
    if leading == len(work.messages) or work.messages[leading].get("role") != "user":
        work.note("messages: the model's chat template requires a user message first; a short one is inserted")
        work.ends_with_placeholder = leading == len(work.messages)
        work.messages.insert(leading, {"role": "user", "content": PLACEHOLDER})


def fill_answers(work: Work) -> None:
    # Some templates refuse empty replies, which clients keep.
    work.messages = [_filled(message, work) for message in work.messages]


def _filled(message: Message, work: Work) -> Message:
    if message.get("role") != "assistant" or message.get("content") or message.get("tool_calls"):
        return message
    work.note("messages: an empty answer is sent as one that says so")
    return {**message, "content": NO_ANSWER}


def user_behind_result(work: Work) -> None:
    told = _Joined()
    for message in work.messages:
        if message.get("role") == "user" and told.last.get("role") == "tool":
            work.note("messages: user text after a tool result is sent as part of the result")
            told.join({}, f"<user>\n{message['content']}\n</user>")
        else:
            told.add(message)
    work.messages = told.messages()


def join_neighbours(work: Work) -> None:
    """Of joined assistant messages, only the last may call tools."""
    told = _Joined()
    for message in work.messages:
        role, before = message.get("role"), told.last
        is_apart = work.repairs.calls_without_words and message.get("tool_calls")
        if role not in ("user", "assistant") or before.get("role") != role or before.get("tool_calls") or is_apart:
            told.add(message)
            continue
        work.note(f"messages: consecutive {role} messages are sent as one")
        told.join(message, message.get("content") or "")
    work.messages = told.messages()


class _Joined:
    # Joins in linear time.
    def __init__(self) -> None:
        self._told: list[tuple[Message, list[Message]]] = []

    @property
    def last(self) -> Message:
        return self._told[-1][0] if self._told else {}

    def add(self, message: Message) -> None:
        self._told.append((message, [message]))

    def join(self, fields: Message, text: str) -> None:
        message, joined = self._told[-1]
        self._told[-1] = message | fields, joined
        joined.append(fields | {"content": text})

    def messages(self) -> list[Message]:
        return [message if len(joined) == 1 else message | _joined(joined) for message, joined in self._told]


def _joined(messages: Sequence[Message]) -> Message:
    return {
        key: GAP.join(str(each[key]) for each in messages if each.get(key))
        for key in ("content", THOUGHT)
        if any(key in each for each in messages)
    }


def named_thoughts(work: Work) -> None:
    """Must follow steps that expect string content, and thoughts under their usual name."""
    field = work.repairs.thoughts
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
