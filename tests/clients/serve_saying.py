"""`python -m tests.clients.serve_saying serve …`: the real server with a real model that says what suits the request.

Tokens come from a script (`tests.serving.scripted`) where they would be chosen from logits; all else is real, also the
grammars: a token that an answer of a certain form may not have ends it with an error. Asked with a tool, the model
thinks and calls it; once the tool has answered, it thinks and says ANSWER, or OBJECT where it must say JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from agentcache.api.answer_form import AnswerForm
from agentcache.api.report import Update
from agentcache.api.request import ChatPrompt, Request
from agentcache.cli.main import main
from agentcache.gateway.async_engine import AsyncEngine
from tests.serving.scripted import scripted_by

ANSWER = "There are 42 cats, and all of them sleep."
THOUGHT = "I know it."
OBJECT = {"cats": 42}
# What is called, where there is such a tool.
CALLS: dict[str, dict[str, Any]] = {
    "look": {"place": "garden"},
    "Bash": {"command": "echo 42 cats > cats.txt", "description": "Writes"},  # Claude Code
    "bash": {"command": "echo 42 cats > cats.txt", "description": "Writes"},  # OpenCode, pi, Kilo, Copilot, vibe
    "run_shell_command": {"command": "echo 42 cats > cats.txt", "is_background": False},  # Qwen Code
    "run_commands": {"commands": ["echo 42 cats > cats.txt"]},  # Cline
    "terminal": {"command": "echo 42 cats > cats.txt", "security_risk": "LOW", "summary": "Writes"},  # OpenHands
    "exec_command": {"cmd": "echo 42 cats > cats.txt"},  # Codex
    "shell_command": {"command": "echo 42 cats > cats.txt"},
    "shell": {"command": ["bash", "-c", "echo 42 cats > cats.txt"]},
}
# What a tool is called with that stands for the answer itself; others than this one take OBJECT.
ANSWERS: dict[str, dict[str, Any]] = {"final_answer": {"answer": ANSWER}}  # smolagents


def reply_to(prompt: ChatPrompt, form: AnswerForm | None) -> str:
    names = [tool["function"]["name"] for tool in prompt.tools or ()]
    demanded = [tool.name for tool in form.calls.tools] if form is not None and form.calls is not None else []
    name = next((name for name in CALLS if name in (demanded if form is not None else names)), None)
    since = [message["role"] for message in prompt.messages]
    is_answered = "tool" in since[len(since) - since[::-1].index("user") :] if "user" in since else False
    is_answered |= "42 cats" in str(prompt.messages[-1]["content"])  # of a client that tells a tool's result as a user
    thought = f"<think>\n{THOUGHT}\n</think>\n\n"
    if name is not None and not is_answered:
        return thought + _call(name, _known(CALLS[name], name, prompt))
    if form is not None and form.text is not None:
        return thought + json.dumps(OBJECT)
    if form is not None:
        name = next(name for name in demanded if name not in CALLS)
        return thought + _call(name, ANSWERS.get(name, OBJECT))
    asks_json = any("json_schema" in str(message["content"]) for message in prompt.messages[:1])
    return thought + (f"```json\n{json.dumps(OBJECT)}\n```" if asks_json else ANSWER)


def _known(arguments: dict[str, Any], name: str, prompt: ChatPrompt) -> dict[str, Any]:
    """The arguments that the client's tool has, where it refuses others, as vibe's `bash` does."""
    described = next(tool["function"] for tool in prompt.tools or () if tool["function"]["name"] == name)
    parameters = described.get("parameters", {})
    if name != "bash" or parameters.get("additionalProperties") is not False:
        return arguments
    return {key: value for key, value in arguments.items() if key in parameters["properties"]}


def _call(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@contextmanager
def saying() -> Iterator[None]:
    """Engines within this process say what `reply_to` says."""
    generate = AsyncEngine.generate
    replies: dict[int, list[int]] = {}  # the script of a request, by the seed that it is given

    async def generate_scripted(self: AsyncEngine, request: Request, take: Callable[[Update], None]) -> None:
        if isinstance(request.prompt, ChatPrompt):
            tokenizer = self._thread.view.model.tokenizer
            token_ids = [*tokenizer.encode(reply_to(request.prompt, request.form)).ids, min(tokenizer.eos_ids)]
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
