"""Answers whose cache was kept, evicted, restored, damaged or recomputed.

All ways continue the hot way's answers, so that a difference counts once.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from agentcache.api.sampling import SamplingParams
from agentcache.bench.plots import new_figure
from agentcache.bench.reporter import Report
from agentcache.llm import LLM, Completion
from agentcache.models.builtin.embedded import DATA
from benchmarks.quality.plan import Part, QualityPlan, ResultTable
from benchmarks.workload import Progress
from training.corpus import Corpus
from training.recall import recall_case

HOT, WARM, EVICTED, DAMAGED, COLD = "hot", "warm: restarts", "evicted", "damaged files", "cold: computed anew"
WAYS = (HOT, WARM, EVICTED, DAMAGED, COLD)
_CONVERSATIONS, _TURNS = 200, 3
_LENGTHS = (100, 300)  # tokens: within and over a block
_DAMAGED_SHARE = 3  # one in n block files
_GREEDY = SamplingParams(max_tokens=16, temperature=0.0, logprobs=1)
_COLUMNS = {
    "way": "way",
    "turns": "turns",
    "different": "other words than hot",
    "logprob": "largest change of a logprob",
    "right": "right answers",
    "computed": "prompt tokens computed",
    "restored": "read from files",
    "quarantined": "files in quarantine",
}


@dataclass(frozen=True)
class Talk:
    """Messages with facts, then questions with right answers."""

    told: list[dict[str, str]]
    asked: list[tuple[str, str]]

    def prompt(self, turn: int, answers: Sequence[str]) -> list[dict[str, str]]:
        messages = list(self.told)
        for (question, _), said in zip(self.asked, [*answers[:turn], None], strict=False):
            messages.append({"role": "user", "content": question})
            if said is not None:
                messages.append({"role": "assistant", "content": said})
        return messages


@dataclass
class Held:
    turns: list[list[Completion]] = field(default_factory=list)
    quarantined: int = 0

    @property
    def all(self) -> list[Completion]:
        return [said for turn in self.turns for said in turn]


def write_talks(seed: int, count: int) -> list[Talk]:
    corpus = Corpus(DATA, seed)
    lengths = [_LENGTHS[index % len(_LENGTHS)] for index in range(count)]
    cases = [recall_case(corpus, length, index, questions=_TURNS) for index, length in enumerate(lengths)]
    return [Talk(list(case.dialogue.messages), [(each.text, each.answer) for each in case.questions]) for case in cases]


def measure_restore(plan: QualityPlan, progress: Progress) -> list[ResultTable]:
    talks = write_talks(plan.seed, plan.scaled(_CONVERSATIONS, least=4))
    held: dict[str, Held] = {}
    for way in WAYS:
        with tempfile.TemporaryDirectory(prefix="agentcache-quality-") as folder:
            held[way] = _hold(way, talks, held.get(HOT), plan, Path(folder))
        row = _row(way, held[way], held[HOT], talks)
        progress(f"{way:<20} {row['turns']} turns, {row['different']} with other words, {row['right']:.1%} right")
    lengths = " or ".join(map(str, _LENGTHS))
    notes = (
        f"{len(talks)} conversations of about {lengths} tokens, {_TURNS} turns each, greedy; histories are hot's.",
        f"Damaged: one bit of every {_DAMAGED_SHARE}rd block file is flipped before a turn, while nothing runs.",
        "Hot, warm and evicted read the same bytes; what was damaged and what is cold is computed in other steps.",
    )
    rows = [_row(way, each, held[HOT], talks) for way, each in held.items()]
    formats = {"logprob": ".2g", "right": ".1%", "computed": ",", "restored": ","}
    return [ResultTable("restore", "Restoring: the same words?", _COLUMNS, rows, formats, notes)]


def _hold(way: str, talks: Sequence[Talk], hot: Held | None, plan: QualityPlan, folder: Path) -> Held:
    held, random = Held(), Random(plan.seed)
    with _serving(plan, folder) as llm:
        held.turns.append(_turn(llm, way, talks, 0, hot or held))
        if way in (HOT, EVICTED, COLD):
            for turn in range(1, _TURNS):
                held.turns.append(_turn(llm, way, talks, turn, hot or held))
    for turn in range(len(held.turns), _TURNS):  # one process per turn
        if way == DAMAGED:
            _damage(folder, random)
        with _serving(plan, folder) as llm:
            held.turns.append(_turn(llm, way, talks, turn, hot or held))
    held.quarantined = sum(1 for file in (folder / "quarantine").rglob("*") if file.is_file())
    return held


@contextmanager
def _serving(plan: QualityPlan, folder: Path) -> Iterator[LLM]:
    with LLM(plan.model, cache_dir=folder) as llm:
        yield llm
        llm.check_integrity()


def _turn(llm: LLM, way: str, talks: Sequence[Talk], turn: int, history: Held) -> list[Completion]:
    said = []
    for index, talk in enumerate(talks):
        answers = [history.turns[before][index].text for before in range(turn)]
        agent, salt = f"talk-{index}", f"{index}-{turn}" if way == COLD else ""
        if way == EVICTED and turn:
            llm.evict(agent)
        said.append(llm.chat(talk.prompt(turn, answers), _GREEDY, agent=None if salt else agent, salt=salt))
    return said


def _damage(folder: Path, random: Random) -> None:
    for file in sorted((folder / "blocks").rglob("*.safetensors")):
        if random.randrange(_DAMAGED_SHARE) == 0:
            content = bytearray(file.read_bytes())
            content[random.randrange(len(content))] ^= 1 << random.randrange(8)
            file.write_bytes(content)


def _row(way: str, held: Held, hot: Held, talks: Sequence[Talk]) -> dict[str, Any]:
    pairs = list(zip(held.all, hot.all, strict=True))
    same = [(one, other) for one, other in pairs if one.token_ids == other.token_ids]
    right = [answer for turn in range(_TURNS) for answer in (talk.asked[turn][1] for talk in talks)]
    return {
        "way": way,
        "turns": len(pairs),
        "different": len(pairs) - len(same),
        "logprob": max((_largest_change(*pair) for pair in same), default=None),
        "right": sum(said.text.strip() == answer for said, answer in zip(held.all, right, strict=True)) / len(right),
        "computed": sum(said.report.computed_tokens for said in held.all),
        "restored": sum(said.report.restored_bytes for said in held.all),
        "quarantined": held.quarantined,
        "differences": [[one.text, other.text] for one, other in pairs if one.token_ids != other.token_ids][:20],
    }


def _largest_change(one: Completion, other: Completion) -> float:
    pairs = zip(one.logprobs, other.logprobs, strict=True)
    changes = [
        abs(mine.logprob - theirs.logprob)
        for mine, theirs in pairs
        if mine.logprob is not None and theirs.logprob is not None
    ]
    return max(changes, default=0.0)


def plot_restore(report: Report, path: Path) -> None:
    table = next(ResultTable.of(data) for data in report["tables"] if data["name"] == "restore")
    ways = [row["way"] for row in table.rows]
    figure = new_figure(9, 3.2)
    for axes, key, label in zip(
        figure.subplots(1, 2, sharey=True),
        ("different", "computed"),
        ("turns with other words than hot", "prompt tokens computed"),
        strict=True,
    ):
        bars = axes.barh(ways, [row[key] for row in table.rows], color="#0072B2")
        axes.bar_label(bars, fontsize=8, padding=2)
        axes.set_xlabel(label)
        axes.set_xlim(0, 1.2 * max(1, *(row[key] for row in table.rows)))
        axes.grid(True, axis="x", alpha=0.25)
        axes.set_axisbelow(True)
    axes.invert_yaxis()
    figure.suptitle(f"{table.rows[0]['turns']} turns, held in five ways", fontsize=10)
    figure.savefig(path)


PART = Part(measure_restore, {"restore": plot_restore})
