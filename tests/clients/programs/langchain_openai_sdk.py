"""langchain's ChatOpenAI, by chat completions and by responses: text, streams, tools, objects."""

import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL, ANSWER, _ = sys.argv[1:]


class Count(BaseModel):
    cats: int


@tool
def look(place: str) -> str:
    """Looks at a place."""
    return "42 cats"


def text_of(message) -> str:
    text = message.text
    return text if isinstance(text, str) else text()


for by_responses in (False, True):
    model = ChatOpenAI(
        model="default", base_url=f"{URL}/v1", api_key="none", max_retries=0, use_responses_api=by_responses
    )
    assert text_of(model.invoke("How many cats?")) == ANSWER
    assert "".join(text_of(chunk) for chunk in model.stream("How many cats?")) == ANSWER
    history = [HumanMessage("How many cats are in the garden?")]
    called = model.bind_tools([look]).invoke(history)
    [call] = called.tool_calls
    assert (call["name"], call["args"]) == ("look", {"place": "garden"}), call
    history += [called, ToolMessage(look.invoke(call["args"]), tool_call_id=call["id"])]
    assert text_of(model.bind_tools([look]).invoke(history)) == ANSWER
    for method in ("json_schema", "function_calling", "json_mode"):
        counted = model.with_structured_output(Count, method=method).invoke("How many cats? Answer in JSON.")
        assert counted == Count(cats=42), (method, counted)
    assert model.with_structured_output(Count).invoke("How many cats?") == Count(cats=42)
    [call] = model.bind_tools([look], tool_choice="look").invoke("How many cats are in the garden?").tool_calls
    assert call["args"] == {"place": "garden"}, call
