"""Models with recurrent layers: a turn costs what is new, hot, evicted, after a stop and after a crash; same words."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agentcache.blocks.prefix_match import len_common_prefix
from agentcache.blocks.snapshots import MOST_SAVED, ROW_STATES
from agentcache.llm import LLM, Completion
from agentcache.store.verify import verify_folder
from agentcache.system.memory import Level
from tests.marks import slow
from tests.serving import inside
from tests.serving.conversation import Chat, Stream, check_idle, greedy, make_ids, make_text, open_llm
from tests.serving.hybrids import EVERY, HYBRIDS, answer, check_same, more, snapshot_files, with_template
from tests.text.templates import QWEN_3_5
from tests.tokenizers_factory import CHATML

# -- one conversation, however it is interrupted -----------------------------------------------------------------------


@dataclass
class Process:
    """An engine that may be stopped, killed or emptied between two turns."""

    model: Path
    cache_dir: Path
    how: str
    every: int = EVERY
    stack: ExitStack = field(default_factory=ExitStack)
    number: int = 0

    def __post_init__(self) -> None:
        self.llm = self.start()

    def start(self) -> LLM:
        return self.stack.enter_context(open_llm(self.model, self.cache_dir, snapshot_tokens=self.every))

    def interrupt(self) -> None:
        if self.how == "evicted":
            for agent in self.llm.agents():
                self.llm.evict(agent.id)
        elif self.how == "stopped":
            self.stack.close()
            self.llm = self.start()
        elif self.how == "killed":
            # What is in the folder now is what a killed process leaves: nothing of it is written at the end.
            self.number += 1
            left = self.cache_dir.with_name(f"{self.cache_dir.name}-{self.number}")
            shutil.copytree(self.cache_dir, left, ignore=shutil.ignore_patterns("lock"))
            self.stack.close()
            self.cache_dir = left
            self.llm = self.start()


def turns(every: int) -> list[tuple[str, int | None, int]]:
    """Turns: agent, tokens kept of its transcript (None: all), tokens added. "copy" is forked before its first turn.

    Alice and bob each get a checkpoint at `every` tokens.
    """
    return [
        ("alice", None, every + 188),
        ("bob", None, every // 2 + 44),
        ("alice", None, 3),  # so few that the state before shows in the answer
        ("alice", every + 88, 80),  # an edit
        ("alice", None, 2),
        ("alice", -4, 0),  # the last answer is given anew
        ("copy", None, 1),
        ("bob", None, every // 2 + 144),
        ("alice", None, 40),
        ("bob", None, 2),
    ]


def converse(process: Process) -> Iterator[tuple[list[int], int, Completion]]:
    """The turns: the prompt, how many tokens of it are new, or -1 where it changes what was said; and the answer."""
    held: dict[str, list[int]] = {}
    for number, (agent, kept, added) in enumerate(turns(process.every)):
        if agent in held or agent == "copy":
            process.interrupt()
        if agent == "copy" and agent not in held:
            process.llm.fork("alice", "copy")
            held["copy"] = list(held["alice"])
        known = held.get(agent, [])
        prompt = more(known[:kept], added, seed=number)
        completion = answer(process.llm, prompt, agent)
        held[agent] = [*prompt, *completion.token_ids]
        yield prompt, added if kept is None else -1, completion


MODES = ("hot", "evicted", "stopped", "killed")
# The engine writes at the same times for every model, so two models run all modes. Others run hot and killed, with
# half the tokens: these cover the state of their layers.
ALL_MODES = ("qwen3_5", "mamba2")  # with attention and without


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "modes", "every"),
    [(file, MODES, EVERY) if file in ALL_MODES else (file, ("hot", "killed"), EVERY // 2) for file in HYBRIDS],
    ids=HYBRIDS,
)
def test_the_same_words_at_the_cost_of_what_is_new(
    file: str, modes: Sequence[str], every: int, hybrid: Callable[[str], Path], tmp_path: Path
) -> None:
    cold: dict[tuple[int, ...], Completion] = {}
    with open_llm(hybrid(file), tmp_path / "cold", snapshot_tokens=every) as reference:
        for how in modes:
            process = Process(hybrid(file), tmp_path / how, how, every)
            with process.stack:
                for prompt, new, completion in converse(process):
                    report = completion.report
                    if tuple(prompt) not in cold:
                        cold[tuple(prompt)] = answer(reference, prompt, None, salt=str(len(cold)))
                    check_same(completion, cold[tuple(prompt)])
                    assert (report.saved, report.lost_tokens) == (True, 0)
                    if new >= 0:
                        assert report.computed_tokens <= new + (every if how == "killed" else 1)
                    assert process.llm.stats().quarantined == 0
                process.llm.check_integrity()
            folder = verify_folder(process.cache_dir)
            assert (folder.problems, folder.missing_blocks, folder.unnamed_blocks) == ((), 0, 0)


THINKING = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'].split('</think>')[-1].lstrip('\n') }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


SILENT = {"enable_thinking": False}


@dataclass
class Talk:
    """Chats whose replies are of ordinary tokens, and show no text where the prompt has begun a thought.

    Args:
        variables: the template's.
    """

    process: Process
    variables: dict[str, Any] = field(default_factory=dict)
    agent: str | None = "alice"
    messages: list[dict[str, Any]] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)

    def say(self, words: int, count: int = 6) -> tuple[Completion, int]:
        """The answer, and how many tokens of its prompt neither the prompt before it nor that one's answer has."""
        tokenizer = inside.tokenizer(inside.engine_of(self.process.llm))
        never = dict.fromkeys({*tokenizer.control_ids, *tokenizer.eos_ids, *tokenizer.markers}, -1e9)
        self.messages.append({"role": "user", "content": make_text(words, seed=len(self.messages))})
        said = self.process.llm.chat(
            self.messages, greedy(count, logit_bias=never), agent=self.agent, chat_template_kwargs=self.variables
        )
        self.messages.append({"role": "assistant", "content": "" if not self.variables else said.text})
        prompt = list(said.prompt_token_ids)
        new = len(prompt) - len_common_prefix(self.held, prompt)
        self.prompt, self.held = prompt, [*prompt, *said.token_ids[:-1]]  # the last one is not computed
        return said, new


