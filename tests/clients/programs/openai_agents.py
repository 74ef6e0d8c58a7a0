"""OpenAI's agents with their default model class, which wants responses, and with chat completions: tools, objects."""

import asyncio
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

URL, ANSWER, _ = sys.argv[1:]
places = []


class Count(BaseModel):
    cats: int


@function_tool
def look(place: str) -> str:
    """Looks at a place."""
    places.append(place)
    return "42 cats"


async def run() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        places.clear()
        agent = Agent("cats", instructions="Count.", tools=[look], model=kind("gpt-5", client))
        done = await Runner.run(agent, "How many cats are in the garden?")
        assert done.final_output == ANSWER, done
        streamed = Runner.run_streamed(agent, [*done.to_input_list(), {"role": "user", "content": "Again?"}])
        async for _ in streamed.stream_events():
            pass
        assert streamed.final_output == ANSWER and places == ["garden"] * 2, streamed
        places.clear()
        counting = Agent("counts", tools=[look], model=kind("gpt-5", client), output_type=Count)
        counted = await Runner.run(counting, "How many cats are in the garden?")
        assert counted.final_output == Count(cats=42) and places == ["garden"], counted
        demanding = counting.clone(model_settings=ModelSettings(tool_choice="required"))
        assert (await Runner.run(demanding, "How many?")).final_output == Count(cats=42)


asyncio.run(run())
