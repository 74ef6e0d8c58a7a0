"""instructor: an answer as an object, as a call of a tool, by its format, and asked for in the prompt."""

import sys

import instructor
import openai
from pydantic import BaseModel

URL, *_ = sys.argv[1:]


class Count(BaseModel):
    cats: int


client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
asked = [{"role": "user", "content": "How many cats?"}]
MODES = (
    instructor.Mode.TOOLS,
    instructor.Mode.TOOLS_STRICT,
    instructor.Mode.JSON,
    instructor.Mode.JSON_SCHEMA,
    instructor.Mode.MD_JSON,
)
for mode in MODES:
    counted = instructor.from_openai(client, mode=mode).chat.completions.create(
        model="default", messages=asked, response_model=Count, max_retries=0
    )
    assert counted.cats == 42, (mode, counted)
