"""A cache folder to damage or to move, and what its agent would have said next."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from agentcache.llm import Completion
from tests.serving.conversation import TokenTalk, cold_ids, open_llm

LENGTHS = (300, 530, 550, 580)


@dataclass(frozen=True)
class Saved:
    """An agent after two turns, what its next two say, and another model's agent with the same tokens."""

    model: Path
    cache_dir: Path
    talk: TokenTalk
    third: Completion
    fourth: Completion
    other_cache_dir: Path

    def copy(self, folder: Path) -> Path:
        return Path(shutil.copytree(self.cache_dir, folder))


def save_two_turns(model: Path, other: Path, folder: Path) -> Saved:
    """Two turns with `model` and with `other`, and two more with `model` on a copy."""
    talk, other_talk = TokenTalk(), TokenTalk()
    with open_llm(model, folder / "cache") as llm:
        talk.turn(llm, LENGTHS[0])
        talk.turn(llm, LENGTHS[1])
    with open_llm(other, folder / "other") as llm:
        other_talk.turn(llm, LENGTHS[0])
        other_talk.turn(llm, LENGTHS[1])
    with open_llm(model, Path(shutil.copytree(folder / "cache", folder / "hot"))) as llm:
        going_on = talk.fork("alice")
        third, fourth = going_on.turn(llm, LENGTHS[2]), going_on.turn(llm, LENGTHS[3])
        assert third.report.cache_state == "warm"
        assert cold_ids(llm, third.prompt_token_ids, 3) == third.token_ids
    return Saved(model, folder / "cache", talk, third, fourth, folder / "other")


def check_answer(saved: Saved, cache_dir: Path, *, quarantined: bool) -> Completion:
    """The third turn says what it should; and after a restart, the fourth is warm again with nothing wrong."""
    talk = saved.talk.fork("alice")
    with open_llm(saved.model, cache_dir) as llm:
        third = talk.turn(llm, LENGTHS[2])
        assert third.token_ids == saved.third.token_ids
        assert third.report.saved
        assert (llm.stats().quarantined > 0) == quarantined
        assert bool(list((cache_dir / "quarantine").iterdir())) == quarantined
    with open_llm(saved.model, cache_dir) as llm:
        fourth = talk.turn(llm, LENGTHS[3])
        assert fourth.token_ids == saved.fourth.token_ids
        assert fourth.report.cache_state == "warm"
        assert fourth.report.computed_tokens < 60
        assert llm.stats().quarantined == 0
    return third
