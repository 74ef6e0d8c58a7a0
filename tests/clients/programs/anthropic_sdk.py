"""Anthropic's client: messages whole and streamed, thinking, tools and their results, counted tokens."""

import sys

import anthropic

URL, ANSWER, THOUGHT = sys.argv[1:]
client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
LOOK = {
    "name": "look",
    "description": "Looks.",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}},
}
THINKING = {"type": "enabled", "budget_tokens": 1024}
MODEL = "claude-sonnet-4-5"
asked = [{"role": "user", "content": "How many cats are in the garden?"}]

plain = client.messages.create(model=MODEL, max_tokens=2000, messages=asked, thinking=THINKING)
assert [block.type for block in plain.content] == ["thinking", "text"], plain
assert (plain.content[0].thinking, plain.content[1].text) == (THOUGHT, ANSWER), plain

called = client.messages.create(model=MODEL, max_tokens=2000, messages=asked, thinking=THINKING, tools=[LOOK])
assert called.stop_reason == "tool_use", called
[call] = [block for block in called.content if block.type == "tool_use"]
assert (call.name, call.input) == ("look", {"place": "garden"}), call
result = {"type": "tool_result", "tool_use_id": call.id, "content": "42 cats"}
history = [*asked, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
with client.messages.stream(
    model=MODEL, max_tokens=2000, messages=history, thinking=THINKING, tools=[LOOK], system="Be brief."
) as stream:
    assert "".join(stream.text_stream) == ANSWER
    message = stream.get_final_message()
assert [block.type for block in message.content] == ["thinking", "text"] and message.stop_reason == "end_turn", message
assert client.messages.count_tokens(model=MODEL, messages=history, tools=[LOOK]).input_tokens > 10
