"""OpenAI's client: models, responses and chat, whole and streamed, with tools, objects, thoughts, `n` and penalties."""

import json
import sys

import openai
from pydantic import BaseModel

URL, ANSWER, THOUGHT = sys.argv[1:]
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
MODEL = client.models.list().data[0].id
LOOK = {
    "type": "function",
    "name": "look",
    "description": "Looks.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
}


class Count(BaseModel):
    cats: int


plain = client.responses.create(model=MODEL, input="How many cats?", instructions="Be brief.")
assert plain.status == "completed" and plain.output_text == ANSWER, plain
assert [item.type for item in plain.output] == ["reasoning", "message"], plain.output
assert THOUGHT in str(plain.output[0].model_dump()), plain.output[0]

kinds, text = [], ""
for event in client.responses.create(model=MODEL, input="How many cats?", stream=True):
    kinds.append(event.type)
    if event.type == "response.output_text.delta":
        text += event.delta
assert text == ANSWER and kinds[0] == "response.created" and kinds[-1] == "response.completed", kinds
with client.responses.stream(model=MODEL, input="How many cats?") as stream:
    for _ in stream:
        pass
    assert stream.get_final_response().output_text == ANSWER

asked = [{"role": "user", "content": "How many cats are in the garden?"}]
called = client.responses.create(model=MODEL, input=asked, tools=[LOOK], reasoning={"effort": "low"})
[call] = [item for item in called.output if item.type == "function_call"]
assert (call.name, json.loads(call.arguments)) == ("look", {"place": "garden"}), call
result = {"type": "function_call_output", "call_id": call.call_id, "output": "42 cats"}
history = [*asked, *[item.model_dump(exclude_none=True) for item in called.output], result]
answered = client.responses.create(model=MODEL, input=history, tools=[LOOK])
assert answered.output_text == ANSWER, answered

chat = client.chat.completions.create(
    model=MODEL,
    messages=[{"role": "user", "content": "How many?"}],
    n=2,
    frequency_penalty=0.5,
    presence_penalty=1.5,
    seed=7,
)
assert [choice.message.content for choice in chat.choices] == [ANSWER, ANSWER], chat
assert chat.choices[0].message.reasoning_content == THOUGHT
tool = {"type": "function", "function": {k: v for k, v in LOOK.items() if k != "type"}}
deltas = []
for chunk in client.chat.completions.create(model=MODEL, messages=asked, tools=[tool], stream=True):
    deltas += [part.function for choice in chunk.choices for part in choice.delta.tool_calls or ()]
assert deltas[0].name == "look", deltas
assert json.loads("".join(delta.arguments or "" for delta in deltas)) == {"place": "garden"}, deltas

parsed = client.responses.parse(model=MODEL, input="How many cats?", text_format=Count)
assert parsed.output_parsed == Count(cats=42), parsed
with client.responses.stream(model=MODEL, input="How many cats?", text_format=Count) as stream:
    for _ in stream:
        pass
    assert stream.get_final_response().output_parsed == Count(cats=42)
counted = client.chat.completions.parse(model=MODEL, messages=asked, response_format=Count)
assert counted.choices[0].message.parsed == Count(cats=42), counted
with client.chat.completions.stream(model=MODEL, messages=asked, response_format=Count) as stream:
    for _ in stream:
        pass
    assert stream.get_final_completion().choices[0].message.parsed == Count(cats=42)
strict = openai.pydantic_function_tool(Count)
for choice in ("required", {"type": "function", "function": {"name": "Count"}}):
    called = client.chat.completions.parse(model=MODEL, messages=asked, tools=[strict], tool_choice=choice)
    [call] = called.choices[0].message.tool_calls
    assert call.function.parsed_arguments == Count(cats=42), called
