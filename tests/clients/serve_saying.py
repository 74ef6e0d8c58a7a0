"""`python -m tests.clients.serve_saying serve …`: the real server with a real model that says what suits the request.

Tokens come from a script (`tests.serving.scripted`) where they would be chosen from logits; all else is real. Asked
with a tool, the model thinks and calls it; once the tool has answered, it thinks and says ANSWER.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from agentcache.cli.main import main
from agentcache.gateway.async_engine import AsyncEngine
from agentcache.report import Update
from agentcache.request import ChatPrompt, Request
from tests.serving.scripted import scripted_by

ANSWER = "There are 42 cats, and all of them sleep."
THOUGHT = "I know it."
# What is called, where there is such a tool.
CALLS: dict[str, dict[str, Any]] = {
    "look": {"place": "garden"},
    "Bash": {"command": "echo 42 cats > cats.txt", "description": "Writes"},  # Claude Code
    "bash": {"command": "echo 42 cats > cats.txt", "description": "Writes"},  # OpenCode, pi
    "exec_command": {"cmd": "echo 42 cats > cats.txt"},  # Codex
    "shell_command": {"command": "echo 42 cats > cats.txt"},
    "shell": {"command": ["bash", "-c", "echo 42 cats > cats.txt"]},
}


def reply_to(prompt: ChatPrompt) -> str:
    names = [tool["function"]["name"] for tool in prompt.tools or ()]
    name = next((name for name in CALLS if name in names), None)
    since = [message["role"] for message in prompt.messages]
    is_answered = "tool" in since[len(since) - since[::-1].index("user") :] if "user" in since else False
    thought = f"<think>\n{THOUGHT}\n</think>\n\n"
    if name is None or is_answered:
        asks_json = any("json_schema" in str(message["content"]) for message in prompt.messages[:1])
        return thought + ('```json\n{"cats": 42}\n```' if asks_json else ANSWER)
    call = json.dumps({"name": name, "arguments": CALLS[name]})
    return f"{thought}<tool_call>\n{call}\n</tool_call>"


@contextmanager
def saying() -> Iterator[None]:
    """Engines within this process say what `reply_to` says."""
    generate = AsyncEngine.generate
    replies: dict[int, list[int]] = {}  # the script of a request, by the seed that it is given

    async def generate_scripted(self: AsyncEngine, request: Request, take: Callable[[Update], None]) -> None:
        if isinstance(request.prompt, ChatPrompt):
            tokenizer = self._thread.view.model.tokenizer
            token_ids = [*tokenizer.encode(reply_to(request.prompt)).ids, min(tokenizer.eos_ids)]
            seed = len(replies) + 1
            replies.update(dict.fromkeys(range(seed, seed + request.n), token_ids))
            request = replace(request, sampling=replace(request.sampling, seed=seed))
        await generate(self, request, take)

    with pytest.MonkeyPatch.context() as patch, scripted_by(lambda params: replies.get(params.seed or 0, [0])):
        patch.setattr(AsyncEngine, "generate", generate_scripted)
        yield


if __name__ == "__main__":
    with saying():
        main()
