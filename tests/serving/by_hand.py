"""The engine without its thread: a test makes every step, and looks at the state in between."""

from __future__ import annotations

import queue
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentcache.adapters.activation import AdapterUse
from agentcache.api.answer_form import AnswerForm
from agentcache.api.report import Report, Update
from agentcache.api.request import Request, TokenPrompt
from agentcache.api.sampling import SamplingParams
from agentcache.blocks.keys import KVOrigin
from agentcache.engine.engine import Engine
from agentcache.engine.open import open_engine
from agentcache.engine.output import Output
from agentcache.engine.running_request import RunningRequest, TurnOutput
from agentcache.gateway.prepare import choose_lineage, held_by, make_grammar, match, read_prompt
from agentcache.plans.submitted import SubmittedRequest
from agentcache.settings.config import Config
from agentcache.store.manifest import AgentRecord
from agentcache.store.verify import verify_folder
from agentcache.text.replies.stop_strings import StopSearch, stop_strings
from agentcache.text.work_limit import UNLIMITED
from tests.serving import inside
from tests.serving.conversation import DISK_BUDGET, RAM_BUDGET


@dataclass
class Receiver:
    """What one request's sender got."""

    generation: RunningRequest
    updates: list[Update | BaseException] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [token for update in self.updates if isinstance(update, Update) for token in update.token_ids]

    @property
    def report(self) -> Report:
        last = self.updates[-1]
        assert isinstance(last, Update) and last.report is not None
        return last.report

    @property
    def is_done(self) -> bool:
        last = self.updates[-1] if self.updates else None
        return isinstance(last, BaseException) or (last is not None and last.report is not None)


class ByHand:
    """An engine whose steps, and whose messages from other threads, happen when a test says so."""

    def __init__(self, engine: Engine, posted: queue.SimpleQueue[Callable[[], None]]) -> None:
        self.engine = engine
        self.posted = posted

    def submit(
        self,
        ids: Sequence[int],
        sampling: SamplingParams,
        agent: str | None = None,
        producer: KVOrigin | None = None,
        adapter: AdapterUse | None = None,
        form: AnswerForm | None = None,
        *,
        salt: str = "",
        found: AgentRecord | None = None,
    ) -> Receiver:
        """A request. `found` is the lineage that its prompt was matched with, if not the best one now."""
        engine, tokenizer = self.engine, inside.tokenizer(self.engine)
        request = Request(uuid.uuid4().hex, TokenPrompt(list(ids)), sampling, agent, form=form, salt=salt)
        prompt = read_prompt(request.prompt, None, tokenizer)
        found = found or choose_lineage(request, prompt, inside.agent_table(engine))
        matched = match(prompt, held_by(request, found), tokenizer)
        grammar = None if form is None else make_grammar(request, matched.transcript, tokenizer, UNLIMITED)
        search = StopSearch(stop_strings(sampling.stop), None) if sampling.stop else None
        receiver = Receiver(
            RunningRequest(
                SubmittedRequest(
                    request=request,
                    match=matched,
                    max_tokens=sampling.max_tokens or 0,
                    found=found,
                    goes_on=found is not None and prompt.goes_on_from(found.transcript),
                    adapter=adapter,
                ),
                TurnOutput(
                    Output(tokenizer.detokenizer(after=ids[-1]), search),
                    lambda update: receiver.updates.append(update),
                    None if grammar is None else grammar.follow(),
                ),
            )
        )
        engine.add(receiver.generation)
        if producer is not None and (plan := receiver.generation.plan) is not None:
            plan.origin = producer  # without an adapter that computes it
            plan._note_own()
        return receiver

    def step(self) -> None:
        while not self.posted.empty():
            self.run_posted(self.posted.get())
        if self.engine.has_work:
            self.engine.step()

    def run(self, *receivers: Receiver) -> None:
        """Step until these are done."""
        while not all(receiver.is_done for receiver in receivers):
            if self.engine.has_work:
                self.step()
            else:
                self.run_posted(self.posted.get(timeout=30))

    def run_posted(self, function: Callable[[], None]) -> None:
        """As the engine's thread does it."""
        try:
            function()
        except BaseException as error:
            self.engine.fail(list(self.engine.requests), error)

    def evict(self, agent: str) -> None:
        """Free the agent's RAM."""
        inside.evict_agent(self.engine, agent)
        self.finish_writing()

    def finish_writing(self) -> None:
        """Nothing is on its way to the disk any more, nor is anything to be deleted."""
        while self.engine.is_writing:
            self.posted.get(timeout=30)()
        inside.flush(self.engine)

    @property
    def live_blocks(self) -> int:
        return self.engine.stats().blocks_live


@contextmanager
def by_hand(model: Path, cache_dir: Path, *, warm: bool = False, **settings: Any) -> Iterator[ByHand]:
    """At the end nobody may hold a block, and all are accounted for."""
    values = {"ram_budget": RAM_BUDGET, "disk_budget": DISK_BUDGET} | settings
    posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    engine = open_engine(Config(cache_dir=cache_dir, **{"kv": "4t"} | values), str(model), posted.put, warm=warm)
    hand = ByHand(engine, posted)
    try:
        yield hand
        while engine.has_work:
            hand.step()
        engine.check_integrity()
        assert hand.live_blocks == 0
        hand.finish_writing()
    finally:
        engine.close()
        while not posted.empty():
            posted.get()()
    assert verify_folder(cache_dir).unnamed_blocks == 0
