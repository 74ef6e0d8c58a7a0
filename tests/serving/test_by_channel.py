"""`--kv 4` on the real engine: an answer does not depend on where the blocks of its prompt have been."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from agentcache.api.request import Request, TokenPrompt
from agentcache.api.sampling import SamplingParams
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.llm import LLM, Completion
from agentcache.store.archive import export_agent
from agentcache.store.verify import verify_folder
from tests.conftest import ModelFolder
from tests.marks import slow
from tests.models.reference import ByChannelReference
from tests.serving import inside
from tests.serving.adapter_cases import all_ids, at_once, preempt_often
from tests.serving.block_damage import block_files, flip, metadata_of
from tests.serving.conversation import Stream, check_idle, greedy, logprob_errors, make_ids, open_llm, outcome

MODES = ("hot", "evicted", "restarted")
SETTINGS: dict[str, Any] = {"kv": "4", "prefill_chunk": 300}
REOPENED = 0.05  # of log probabilities: a reopened block has a query's own block in 4 bits


@contextmanager
def by_channel(model: Path, cache_dir: Path, **settings: Any) -> Iterator[LLM]:
    with open_llm(model, cache_dir, **SETTINGS | settings) as llm:
        yield llm


@dataclass
class Process:
    """An engine that may be stopped or emptied between two turns."""

    model: Path
    cache_dir: Path
    how: str
    stack: ExitStack = field(default_factory=ExitStack)
    has_answered: bool = False

    def __post_init__(self) -> None:
        self.llm = self.start()

    def start(self) -> LLM:
        return self.stack.enter_context(by_channel(self.model, self.cache_dir))

    def interrupt(self) -> None:
        if self.how == "evicted":
            for agent in self.llm.agents():
                self.llm.evict(agent.id)
        elif self.how == "restarted":
            self.stack.close()
            self.llm = self.start()

    def ask(self, ids: Sequence[int], tokens: int, agent: str = "alice", **options: Any) -> Completion:
        if self.has_answered:
            self.interrupt()
        self.has_answered = True
        said = self.llm.generate(list(ids), greedy(tokens, logprobs=2, **options), agent=agent)
        check_idle(self.llm)
        assert said.report.saved
        return said


def cold(llm: LLM, like: Completion) -> Completion:
    """The same again, of which nothing is cached."""
    ids = list(like.prompt_token_ids)
    said = llm.generate(ids, greedy(len(like.token_ids), logprobs=2), salt=os.urandom(8).hex())
    assert said.report.computed_tokens == len(ids)
    return said


def has_state(model: Path) -> bool:
    return model.name.startswith("qwen3_5")


def check_close(mine: Completion, theirs: Completion) -> None:
    """The same but for values that are rounded to the next code, which are more in 8 bits than in 4."""
    errors = logprob_errors(mine, theirs) or [0.0]
    assert np.median(errors) < 1e-2 and max(errors) < 3e-2, errors


Talk = Callable[[Process], list[Completion]]


def check_modes(talk: Talk, model: Path, folder: Path, *, reopened: Collection[int] = ()) -> list[Completion]:
    """To the last bit the same however the cache is interrupted; and as cold, within rounding, if not `reopened`."""
    found: dict[str, list[Completion]] = {}
    for how in MODES:
        process = Process(model, folder / how, how)
        with process.stack:
            found[how] = talk(process)
            for turn, said in enumerate(found[how] if how == "hot" else []):
                if turn not in reopened:
                    check_close(said, cold(process.llm, said))
    for how in MODES[1:]:
        for turn, (mine, hot) in enumerate(zip(found[how], found["hot"], strict=True)):
            assert outcome(mine) == outcome(hot), (how, turn)
            if not has_state(process.model):  # checkpoints that no file has are gone
                assert mine.report.computed_tokens == hot.report.computed_tokens, (how, turn)
    return found["hot"]


@pytest.fixture(
    params=["full", pytest.param("windows", marks=pytest.mark.slow), pytest.param("hybrid", marks=pytest.mark.slow)]
)
def any_model(request: pytest.FixtureRequest, model_folder: ModelFolder, hybrid: Callable[[str], Path]) -> Path:
    if request.param == "full":
        return model_folder("mistral", num_hidden_layers=2)
    if request.param == "windows":
        layers = ["sliding_attention", "full_attention"]
        return model_folder("mistral_sliding", sliding_window=300, num_hidden_layers=2, layer_types=layers)
    return hybrid("qwen3_5")


def test_four_turns(any_model: Path, tmp_path: Path) -> None:
    def talk(process: Process) -> list[Completion]:
        ids: list[int] = []
        said = []
        for number, added in enumerate((300, 700, 410, 333)):
            said.append(process.ask([*ids, *make_ids(added, seed=number)], 6))
            ids = all_ids(said[-1])
        return said

    check_modes(talk, any_model, tmp_path)


@pytest.mark.parametrize(
    "end", [slow(2 * BLOCK_SIZE - 1), 2 * BLOCK_SIZE, slow(2 * BLOCK_SIZE + 1), slow(2 * BLOCK_SIZE + 2)]
)
def test_a_turn_that_ends_at_a_border(end: int, model: Path, tmp_path: Path) -> None:
    """With the generated tokens; the last of them has no keys and values yet."""

    def talk(process: Process) -> list[Completion]:
        first = process.ask(make_ids(end - 3), 3)
        second = process.ask([*all_ids(first), *make_ids(2, seed=1)], 3)
        return [first, second, process.ask([*all_ids(second), *make_ids(300, seed=2)], 3)]

    check_modes(talk, model, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [11, 12, 13, 270])
def test_answers_across_a_border(tokens: int, model: Path, tmp_path: Path) -> None:
    def talk(process: Process) -> list[Completion]:
        first = process.ask(make_ids(500), tokens)
        return [first, process.ask([*all_ids(first), *make_ids(5, seed=1)], 4)]

    check_modes(talk, model, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kept", "any_model"),
    [(100, "full"), (256, "hybrid"), (511, "windows"), (512, "full"), (530, "hybrid"), (530, "windows")],
    indirect=["any_model"],
)
def test_edits_of_an_earlier_message(kept: int, any_model: Path, tmp_path: Path) -> None:
    """The kept part of a sealed block is reopened."""

    def talk(process: Process) -> list[Completion]:
        first = process.ask(make_ids(600), 4)
        edited = process.ask([*all_ids(first)[:kept], *make_ids(50, seed=1)], 4)
        return [first, edited, process.ask([*all_ids(edited), *make_ids(300, seed=2)], 4)]

    check_modes(talk, any_model, tmp_path, reopened=(1, 2) if BLOCK_SIZE < kept < 2 * BLOCK_SIZE else ())


@pytest.mark.slow
def test_the_same_prompt_again(any_model: Path, tmp_path: Path) -> None:
    """Behind a prompt that ends with a block the last block is reopened."""

    def talk(process: Process) -> list[Completion]:
        return [process.ask(make_ids(length), 3) for length in (512, 512, 513, 511, 700, 512)]

    check_modes(talk, any_model, tmp_path, reopened=(1, 3, 5))


LENGTHS = (slow(255), 256, slow(257), slow(511), slow(512), slow(514))


@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt_is_asked_again_at_a_border(length: int, model: Path, tmp_path: Path) -> None:
    """A request that fills a block with a file reads its own sealed data, whether or not that block is in RAM."""

    def talk(process: Process) -> list[Completion]:
        asked = [process.ask(make_ids(length), 4) for _ in range(3)]
        return [*asked, process.ask([*all_ids(asked[-1]), *make_ids(2, seed=1)], 3)]

    check_modes(talk, model, tmp_path, reopened=range(1, 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kept", "any_model"), [(511, "full"), (511, "windows"), (512, "hybrid")], indirect=["any_model"]
)
def test_a_fork_of_a_fork_fills_the_same_block(kept: int, any_model: Path, tmp_path: Path) -> None:
    def talk(process: Process) -> list[Completion]:
        said = [process.ask(make_ids(kept), 6)]
        for source, target in (("alice", "bob"), ("bob", "carol")):
            process.llm.fork(source, target)
            said.append(process.ask(make_ids(kept), 6, target))
        return [*said, process.ask([*all_ids(said[-1]), *make_ids(40, seed=1)], 3, "carol")]

    check_modes(talk, any_model, tmp_path, reopened=range(1, 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kept", "any_model"), [(300, "full"), (512, "windows"), (600, "hybrid")], indirect=["any_model"]
)
def test_forks(kept: int, any_model: Path, tmp_path: Path) -> None:
    def talk(process: Process) -> list[Completion]:
        first = process.ask(make_ids(650), 4)
        process.llm.fork("alice", "bob")
        forked = process.ask([*all_ids(first)[:kept], *make_ids(200, seed=3)], 4, "bob")
        return [first, forked, process.ask([*all_ids(first), *make_ids(200, seed=4)], 4)]

    check_modes(talk, any_model, tmp_path, reopened=(1,) if kept == 300 else ())


@pytest.mark.parametrize("kept", [slow(64), 100, slow(255), slow(300), slow(511)])
def test_a_reopened_block_is_read_as_the_reference_reads_it(kept: int, model: Path, tmp_path: Path) -> None:
    reference = ByChannelReference(model)
    with by_channel(model, tmp_path) as llm:
        first = llm.generate(make_ids(600), greedy(4, logprobs=2), agent="alice")
        check_against(reference, first)
        edited = llm.generate([*all_ids(first)[:kept], *make_ids(200, seed=1)], greedy(6, logprobs=2), agent="alice")
        assert edited.report.computed_tokens == 200
        check_against(reference, edited)


def check_against(reference: ByChannelReference, said: Completion) -> None:
    """What of the prompt has not been computed is in the reference's cache."""
    cut = said.report.prompt_tokens - said.report.computed_tokens
    if cut:
        reference.cut(cut)
    logits = reference.logits([*said.prompt_token_ids[cut:], *said.token_ids[:-1]])[-len(said.token_ids) :]
    logprobs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    expected = [row[token] for row, token in zip(logprobs, said.token_ids, strict=True)]
    errors = [abs(each.logprob - other) for each, other in zip(said.logprobs, expected, strict=True)]
    assert np.median(errors) < 1e-3 and max(errors) < 0.01, errors


