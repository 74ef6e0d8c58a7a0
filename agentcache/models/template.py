"""The model's chat template, rendered under limits: it comes with the model, whom nobody has to trust."""

from __future__ import annotations

import marshal
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerBase

from agentcache.errors import InvalidRequest, UnsupportedModel
from agentcache.models.template_child import CPU_SECONDS, MEMORY_BYTES, Reply
from agentcache.models.work_limit import WorkLimit

MAX_BYTES = 64 << 20
# The child's own limit is CPU time; this is for a machine that has none to spare, and a child that does not get any.
_PATIENCE_SECONDS = 20.0
_LOOK_SECONDS = 0.05
# Parts of messages that hold what a model thought, by the names that templates know; the first is the usual one.
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class RenderedTooLong(Exception):
    """The template wrote `num_bytes`, more than was allowed."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"the model's chat template wrote {num_bytes} bytes")
        self.num_bytes = num_bytes


class ChatTemplate:
    """Applies a tokenizer's chat template as transformers does, in processes of its own. From any thread.

    Each render that is under way has a process; they are started when needed and kept.
    """

    def __init__(self, wrapper: TokenizerWrapper) -> None:
        self._wrapper = wrapper
        self._idle: list[TemplateProcess] = []
        weakref.finalize(self, _close_all, self._idle)

    def start(self) -> None:
        """Have a process ready for the first messages."""
        if not self._idle:
            self._idle.append(TemplateProcess())

    def close(self) -> None:
        """End the processes that are not rendering."""
        _close_all(self._idle)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any],
        *,
        limit: WorkLimit,
        max_bytes: int = MAX_BYTES,
    ) -> str:
        """The template's text.

        Raises:
            InvalidRequest: messages that the template does not take, or that it takes too much time or memory for.
            UnsupportedModel: the template cannot be read.
            RenderedTooLong: the text has over `max_bytes` bytes in UTF-8.
        """
        if not messages:
            raise InvalidRequest("Cannot apply the chat template to an empty conversation.", param="messages")
        tools = None if tools is None else list(tools)
        kwargs = {"enable_thinking": self._wrapper.has_thinking, **template_kwargs}
        variables = {
            **self._wrapper.special_tokens_map,
            **kwargs,
            "messages": [_message(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._render_in_process((self._choose(tools), variables, max_bytes), limit)

    def _choose(self, tools: Any) -> str:
        """The template for these messages; a model may have one of its own for tools."""
        try:
            return str(self._wrapper.get_chat_template(None, tools))
        except ValueError as error:
            raise InvalidRequest(
                f"The model has no chat template for these messages: {error}", param="messages"
            ) from error

    def _render_in_process(self, request: tuple[str, dict[str, Any], int], limit: WorkLimit) -> str:
        try:
            packed = marshal.dumps(request)
        except ValueError:
            raise InvalidRequest("Messages must be plain data, as JSON knows it.", param="messages") from None
        process = self._idle_process() or TemplateProcess()
        try:
            kind, content = process.ask(packed, request[2], limit)
        except BaseException:
            process.close()
            raise
        if kind == Reply.MEMORY:
            process.close()
            raise _took_too_much(f"more memory than {MEMORY_BYTES >> 20} MB")
        self._idle.append(process)
        return _text(kind, content)

    def _idle_process(self) -> TemplateProcess | None:
        """One that waits for work; those that somebody has ended meanwhile are passed over."""
        while (process := _pop(self._idle)) is not None:
            if process.is_alive:
                return process
            process.close()
        return None


def is_rendered_here(wrapper: TokenizerWrapper) -> bool:
    """Whether the tokenizer's template is Python code of mlx-lm or transformers, and no data of the model's folder."""
    has_code = type(wrapper._tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template
    return has_code or wrapper._chat_template is not None


class TemplateProcess:
    """One child process and the socket to it. One request at a time."""

    def __init__(self) -> None:
        self._socket, other = socket.socketpair()
        script = Path(__file__).with_name("template_child.py")
        with other:
            # -P: no module beside the script may stand in front of the standard library's.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(script)],
                stdin=other.fileno(),
                stdout=other.fileno(),
                stderr=subprocess.DEVNULL,
            )
        self._socket.settimeout(_LOOK_SECONDS)

    def ask(self, request: bytes, max_bytes: int, limit: WorkLimit) -> tuple[bytes, bytes]:
        """Send a request; the reply's kind and content. Close the process if this raises.

        Raises:
            InvalidRequest: the template took too much time or memory.
            RenderedTooLong: the reply would have over `max_bytes`.
        """
        deadline = time.monotonic() + _PATIENCE_SECONDS
        try:
            self._send(len(request).to_bytes(8, "little") + request, deadline, limit)
            head = self._receive(9, deadline, limit)
            size = int.from_bytes(head[1:], "little")
            if size > max_bytes:
                raise RenderedTooLong(size)
            return head[:1], self._receive(size, deadline, limit)
        except (ConnectionError, EOFError):
            raise self._death() from None

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the process at once."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _send(self, data: bytes, deadline: float, limit: WorkLimit) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except TimeoutError:
                self._look(deadline, limit)

    def _receive(self, count: int, deadline: float, limit: WorkLimit) -> bytes:
        data = bytearray()
        while len(data) < count:
            try:
                part = self._socket.recv(min(count - len(data), 1 << 20))
            except TimeoutError:
                self._look(deadline, limit)
                continue
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def _look(self, deadline: float, limit: WorkLimit) -> None:
        """What takes long may take too much, or have nobody left who waits for it."""
        limit.go_on()
        if time.monotonic() > deadline:
            raise _took_too_much(f"longer than {_PATIENCE_SECONDS:.0f} s")
        if sys.platform != "linux" and self._resident_bytes() > MEMORY_BYTES * 2:
            raise _took_too_much(f"more memory than {MEMORY_BYTES >> 20} MB")

    def _resident_bytes(self) -> int:
        """For kernels that do not hold a process to a limit of its memory."""
        told = subprocess.run(["ps", "-o", "rss=", "-p", str(self._process.pid)], capture_output=True, text=True)
        return int(told.stdout.strip() or 0) * 1024

    def _death(self) -> InvalidRequest:
        if self._process.wait() == -signal.SIGPROF:
            return _took_too_much(f"longer than {CPU_SECONDS:.0f} s")
        return InvalidRequest("The model's chat template broke off.", param="messages", code="template_failed")


def _text(kind: bytes, content: bytes) -> str:
    text = content.decode("utf-8", "surrogatepass")
    if kind == Reply.TEXT:
        return text
    if kind == Reply.TOO_LONG:
        raise RenderedTooLong(int(text))
    if kind == Reply.SYNTAX:
        raise UnsupportedModel(f"The model's chat template cannot be read: {text}")
    raise refused(text)


def refused(why: object) -> InvalidRequest:
    message = f"The model's chat template refuses these messages: {why}"
    return InvalidRequest(message, param="messages", code="refused_by_chat_template")


def _took_too_much(what: str) -> InvalidRequest:
    return InvalidRequest(f"The model's chat template took {what}.", param="messages", code="template_failed")


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without what is None, and with what the model thought under every name that a template may know."""
    kept = {key: value for key, value in message.items() if value is not None}
    thought = next((kept[key] for key in _REASONING_KEYS if key in kept), None)
    return kept if thought is None else {"thinking": thought, **kept, "reasoning_content": thought}


def _pop(idle: list[TemplateProcess]) -> TemplateProcess | None:
    try:
        return idle.pop()
    except IndexError:  # not asked before: another thread may take the last one in between
        return None


def _close_all(idle: list[TemplateProcess]) -> None:
    while process := _pop(idle):
        process.close()