@pytest.mark.parametrize(
    ("template", "variables", "agent"),
    [
        (QWEN_3_5, {}, "alice"),
        slow(QWEN_3_5, {}, None),
        slow(QWEN_3_5, SILENT, "alice"),
        slow(CHATML, SILENT, "alice"),
        slow(THINKING, {}, "alice"),
    ],
)
def test_the_next_prompt_starts_in_front_of_what_it_does_not_repeat(
    template: str, variables: dict[str, Any], agent: str | None, qwen: Path, tmp_path: Path
) -> None:
    """Short turns, with no block's border near their ends."""
    process = Process(with_template(qwen, tmp_path / "model", template), tmp_path / "cache", "hot")
    with process.stack:
        talk = Talk(process, variables, agent)
        talk.say(60)
        for words in (5, 30):
            said, new = talk.say(words)
            assert new < said.report.prompt_tokens - 60
            assert said.report.computed_tokens == new
            assert said.report.lost_tokens == 0
        cold = process.llm.generate(talk.prompt, greedy(6, logprobs=2), salt="cold")
        again = process.llm.generate(talk.prompt, greedy(6, logprobs=2))
        assert again.report.computed_tokens < 10, "an answer that is given anew"
        check_same(again, cold)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_thoughts_that_the_template_leaves_out_are_not_gone_on_from(how: str, qwen: Path, tmp_path: Path) -> None:
    """Each prompt leaves what was generated at its beginning: there has to be a snapshot in front of that, too."""
    model = Path(shutil.copytree(qwen, tmp_path / "model"))
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": THINKING}))
    process, held = Process(model, tmp_path / how, how), list[int]()
    messages: list[dict[str, str]] = []
    with process.stack:
        for turn, words in enumerate((500, 150, 60, 250)):
            process.interrupt()
            tokenizer = inside.tokenizer(inside.engine_of(process.llm))
            never = dict.fromkeys({*tokenizer.control_ids, *tokenizer.eos_ids, *tokenizer.markers}, -1e9)
            messages.append({"role": "user", "content": make_text(words, seed=turn)})
            said = process.llm.chat(messages, greedy(200, logit_bias=never), agent="alice")
            messages.append({"role": "assistant", "content": ""})
            prompt = list(said.prompt_token_ids)
            new = len(prompt) - len_common_prefix(held, prompt)
            assert turn == 0 or len(prompt) - new > EVERY, "there is something to go on from"
            assert len(prompt) - new < len(held) - 190 or turn == 0, "without the thought"
            assert said.report.computed_tokens <= new + EVERY
            held = [*prompt, *said.token_ids]
            inside.flush(inside.engine_of(process.llm))
            assert len(snapshot_files(process.cache_dir)) <= MOST_SAVED


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_that_start_is_on_disk(how: str, qwen: Path, tmp_path: Path) -> None:
    """Of a template that writes an empty thought, which is none that the transcript shows as generated."""
    process = Process(with_template(qwen, tmp_path / "model", CHATML), tmp_path / how, how)
    with process.stack:
        talk = Talk(process, SILENT)
        talk.say(300)
        for words in (30, 250):
            inside.flush(inside.engine_of(process.llm))
            assert len(snapshot_files(process.cache_dir)) <= MOST_SAVED
            process.interrupt()
            said, new = talk.say(words)
            assert said.report.computed_tokens <= new + (EVERY if how == "killed" else 0)


