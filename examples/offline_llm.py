"""The engine without a server: an agent remembers after the engine was closed and opened again.

    python examples/offline_llm.py [MODEL]

MODEL is a folder or hub id; the default is the model in the package.
"""

import sys
import tempfile

from agentcache import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else None
greedy = SamplingParams(max_tokens=50, temperature=0)
messages: list[dict[str, str]] = []


def say(llm: LLM, text: str) -> None:
    """Send the history and one more message to the agent; print its answer and its report."""
    messages.append({"role": "user", "content": text})
    answer = llm.chat(messages, greedy, agent="alice")
    messages.append({"role": "assistant", "content": answer.text})
    report = answer.report
    print(f"> {text}\n{answer.text}")
    print(f"    {report.cache_state}: {report.computed_tokens} of {report.prompt_tokens} tokens computed")


with tempfile.TemporaryDirectory() as cache_dir:  # a folder of your own keeps the agents
    with LLM(model, cache_dir=cache_dir) as llm:
        say(llm, "The ring is in the mill. Ada lives in Rome.")
        say(llm, "Where is the ring?")
    print("== Closed and opened again: the agent's cache is read from disk")
    with LLM(model, cache_dir=cache_dir) as llm:
        say(llm, "Where does Ada live?")
        print("Agents:", ", ".join(f"{agent.id} ({agent.tokens} tokens)" for agent in llm.agents()))
