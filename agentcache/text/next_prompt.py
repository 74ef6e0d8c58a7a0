"""Predicts how much of a prompt the next repeats: history may omit the opened or empty thought at its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentcache.api.model import ReplyFormat
from agentcache.blocks.prefix_match import len_common_prefix
from agentcache.blocks.transcript import Encoding
from agentcache.errors import InvalidRequest
from agentcache.text.chat import ChatRenderer
from agentcache.text.encoder import MarkedEncoder
from agentcache.text.json_values import canonical_json
from agentcache.text.messages import REASONING_KEYS, THOUGHT, plain_messages
from agentcache.text.work_limit import UNLIMITED, WorkLimit

_MOST_CHATS = 64
_MOST_ENDINGS = 4
_MOST_CHARS = 1024  # of template variables
_MOST_MESSAGES = 64  # after the last reply
_SYSTEM_ROLES = ("system", "developer")
_WORDS_END, _THOUGHT = "LANTERNFISH", "RIVERSTONE"
_USER: Mapping[str, Any] = {"role": "user", "content": "hello"}
_CALL_ID = "call00000"


@dataclass(frozen=True)
class _Ending:
    # A prompt's end behind the last words; `left_at`: characters that the next prompt repeats.
    text: str
    left_at: int | None


class NextPrompts:
    """Compares renderings of a chat's end with and without continuations; caches results. Thread-safe."""

    def __init__(self, chats: ChatRenderer, encoder: MarkedEncoder, form: ReplyFormat) -> None:
        self._chats = chats
        self._encoder = encoder
        self._form = form
        self._endings: dict[Any, tuple[_Ending, ...]] = {}
        self._lock = threading.Lock()

    def left_at(
        self,
        prompt: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any],
        limit: WorkLimit = UNLIMITED,
        *,
        tells_thoughts: bool,
    ) -> int | None:
        """Return how many characters of `prompt` the next one repeats; None if all, or unknown.

        `tells_thoughts`: the next request includes this reply's thoughts.
        """
        leading, end = _split(messages)
        variables = _name_of_variables(template_kwargs)
        if not self._chats.uses_template or variables is None:
            return None
        if not 0 < len(end) <= _MOST_MESSAGES or end[-1]["role"] == "assistant":
            return None
        key = tuple(str(message.get("role")) for message in end), bool(tools), variables, tells_thoughts
        known = self._endings.get(key, ())
        ending = _longest_at(prompt, known)
        if ending is None and len(known) < _MOST_ENDINGS:
            any_size = WorkLimit(has_ended=limit.has_ended)

            def render(shorter: Sequence[Mapping[str, Any]]) -> str:
                return self._chats.render(shorter, tools, True, template_kwargs, any_size).text

            found = self._find_ending(_Chat(leading, end, tools, render), tells_thoughts=tells_thoughts)
            self._remember(key, found)
            ending = _longest_at(prompt, [found])
        if ending is None or ending.left_at is None:
            return None
        return len(prompt) - len(ending.text) + ending.left_at

    def _find_ending(self, chat: _Chat, *, tells_thoughts: bool) -> _Ending:
        try:
            ending = chat.rendered([], thought=False)[1]
            may_think = self._may_think(ending)
            thought = may_think and tells_thoughts
            words, ending = chat.rendered([], thought=thought)
            places = [
                self._left_at(chat, words, ending, following, thought=thought, may_think=may_think)
                for following in chat.continuations(thought=thought)
            ]
        except InvalidRequest:
            return _Ending("", None)
        return _Ending(ending, min((place for place in places if place is not None), default=None))

    def _may_think(self, ending: str) -> bool:
        pairs = self._form.thoughts
        closed = any(end and end in ending for _, end in pairs)
        opened = any(start and ending.rstrip().endswith(start) for start, _ in pairs)
        return opened or bool(pairs and not closed)

    def _left_at(
        self,
        chat: _Chat,
        words: str,
        ending: str,
        following: Sequence[Mapping[str, Any]],
        *,
        thought: bool,
        may_think: bool,
    ) -> int | None:
        # Where `words` differ, the turn before took that into account.
        try:
            other_words, behind = chat.rendered(following, thought=thought)
        except InvalidRequest:
            return None
        if other_words != words:
            return None
        place = _shared_tokens(self._encoder.encode(ending), self._encoder.encode(behind))
        is_repeated = place == len(ending) and not (may_think and not (thought and _THOUGHT in behind))
        return None if is_repeated else place

    def _remember(self, key: Any, ending: _Ending) -> None:
        with self._lock:
            known = self._endings.pop(key, ())
            self._endings[key] = (*known, ending)
            while len(self._endings) > _MOST_CHATS:
                del self._endings[next(iter(self._endings))]


