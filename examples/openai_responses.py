"""Responses by id with OpenAI's SDK: the server keeps the conversation, also over a restart.

    pip install openai
    agentcache serve                                          # in another terminal
    python examples/openai_responses.py [--url URL]           # default: $AGENTCACHE_URL, else http://127.0.0.1:8000

It prints the command for the next turn, which continues by the response's id.
"""

import argparse
import os
from typing import Any

from openai import OpenAI

parser = argparse.ArgumentParser()
parser.add_argument("--url", default=os.environ.get("AGENTCACHE_URL", "http://127.0.0.1:8000"))
parser.add_argument("--continue-from", metavar="ID")
options = parser.parse_args()
client = OpenAI(base_url=f"{options.url}/v1", api_key="none")

if options.continue_from is None:
    response = client.responses.create(
        model="default",
        input="The mirror is in the library. Hugo lives in Berlin.",
        temperature=0,
        extra_body={"agent": "example-responses"},
    )
else:  # only the new message is sent; the agent is that of the stored response
    response = client.responses.create(
        model="default", input="Where is the mirror?", temperature=0, previous_response_id=options.continue_from
    )
report: Any = response.to_dict()["agentcache"]
print(response.output_text)
print(f"    {report['cache_state']}: {report['computed_tokens']} of {report['prompt_tokens']} tokens computed")
if options.continue_from is None:
    print("Next, before or after a restart of the server:")
    print(f"python examples/openai_responses.py --continue-from {response.id}")
