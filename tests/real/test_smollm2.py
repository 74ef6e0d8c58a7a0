"""A published checkpoint through the whole of the engine: SmolLM2-135M-Instruct knows facts, and so must its cache."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from agentcache.llm import LLM, Completion
from agentcache.sampling import SamplingParams
from agentcache.server_process import ServerProcess
from benchmarks.quality.plan import QualityPlan
from benchmarks.quality.texts import measure_texts
from tests.adapters_factory import make_adapter
from tests.live.servers import serving, stop
from tests.real.smollm2 import smollm2_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FACTS = {
    "What is the capital of France?": "The capital of France is Paris.",
    "What is the opposite of hot?": "The opposite of hot is cold.",
    "What is 2+2?": "The answer to this classic math problem is",
}
TOLD = (
    "The password is 'mango'. The meeting is on Friday.",
    "What is the password?",
    "On which day is the meeting?",
)
RECALLED = ("", "mango", "Friday")
GREEDY = SamplingParams(max_tokens=9, temperature=0, logprobs=1)
CONTEXT = 2048

Messages = list[dict[str, str]]


def opened(cache_dir: Path, kv: str, **settings: object) -> LLM:
    return LLM(str(smollm2_folder()), cache_dir=cache_dir, kv=kv, max_context=CONTEXT, **settings)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with opened(tmp_path_factory.mktemp("cache"), "16") as unquantised:
        yield unquantised


@pytest.mark.parametrize("question", FACTS)
def test_facts_are_known(llm: LLM, question: str) -> None:
    assert llm.chat([{"role": "user", "content": question}], GREEDY).text.startswith(FACTS[question])


def prompts(answers: Sequence[str]) -> Iterator[Messages]:
    """A conversation, a turn at a time; its history has these answers."""
    messages: Messages = []
    for said, answer in zip(TOLD, answers, strict=True):
        messages.append({"role": "user", "content": said})
        yield list(messages)
        messages.append({"role": "assistant", "content": answer})


def numbers(completion: Completion) -> list[tuple[int, float | None]]:
    """Tokens of an answer, with their logprobs."""
    assert completion.logprobs is not None
    return [(each.token_id, each.logprob) for each in completion.logprobs]


def hold(llm: LLM, agent: str) -> list[Completion]:
    """The conversation with the model's own answers as its history."""
    said: list[Completion] = []
    messages: Messages = []
    for content in TOLD:
        messages.append({"role": "user", "content": content})
        said.append(llm.chat(list(messages), GREEDY, agent=agent))
        messages.append({"role": "assistant", "content": said[-1].text})
    return said


@pytest.mark.parametrize("kv", ["k8v4", "16"])
def test_answers_are_the_same_to_the_last_bit_wherever_the_cache_was(kv: str, tmp_path: Path) -> None:
    with opened(tmp_path, kv) as llm:
        hot = hold(llm, "hot")
        asked = list(prompts([each.text for each in hot]))
        for word, completion in zip(RECALLED, hot, strict=True):
            assert word in completion.text
        evicted = []
        for messages in asked:
            evicted.append(llm.chat(messages, GREEDY, agent="evicted", salt="apart"))
            llm.evict("evicted")
        assert [numbers(each) for each in evicted] == [numbers(each) for each in hot]
        assert all(each.report is not None and each.report.restored_bytes > 0 for each in evicted[1:])
        if kv == "16":  # computed in other pieces, whose products round otherwise: the words, and nearly the numbers
            cold = llm.chat(asked[-1], GREEDY, salt="cold")
            assert cold.token_ids == hot[-1].token_ids
            logprobs = [[number for _, number in numbers(each)] for each in (cold, hot[-1])]
            assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-2)
    restarted = []
    for messages in asked:
        with opened(tmp_path, kv) as llm:
            restarted.append(llm.chat(messages, GREEDY, agent="restarted", salt="again"))
    assert [numbers(each) for each in restarted] == [numbers(each) for each in hot]
    assert all(each.report is not None and each.report.restored_bytes > 0 for each in restarted[1:])


def test_a_killed_server_goes_on_warm(tmp_path: Path) -> None:
    settings = ("--max-context", str(CONTEXT), "--kv", "k8v4")
    body = {"temperature": 0, "max_tokens": 12, "agent": "anna", "agentcache": {"report": True}}

    def ask(server: ServerProcess, messages: Messages) -> tuple[str, int, int]:
        answer = server.client.request("POST", "/v1/chat/completions", body | {"messages": messages})
        report = answer["agentcache"]
        return answer["choices"][0]["message"]["content"], report["computed_tokens"], report["prompt_tokens"]

    messages: Messages = [{"role": "user", "content": TOLD[0]}]
    with serving(smollm2_folder(), tmp_path / "cache", *settings) as server:
        said, _, _ = ask(server, messages)
        stop(server, signal.SIGKILL)
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": TOLD[1]}]
    with serving(smollm2_folder(), tmp_path / "cache", *settings) as server:
        said, computed, length = ask(server, messages)
    assert "mango" in said and computed < length / 2


def test_an_adapter_is_served(llm: LLM, tmp_path: Path) -> None:
    """Its answers are its own; without it the model's are as before."""
    question = "What is the capital of France?"
    folder = make_adapter(tmp_path / "adapter", smollm2_folder(), strength=0.5)
    messages = [{"role": "user", "content": question}]
    llm.load_adapter("own", folder)
    own = llm.chat(messages, GREEDY, adapter="own")
    assert numbers(own) == numbers(llm.chat(messages, GREEDY, adapter="own", salt="again"))
    assert numbers(own) != numbers(llm.chat(messages, GREEDY))
    assert llm.chat(messages, GREEDY).text.startswith(FACTS[question])


def test_auto_is_near_to_16_bits_and_nothing_smaller_is_nearer() -> None:
    plan = QualityPlan(model=str(smollm2_folder()), formats=("8", "k8v4", "auto", "4"), text_tokens=256)
    *_, table = measure_texts(plan, print)
    rows = {row["format"]: row for row in table.rows}
    assert rows["8"]["divergence"] < rows["auto"]["divergence"] < rows["k8v4"]["divergence"] < rows["4"]["divergence"]
    assert rows["auto"]["divergence"] < 0.005  # over few tokens, the change of perplexity is mostly chance
    assert rows["k8v4"]["bytes"] < rows["auto"]["bytes"] < rows["8"]["bytes"]