def _name_of_variables(template_kwargs: Mapping[str, Any]) -> str | None:
    try:
        name = canonical_json(dict(template_kwargs))
    except ValueError:
        return None
    return name if len(name) <= _MOST_CHARS else None


def _longest_at(prompt: str, endings: Sequence[_Ending]) -> _Ending | None:
    found = [ending for ending in endings if ending.text and prompt.endswith(ending.text)]
    return max(found, key=lambda ending: len(ending.text), default=None)


def _split(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    # System messages in front; messages after the last reply, with it if it has calls.
    roles = [message.get("role") for message in messages]
    num_leading = next((i for i, role in enumerate(roles) if role not in _SYSTEM_ROLES), len(roles))
    begin = next((i for i in range(len(roles), num_leading, -1) if roles[i - 1] == "assistant"), num_leading)
    if begin > num_leading and messages[begin - 1].get("tool_calls"):
        begin -= 1
    return plain_messages(messages[:num_leading]), plain_messages(messages[begin:][: _MOST_MESSAGES + 1])


@dataclass(frozen=True)
class _Chat:
    leading: Sequence[Mapping[str, Any]]
    end: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    render: Callable[[Sequence[Mapping[str, Any]]], str]

    def rendered(self, following: Sequence[Mapping[str, Any]], *, thought: bool) -> tuple[str, str]:
        end = [_with_thought(message, thought) for message in self.end]
        end[-1]["content"] = f"{end[-1]['content']} {_WORDS_END}"
        front = [_USER] if end[0]["role"] == "assistant" else []
        text = self.render([*self.leading, *front, *end, *following])
        at = text.rfind(_WORDS_END)
        if at < 0:
            raise InvalidRequest("the template does not show the last message", param="messages")
        return text[: at + len(_WORDS_END)], text[at + len(_WORDS_END) :]

    def continuations(self, *, thought: bool) -> list[list[Mapping[str, Any]]]:
        reply = _with_thought({"role": "assistant", "content": "yes"}, thought)
        found: list[list[Mapping[str, Any]]] = [[reply, _USER]]
        if self.tools:
            function = {"name": _name_of(self.tools[0]), "arguments": "{}"}
            calls = [{"id": _CALL_ID, "type": "function", "function": function}]
            result = {"role": "tool", "tool_call_id": _CALL_ID, "name": function["name"], "content": "done"}
            found.append([reply | {"content": "", "tool_calls": calls}, result])
        return found


def _shared_tokens(one: Encoding, other: Encoding) -> int:
    pairs = zip(one.ids, one.ends, strict=True), zip(other.ids, other.ends, strict=True)
    count = len_common_prefix(list(pairs[0]), list(pairs[1]))
    return one.ends[count - 1] if count else 0


def _with_thought(message: Mapping[str, Any], thought: bool) -> dict[str, Any]:
    if message.get("role") != "assistant":
        return dict(message)
    plain = {key: value for key, value in message.items() if key not in REASONING_KEYS}
    return plain | ({THOUGHT: _THOUGHT} if thought else {})


def _name_of(tool: Mapping[str, Any]) -> str:
    function = tool.get("function", tool)
    return str(function.get("name")) if isinstance(function, Mapping) else ""