@pytest.mark.slow
def test_an_answer_given_anew_begins_near_the_prompts_end(qwen: Path, tmp_path: Path) -> None:
    with open_llm(qwen, tmp_path) as llm:
        ids = make_ids(1500)
        first = answer(llm, ids, "alice")
        again = answer(llm, ids, "alice")
        assert first.report.computed_tokens == 1500
        assert again.report.computed_tokens <= 256
        assert again.token_ids == first.token_ids


@pytest.mark.parametrize("num_tokens", [1, slow(3)])
def test_a_stop_string_leaves_the_turn_where_it_ended(num_tokens: int, qwen: Path, tmp_path: Path) -> None:
    """While it is found, the device is at work on tokens that are not kept; of a long one, some are computed."""
    with open_llm(qwen, tmp_path) as llm:
        ids = make_ids(300)
        texts = [logprob.data.decode(errors="replace") for logprob in llm.generate(ids, greedy(16)).logprobs]
        stop = "".join(texts[7 : 7 + num_tokens])
        stopped = llm.generate(ids, greedy(16, stop=[stop]), agent="alice")
        assert 0 < len(stopped.text) < len("".join(texts))
        held = inside.record(inside.engine_of(llm), "alice").transcript.ids
        prompt = more(held, 2, seed=3)
        following = answer(llm, prompt, "alice")
        assert following.report.computed_tokens <= 2 + 1
        check_same(following, answer(llm, prompt, None, salt="cold"))


# -- sharing -----------------------------------------------------------------------------------------------------------


def test_two_agents_with_one_system_prompt_compute_it_once(qwen: Path, tmp_path: Path) -> None:
    system = {"role": "system", "content": make_text(900, seed=1)}
    with open_llm(qwen, tmp_path) as llm:
        first, second = (Chat(agent, [dict(system)]) for agent in ("alice", "bob"))
        one = first.turn(llm, make_text(20, seed=2)).report
        other = second.turn(llm, make_text(25, seed=3)).report
        assert one.computed_tokens == one.prompt_tokens > 900
        assert other.computed_tokens < 256 + 100


