"""smolagents' agent that calls tools: each step demands a call, the last one that of its answer."""

import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool

URL, ANSWER, _ = sys.argv[1:]
places = []


@tool
def look(place: str) -> str:
    """Looks at a place.

    Args:
        place: where.
    """
    places.append(place)
    return "42 cats"


model = OpenAIServerModel("default", api_base=f"{URL}/v1", api_key="none")
agent = ToolCallingAgent(tools=[look], model=model, max_steps=3, verbosity_level=0)
assert agent.run("How many cats are in the garden?") == ANSWER
assert places == ["garden"], places
