"""The two OpenAI dialects: how a choice and a piece of a choice look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentcache.server.reply import Completion, chat_logprobs, text_logprobs
from agentcache.serving.request import TokenLogprob


@dataclass(frozen=True)
class ChatShape:
    """`/v1/chat/completions`."""

    logprobs: bool

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": completion.text},
            "logprobs": chat_logprobs(completion.logprobs) if self.logprobs else None,
            "finish_reason": completion.finish_reason,
        }

    def first(self) -> dict[str, Any]:
        return self._piece({"role": "assistant", "content": ""})

    def piece(self, text: str, logprobs: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        return self._piece({"content": text} if text else {}, logprobs)

    def _piece(self, delta: dict[str, Any], logprobs: Sequence[TokenLogprob] = ()) -> dict[str, Any]:
        shown = chat_logprobs(logprobs) if self.logprobs and logprobs else None
        return {"index": 0, "delta": delta, "logprobs": shown, "finish_reason": None}


@dataclass(frozen=True)
class TextShape:
    """`/v1/completions`.

    Args:
        logprobs: whether choices carry logprobs.
        echo: whether the prompt comes before the completion.
        prompts: the prompts' texts; None for one of token ids, whose text its tokens' texts make.
    """

    logprobs: bool
    echo: bool
    prompts: tuple[str | None, ...]

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        tokens = [*(completion.prompt_logprobs if self.echo else ()), *completion.logprobs]
        return {
            "index": index,
            "text": (self._echo(index, completion) if self.echo else "") + completion.text,
            "logprobs": text_logprobs(tokens) if self.logprobs else None,
            "finish_reason": completion.finish_reason,
        }

    def _echo(self, index: int, completion: Completion) -> str:
        text = self.prompts[index]
        return "".join(token.text for token in completion.prompt_logprobs) if text is None else text

    def first(self) -> dict[str, Any]:
        return self.piece("", (), 0)

    def piece(self, text: str, logprobs: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        shown = text_logprobs(logprobs, start=offset) if self.logprobs and logprobs else None
        return {"index": 0, "text": text, "logprobs": shown, "finish_reason": None}


Shape = ChatShape | TextShape