@pytest.mark.parametrize(
    ("length", "any_model"),
    [
        *((512, "full"), slow(500, "full"), slow(511, "full"), slow(513, "full")),
        *(slow(length, model) for length in (511, 512) for model in ("windows", "hybrid")),
    ],
    indirect=["any_model"],
)
def test_several_answers(length: int, any_model: Path, tmp_path: Path) -> None:
    """Each is what a request of its own gets."""
    ids = make_ids(length)
    with by_channel(any_model, tmp_path) as llm:
        request = Request("n", TokenPrompt(ids), greedy(20), n=3)
        chosen: list[list[int]] = [[], [], []]

        def sort(update: Any) -> None:
            chosen[update.choice].extend(update.token_ids)

        inside.on_loop(llm, inside.async_engine(llm).generate(request, sort))
        check_idle(llm)
        alone = llm.generate(ids, greedy(20), salt="alone")
        assert chosen[0] == list(alone.token_ids)
        if length % BLOCK_SIZE:  # else the last token is computed behind a reopened block
            assert chosen[1] == chosen[2] == chosen[0]


@pytest.mark.slow
def test_a_cancelled_request_leaves_what_it_has_read(any_model: Path, tmp_path: Path) -> None:
    ids = make_ids(1500)
    with by_channel(any_model, tmp_path) as llm:

        async def leave(seconds: float) -> None:
            stream = Stream(llm, ids, max_tokens=20)  # the last block is not sealed
            await asyncio.sleep(seconds)
            stream.task.cancel()
            await asyncio.gather(stream.task, return_exceptions=True)

        for seconds in (0.05, 0.2, 0.7):
            inside.on_loop(llm, leave(seconds))
            inside.on_loop(llm, inside.on_thread(inside.async_engine(llm), lambda engine: engine.check_integrity()))
        said = llm.generate(ids, greedy(4, logprobs=2), agent="alice")
        assert said.report.computed_tokens < len(ids) + has_state(any_model)
        check_close(said, cold(llm, said))


