"""Conversations with tools in which a real model says what it is told to, over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.reply_formats import TOOLS
from tests.serving.front import Front
from tests.serving.scripted import Script

NAMES = ("qwen3", "deepseek", "harmony")
SYSTEM = {"role": "system", "content": "You look around and say what is there, in as few words as you can. " * 3}


class Talk:
    """A conversation in which the model says what it is told to.

    Attributes:
        reports: of all turns.
    """

    def __init__(self, front: Front, script: Script) -> None:
        self.front = front
        self._script = script
        self.reports: list[dict[str, Any]] = []

    def say(self, reply: str) -> None:
        self.say_ids(self.front.tokenizer.encode(reply).ids)

    def say_ids(self, token_ids: Sequence[int]) -> None:
        self._script.token_ids = [*token_ids, min(self.front.tokenizer.eos_ids)]

    def chat(self, reply: str, messages: list[dict[str, Any]], agent: str | None = "a") -> dict[str, Any]:
        """The assistant's message."""
        self.say(reply)
        body = {"messages": messages, "agent": agent, "tools": TOOLS, "agentcache": {"report": True}}
        answer = self.front.post("/v1/chat/completions", body).json()
        self.reports.append(answer["agentcache"])
        message: dict[str, Any] = answer["choices"][0]["message"]
        return message


def calling(family: str, number: int) -> str:
    """A reply that thinks and calls, in the words of the model, which need not be those of its template."""
    arguments = f'{{"at":"place {number}",  "n": {number}}}'
    if family == "harmony":
        return (
            f"<|channel|>analysis<|message|>Where is {number}?<|end|><|start|>assistant<|channel|>commentary"
            f" to=functions.look <|constrain|>json<|message|>{arguments}"
        )
    if family == "deepseek":
        return (
            f"Where is {number}?</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{arguments}"
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        )
    call = f'{{"name": "look", "arguments": {arguments}}}'
    return f"<think>\nWhere is {number}?\n</think>\n\n<tool_call>\n{call}\n</tool_call>"


def answering(family: str, number: int) -> str:
    if family == "harmony":
        return (
            f"<|channel|>analysis<|message|>I saw {number}.<|end|><|start|>assistant<|channel|>final<|message|>"
            f"It is the number {number}."
        )
    start = "" if family == "deepseek" else "<think>\n"
    return f"{start}I saw {number}.\n</think>\n\nIt is the number {number}."


def result(message: dict[str, Any], number: int) -> dict[str, Any]:
    text = f"This is what was there at place {number}: nothing but {number} cats on a mat, and a door."
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": text}


# Behind the last of these is what a turn adds: where the reply ends, or where its template begins to write it anew.
ADDED = {"qwen3": "</tool_call>", "harmony": "<|call|>", "deepseek": "<｜Assistant｜></think>"}


def num_new_tokens(talk: Talk, family: str, messages: list[dict[str, Any]]) -> int:
    tokenizer = talk.front.tokenizer
    whole = tokenizer.chats.text(messages, TOOLS)
    return len(tokenizer.encode(whole[whole.rindex(ADDED[family]) :]).ids)
