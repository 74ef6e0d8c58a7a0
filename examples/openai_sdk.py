"""OpenAI's SDK with a named agent: two turns, a stream, tool calls, and the report of each turn.

    pip install openai
    agentcache serve                                 # in another terminal
    python examples/openai_sdk.py [--url URL]        # default: $AGENTCACHE_URL, else http://127.0.0.1:8000

Run it again, also after a restart of the server: the first turn is no longer cold.
"""

import argparse
import json
import os
from typing import Any

from openai import OpenAI

parser = argparse.ArgumentParser()
parser.add_argument("--url", default=os.environ.get("AGENTCACHE_URL", "http://127.0.0.1:8000"))
client = OpenAI(base_url=f"{parser.parse_args().url}/v1", api_key="none")
chat: Any = client.chat.completions  # Any: plain dicts are messages here, not the SDK's types
agent = {"agent": "example-openai", "agentcache": {"report": True}}


def show_report(report: dict[str, Any]) -> None:
    """Print how much of the prompt came from the cache."""
    print(f"    {report['cache_state']}: {report['computed_tokens']} of {report['prompt_tokens']} tokens computed")


print("== Two turns")
messages: list[Any] = []
for question in ("The violin is in the castle. Flora lives in Paris.", "Where is the violin?"):
    messages.append({"role": "user", "content": question})
    reply = chat.create(model="default", messages=messages, temperature=0, extra_body=agent)
    messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    print(reply.choices[0].message.content)
    show_report(reply.model_extra["agentcache"])

print("== A stream: the report is in its last chunk")
messages.append({"role": "user", "content": "Where does Flora live?"})
for chunk in chat.create(model="default", messages=messages, temperature=0, stream=True, extra_body=agent):
    print("".join(choice.delta.content or "" for choice in chunk.choices), end="")
print()
show_report(chunk.model_extra["agentcache"])

print("== Tool calls, until the model has its answer")
key = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
lookup = {"name": "lookup", "description": "Looks up what is known about a person or a thing.", "parameters": key}
entries = {"Anton": "the red key", "red key": "the mill"}
messages = [{"role": "user", "content": "What does the key of Anton open?"}]
while True:
    tools = [{"type": "function", "function": lookup}]
    reply = chat.create(model="default", messages=messages, tools=tools, temperature=0, extra_body=agent)
    message = reply.choices[0].message
    print(message.content)
    show_report(reply.model_extra["agentcache"])
    if not message.tool_calls:
        break
    messages.append(message.to_dict())
    for call in message.tool_calls:
        result = entries.get(json.loads(call.function.arguments)["key"], "unknown")
        print(f"    {call.function.name}({call.function.arguments}) -> {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
