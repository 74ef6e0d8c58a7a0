"""Anthropic's SDK with a named agent: two turns, a stream, tool calls, and how much of each prompt was cached.

    pip install anthropic
    agentcache serve                                 # in another terminal
    python examples/anthropic_sdk.py [--url URL]     # default: $AGENTCACHE_URL, else http://127.0.0.1:8000

Run it again, also after a restart of the server: then nearly all of the first prompt is cached, too.
"""

import argparse
import os
from typing import Any

from anthropic import Anthropic

parser = argparse.ArgumentParser()
parser.add_argument("--url", default=os.environ.get("AGENTCACHE_URL", "http://127.0.0.1:8000"))
api: Any = Anthropic(base_url=parser.parse_args().url, api_key="none").messages  # Any: plain dicts are messages here
common: dict[str, Any] = {
    "model": "default",
    "max_tokens": 100,
    "metadata": {"user_id": "example-anthropic"},  # names the agent
    "extra_body": {"temperature": 0},  # newer SDKs have no argument for it
}


def show_usage(usage: Any) -> None:
    """Print how much of the prompt came from the cache, in Anthropic's own fields."""
    print(f"    {usage.cache_read_input_tokens} tokens from the cache, {usage.cache_creation_input_tokens} computed")


print("== Two turns")
messages: list[Any] = []
for question in ("The crown is in the tower. Edgar lives in Vienna.", "Where is the crown?"):
    messages.append({"role": "user", "content": question})
    reply = api.create(messages=messages, **common)
    messages.append({"role": "assistant", "content": reply.content})
    print(reply.content[0].text)
    show_usage(reply.usage)

print("== A stream")
messages.append({"role": "user", "content": "Where does Edgar live?"})
with api.stream(messages=messages, **common) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
    print()
    show_usage(stream.get_final_message().usage)

print("== Tool calls, until the model has its answer")
key = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
lookup = {"name": "lookup", "description": "Looks up what is known about a person or a thing.", "input_schema": key}
entries = {"Berta": "the blue key", "blue key": "the tower"}
messages = [{"role": "user", "content": "What does the key of Berta open?"}]
while True:
    reply = api.create(messages=messages, tools=[lookup], **common)
    messages.append({"role": "assistant", "content": reply.content})
    print("".join(block.text for block in reply.content if block.type == "text"))
    show_usage(reply.usage)
    results = []
    for call in (block for block in reply.content if block.type == "tool_use"):
        result = entries.get(call.input["key"], "unknown")
        print(f"    {call.name}({call.input}) -> {result}")
        results.append({"type": "tool_result", "tool_use_id": call.id, "content": result})
    if not results:
        break
    messages.append({"role": "user", "content": results})