@pytest.mark.slow
def test_a_long_system_prompt_is_known_after_a_crash(qwen: Path, tmp_path: Path) -> None:
    system = {"role": "system", "content": make_text(900, seed=1)}
    with open_llm(qwen, tmp_path / "one", snapshot_tokens=EVERY) as llm:
        Chat("alice", [dict(system)]).turn(llm, make_text(600, seed=2))
        shutil.copytree(tmp_path / "one", tmp_path / "left", ignore=shutil.ignore_patterns("lock"))
    with open_llm(qwen, tmp_path / "left", snapshot_tokens=EVERY) as llm:
        assert Chat("bob", [dict(system)]).turn(llm, make_text(25, seed=3)).report.computed_tokens < 256 + 100


@pytest.mark.slow
def test_salts_share_no_state(qwen: Path, tmp_path: Path) -> None:
    with open_llm(qwen, tmp_path) as llm:
        costs = [answer(llm, make_ids(600), None, salt=salt).report.computed_tokens for salt in ("", "", "a")]
        assert costs[0] == costs[2] == 600 > costs[1]


# -- several at a time -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rows_of_a_batch_keep_their_own_states(qwen: Path, tmp_path: Path) -> None:
    prompts = {f"agent{i}": make_ids(40 + 30 * i, seed=i) for i in range(5)}
    with open_llm(qwen, tmp_path / "alone") as llm:
        alone = {agent: answer(llm, ids, agent, 30) for agent, ids in prompts.items()}

    async def together(llm: LLM) -> dict[str, list[int]]:
        streams = {agent: Stream(llm, ids, agent, max_tokens=30) for agent, ids in prompts.items()}
        updates = {agent: await stream.rest() for agent, stream in streams.items()}
        return {agent: [token for each in found for token in each.token_ids] for agent, found in updates.items()}

    with open_llm(qwen, tmp_path / "together") as llm:
        tokens = inside.on_loop(llm, together(llm))
        for agent, ids in prompts.items():
            assert tuple(tokens[agent]) == alone[agent].token_ids, agent
            prompt = more([*ids, *tokens[agent]], 2, seed=9)
            following = answer(llm, prompt, agent)
            assert following.report.computed_tokens <= 3
            check_same(following, answer(llm, prompt, None, salt="cold"))


@pytest.mark.slow
def test_little_room_for_states(qwen: Path, tmp_path: Path) -> None:
    """Room for two rows: the others wait; nobody's answer is another for it, and budgets hold."""
    spec_bytes = 0
    with open_llm(qwen, tmp_path / "probe") as llm:
        group = inside.loaded_model(inside.engine_of(llm)).spec.state_group
        assert group is not None
        spec_bytes = group.bytes_per_block
        prompts = {f"agent{i}": make_ids(300 + 100 * i, seed=i) for i in range(4)}
        alone = {agent: answer(llm, ids, None, 12) for agent, ids in prompts.items()}

    async def together(llm: LLM) -> None:
        streams = {agent: Stream(llm, ids, agent, max_tokens=12) for agent, ids in prompts.items()}
        leaver = Stream(llm, make_ids(900, seed=8), "leaver", max_tokens=50)
        await asyncio.sleep(0.05)
        leaver.task.cancel()
        for agent, stream in streams.items():
            tokens = [token for update in await stream.rest() for token in update.token_ids]
            assert tuple(tokens) == alone[agent].token_ids

    with open_llm(qwen, tmp_path / "small", state_budget=spec_bytes * (2 * ROW_STATES + 2)) as llm:
        inside.on_loop(llm, together(llm))
        check_idle(llm)
        [account] = [each for each in llm.stats().ram_accounts if each.kind == "state"]
        assert account.capacity_bytes <= spec_bytes * (2 * ROW_STATES + 2)
        assert llm.stats().ram_used["state"] == account.used_bytes


