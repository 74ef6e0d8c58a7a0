"""llm, the command: a prompt, the conversation's next one, and a tool."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

URL, ANSWER, _ = sys.argv[1:]
folder = Path(tempfile.mkdtemp())
(folder / "extra-openai-models.yaml").write_text(
    f"- model_id: agentcache\n  model_name: default\n  api_base: {URL}/v1\n  supports_tools: true\n"
)


def llm(*arguments: str) -> str:
    command = [str(Path(sys.executable).with_name("llm")), *arguments]
    environment = os.environ | {"LLM_USER_PATH": str(folder), "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done
    return done.stdout


assert ANSWER in llm("-m", "agentcache", "How many cats?")
assert ANSWER in llm("-c", "And now?")
assert ANSWER in llm("-m", "agentcache", "--no-stream", "How many cats?")
function = 'def look(place: str) -> str:\n    "Looks at a place."\n    return "42 cats"\n'
assert ANSWER in llm("-m", "agentcache", "--functions", function, "How many cats are in the garden?")