@pytest.mark.slow
def test_preempted_requests(any_model: Path, tmp_path: Path) -> None:
    """Their tokens are computed in chunks the second time."""
    with by_channel(any_model, tmp_path / "alone") as llm:
        alone = [llm.generate(make_ids(490, seed=seed), greedy(40, logprobs=2)) for seed in range(2)]
    with by_channel(any_model, tmp_path / "often") as llm:
        preempt_often(llm, 7)
        requests = [
            Request(f"{seed}", TokenPrompt(make_ids(490, seed=seed)), greedy(40, logprobs=2)) for seed in range(2)
        ]
        for mine, theirs in zip(at_once(llm, requests), alone, strict=True):
            assert max(logprob_errors(mine, theirs)) < REOPENED
        assert llm.stats().preemptions > 3


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [5, 7])
def test_scarce_memory(blocks: int, model: Path, tmp_path: Path) -> None:
    """Conversations that do not fit together. Where the same is asked again, a block may be reopened."""
    prompts = [make_ids(480 + 9 * seed, seed=seed) for seed in range(4)]
    with by_channel(model, tmp_path / "alone") as llm:
        alone = [llm.generate(ids, greedy(60, logprobs=2)) for ids in prompts]
        spec = inside.loaded_model(inside.engine_of(llm)).spec
    budget = blocks * sum(group.bytes_per_block for group in spec.groups)
    with by_channel(model, tmp_path / "scarce", ram_budget=budget) as llm:
        for turn in range(2):
            requests = [
                Request(f"{turn} {seed}", TokenPrompt(ids), greedy(60, logprobs=2), f"agent{seed}")
                for seed, ids in enumerate(prompts)
            ]
            for mine, theirs in zip(at_once(llm, requests), alone, strict=True):
                assert turn or max(logprob_errors(mine, theirs)) < REOPENED
            check_idle(llm)