@pytest.mark.slow
def test_who_is_preempted_goes_on_from_the_last_snapshot(qwen: Path, tmp_path: Path) -> None:
    with open_llm(qwen, tmp_path / "alone", snapshot_tokens=EVERY) as llm:
        alone = answer(llm, make_ids(1300), None, 40)

    async def interrupted(llm: LLM) -> tuple[int, ...]:
        stream = Stream(llm, make_ids(1300), "alice", max_tokens=40)
        engine = inside.async_engine(llm)
        tokens: list[int] = []
        while len(tokens) < 20:
            tokens += (await stream.updates.get()).token_ids
        await inside.on_thread(engine, lambda e: inside.preempt(e, inside.running(e)[0]))
        return (*tokens, *(token for update in await stream.rest() for token in update.token_ids))

    with open_llm(qwen, tmp_path / "preempted", snapshot_tokens=EVERY) as llm:
        assert inside.on_loop(llm, interrupted(llm)) == alone.token_ids
        assert llm.stats().computed_tokens < 1300 + 40 + 256 + 40


@pytest.mark.parametrize("level", [slow(Level.WARNING), Level.CRITICAL])
def test_snapshots_leave_under_memory_pressure_and_agents_come_back_warm(
    level: Level, qwen: Path, tmp_path: Path
) -> None:
    """What is in RAM only is written first; an agent that comes back computes what is new."""
    names = ("alice", "bob", "carol")
    with open_llm(qwen, tmp_path, snapshot_tokens=EVERY) as llm:
        held = {name: make_ids(300 + 50 * seed, seed=seed) for seed, name in enumerate(names)}
        for name, ids in held.items():
            held[name] = [*ids, *answer(llm, ids, name).token_ids]
        assert snapshot_files(tmp_path) == [], "the prompts are too short for that"
        before = states_in_ram(llm)
        assert before >= len(names)
        inside.relieve(llm, level)
        left = states_in_ram(llm)
        assert left >= len(names), "what nobody has written yet stays"
        inside.wait_until(llm, lambda: len(snapshot_files(tmp_path)) >= len(names) and not inside.is_writing(llm))
        inside.relieve(llm, level)
        assert states_in_ram(llm) == (0 if level is Level.CRITICAL else left - -(-left // 2))
        inside.relieve(llm, Level.CRITICAL)
        assert states_in_ram(llm) == inside.state_arrays(inside.engine_of(llm)) == 0
        assert llm.stats().ram_used["state"] == 0
        assert llm.stats().pressure_freed_bytes >= before * inside.snapshot_bytes(inside.engine_of(llm))
        check_idle(llm)
        for name, ids in held.items():
            back = answer(llm, prompt := more(ids, 2, seed=9), name)
            assert back.report.cache_state == "warm"
            assert back.report.computed_tokens <= 2 + 1
            check_same(back, answer(llm, prompt, None, salt="cold"))


def states_in_ram(llm: LLM) -> int:
    """Snapshots; no request runs."""
    return llm.stats().ram_used["state"] // inside.snapshot_bytes(inside.engine_of(llm))


def test_a_snapshot_that_cannot_be_written_stays_under_memory_pressure(qwen: Path, tmp_path: Path) -> None:
    with open_llm(qwen, tmp_path, snapshot_tokens=EVERY) as llm:
        ids = make_ids(300)
        ids = [*ids, *answer(llm, ids, "alice").token_ids]

        def full(step: str) -> None:
            raise OSError(28, "No space left on device")

        repair = inside.set_fault(inside.engine_of(llm), full)
        for _ in range(3):
            inside.relieve(llm, Level.CRITICAL)
            inside.wait_until(llm, lambda: not inside.is_writing(llm))
        repair()
        assert states_in_ram(llm) == 1
        assert answer(llm, more(ids, 2, seed=1), "alice").report.computed_tokens <= 2 + 1
