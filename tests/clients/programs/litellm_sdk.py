"""litellm, by its OpenAI and its Anthropic road: text, streams, tools."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

URL, ANSWER, THOUGHT = sys.argv[1:]
asked = [{"role": "user", "content": "How many cats are in the garden?"}]
parameters = {"type": "object", "properties": {"place": {"type": "string"}}}
LOOK = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": parameters}}
for model, base in (("openai/default", f"{URL}/v1"), ("anthropic/claude-sonnet-4-5", URL)):
    way = {"model": model, "api_base": base, "api_key": "none", "num_retries": 0}
    done = litellm.completion(messages=asked, **way)
    assert done.choices[0].message.content == ANSWER, done
    chunks = litellm.completion(messages=asked, stream=True, **way)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    called = litellm.completion(messages=asked, tools=[LOOK], **way).choices[0].message
    [call] = called.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"place": "garden"}), call
    result = {"role": "tool", "tool_call_id": call.id, "content": "42 cats"}
    done = litellm.completion(messages=[*asked, called.model_dump(), result], tools=[LOOK], **way)
    assert done.choices[0].message.content == ANSWER, done
    if model.startswith("openai"):
        assert done.choices[0].message.reasoning_content == THOUGHT, done