@pytest.mark.slow
def test_requests_together(any_model: Path, tmp_path: Path) -> None:
    prompts = [make_ids(length, seed=length) for length in (5, 250, 255, 256, 505, 512)]
    with by_channel(any_model, tmp_path) as llm:
        requests = [Request(f"{len(ids)}", TokenPrompt(ids), greedy(20, logprobs=2)) for ids in prompts]
        inside.hold_until(llm, len(requests))
        together = at_once(llm, requests)
        check_idle(llm)
        for mine in together:
            check_close(mine, cold(llm, mine))


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [11, 12, 13])
def test_stop_strings_at_a_border(tokens: int, model: Path, tmp_path: Path) -> None:
    """The stop string ends with the block, a token before or behind."""
    ids = make_ids(500)
    with by_channel(model, tmp_path / "look") as llm:
        text = llm.generate(ids, greedy(tokens), salt="look").text

    def talk(process: Process) -> list[Completion]:
        first = process.ask(ids, 40, stop=[text[-3:]])
        return [first, process.ask([*all_ids(first), *make_ids(300, seed=1)], 4)]

    check_modes(talk, model, tmp_path)


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["sealed", "open"])
def test_a_flipped_byte(which: str, any_model: Path, tmp_path: Path) -> None:
    ids = make_ids(700)
    with by_channel(any_model, tmp_path) as llm:
        first = llm.generate(ids, greedy(4, logprobs=2), agent="alice")
    files = [
        path for path in block_files(tmp_path) if metadata_of(path)["group"].endswith(".open") == (which == "open")
    ]
    flip([path for path in files if metadata_of(path)["group"] != "recurrent"][-1], -9)
    with by_channel(any_model, tmp_path) as llm:
        said = llm.generate([*all_ids(first), *make_ids(30, seed=1)], greedy(4, logprobs=2), agent="alice")
        assert llm.stats().quarantined == 1
        assert 35 < said.report.computed_tokens < 734 + has_state(any_model)
        check_close(said, cold(llm, said))


@pytest.mark.slow
def test_an_agent_comes_back_from_an_archive(any_model: Path, tmp_path: Path) -> None:
    ids = make_ids(700)
    with by_channel(any_model, tmp_path / "here") as llm:
        first = llm.generate(ids, greedy(4, logprobs=2), agent="alice")
        export_agent(tmp_path / "here", "alice", tmp_path / "alice.agent")
        going_on = [*all_ids(first), *make_ids(30, seed=1)]
        hot = llm.generate(going_on, greedy(4), agent="alice")
    with by_channel(any_model, tmp_path / "there") as llm:
        llm.import_agent("bob", tmp_path / "alice.agent")
        said = llm.generate(going_on, greedy(4), agent="bob")
        if has_state(any_model):  # the last checkpoint is elsewhere
            check_close(said, hot)
        else:
            assert outcome(said) == outcome(hot)
            assert said.report.computed_tokens == hot.report.computed_tokens
    assert verify_folder(tmp_path / "there").problems == ()


@pytest.mark.slow
def test_sampling_is_the_same(model: Path, tmp_path: Path) -> None:
    sampling = SamplingParams(max_tokens=30, temperature=1.0, seed=7, ignore_eos=True)
    with by_channel(model, tmp_path) as llm:
        answers = {llm.generate(make_ids(500), sampling, salt=str(number)).token_ids for number in range(3)}
    assert len(answers) == 1
