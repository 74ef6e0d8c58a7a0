"""The shipped scripts on the embedded model: it says what they expect, with facts it has never seen together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest

from agentcache.llm import LLM
from agentcache.workflow.chat import LLMChat
from agentcache.workflow.parse import read_script, shipped_scripts
from agentcache.workflow.run import Settings, WorkflowRun
from agentcache.workflow.schedule import Schedule, take_all
from agentcache.workflow.transcript import TurnRecord, recall_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # whole workflows on the embedded model


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(cache_dir=tmp_path_factory.mktemp("shipped") / "cache") as llm:
        yield llm


@pytest.fixture(scope="module")
def turns_of(llm: LLM) -> Callable[[str, int], list[TurnRecord]]:
    """`turns_of(script, seed)`: what was said, played once."""

    @cache
    def play(script: str, seed: int) -> list[TurnRecord]:
        workflow = WorkflowRun(read_script(script, seed), LLMChat(llm), Settings(f"{script}-{seed}"))
        return list(take_all(workflow, workflow.pending(), Schedule()))

    return play


@pytest.mark.slow
@pytest.mark.parametrize("script", shipped_scripts())
def test_another_seed_gives_other_facts_and_the_answers_follow(
    turns_of: Callable[[str, int], list[TurnRecord]], script: str
) -> None:
    with ThreadPoolExecutor() as pool:  # side by side: a decode step for many costs little more than one for few
        runs = list(pool.map(lambda seed: turns_of(script, seed), (11, 12)))
    assert recall_of([record for turns in runs for record in turns]).share >= 0.9
    assert [record.text for record in runs[0]] != [record.text for record in runs[1]]


@pytest.mark.slow
def test_calls_and_their_outcomes_extend_what_is_cached(turns_of: Callable[[str, int], list[TurnRecord]]) -> None:
    turns = turns_of("react", 11)
    called = [record for record in turns if record.tool_rounds and record.phase > 1]
    assert called
    for record in called:
        assert (record.cache_state, record.match) == ("hot", "EXTEND")
        assert record.computed_tokens < record.prompt_tokens / 2  # of the question and of every outcome together
