"""pydantic-ai's agents by chat completions and by responses: a tool, going on from history, objects as answers."""

import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, ANSWER, THOUGHT = sys.argv[1:]


class Count(BaseModel):
    cats: int


provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
for kind in (OpenAIChatModel, OpenAIResponsesModel):
    agent = Agent(kind("default", provider=provider), instructions="Count.")
    places = []

    @agent.tool_plain
    def look(place: str) -> str:
        """Looks at a place."""
        places.append(place)  # noqa: B023
        return "42 cats"

    first = agent.run_sync("How many cats are in the garden?")
    assert first.output == ANSWER and places == ["garden"], first
    second = agent.run_sync("And now?", message_history=first.all_messages())
    assert second.output == ANSWER and len(places) == 2, second
    assert THOUGHT in str(second.all_messages()), second
    for output in (Count, ToolOutput(Count), NativeOutput(Count), PromptedOutput(Count)):
        places.clear()
        counting = Agent(kind("default", provider=provider), output_type=output, tools=[look])
        counted = counting.run_sync("How many cats are in the garden?")
        assert counted.output == Count(cats=42) and places == ["garden"], (output, counted)
