"""Messages to the engine, with what each does there.

The gateway sends them to the engine thread, which calls `dispatch`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from agentcache.adapters.activation import AdapterUse
from agentcache.api.report import PROMPT_END, StepDown, Update
from agentcache.api.request import ChatPrompt, Request
from agentcache.api.start_progress import Measuring
from agentcache.blocks.prefix_match import PromptMatch
from agentcache.blocks.transcript import TranscriptContent
from agentcache.engine.output import Output
from agentcache.engine.running_request import RunningRequest
from agentcache.errors import AgentCacheError, BrokenInvariant, EngineStopped
from agentcache.models.adapters import AdapterContent
from agentcache.models.decoder import Decoder
from agentcache.ranks.lost import lost_rank
from agentcache.store.manifest import AgentRecord
from agentcache.system.memory import Level
from agentcache.system.threads import as_exception
from agentcache.text.grammars.compiler import Grammar
from agentcache.text.replies.reader import read_as
from agentcache.text.replies.stop_strings import NO_STOPS, StopSearch, StopStrings
from agentcache.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from agentcache.engine.engine import Engine

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Reply = Callable[[T | BaseException], None]


class Message(ABC, Generic[T_co]):
    """A message; a reply is of type T_co or an error. Created on the event loop, handled on the engine thread."""

    @abstractmethod
    def handle(self, engine: Engine, reply: Reply[T_co]) -> None:
        """Do it, and reply now or later. An error that is raised is the reply."""


def dispatch(engine: Engine, message: Message[T], reply: Reply[T]) -> None:
    """Handle a message on the engine thread. `reply` gets the result or an error, now or later."""
    try:
        message.handle(engine, reply)
    except BaseException as error:
        lost = lost_rank(error)
        reply(lost or as_exception(error))
        if lost or not isinstance(error, AgentCacheError) or isinstance(error, (BrokenInvariant, EngineStopped)):
            engine.fail((), error)


@dataclass(frozen=True, eq=False)
class Submit(Message[Update]):
    """A tokenized request. The last reply has a report.

    Args:
        match: prompt tokens, and their relation to `found`.
        found: matched lineage; None for a new one.
        held: transcript content of `found`, kept in RAM until the request ends.
        goes_on: whether the turn replaces `found`, which it extends or equals (`is_twin`).
        submitted_at: time by `time.perf_counter`.
        system_tokens: tokens of the system prompt and tools, as far as known.
        repeated_tokens: prompt tokens that the next prompt repeats, if it does not repeat the reply; else 0. For models
            with recurrent layers.
    """

    request: Request
    match: PromptMatch
    max_tokens: int
    submitted_at: float
    found: AgentRecord | None = None
    held: TranscriptContent | None = None
    goes_on: bool = False
    adapter: AdapterUse | None = None
    system_tokens: int = 0
    repeated_tokens: int = 0
    grammar: Grammar | None = None
    stops: StopStrings = NO_STOPS

    def handle(self, engine: Engine, reply: Reply[Update]) -> None:
        engine.add(_running_request(self, engine.served.tokenizer, reply))


@dataclass(frozen=True)
class Cancel(Message[None]):
    """Cancel a request, which gets its own error."""

    submitted: Submit

    def handle(self, engine: Engine, reply: Reply[None]) -> None:
        request = next((each for each in engine.requests if each.submitted is self.submitted), None)
        if request is not None:
            engine.cancel(request)
        reply(None)


@dataclass(frozen=True)
class MeasurePrecision(Message[Measuring]):
    """Compute one forward pass of the precision search."""

    def handle(self, engine: Engine, reply: Reply[Measuring]) -> None:
        reply(engine.measure_precision())


@dataclass(frozen=True)
class LookAgain(Message[None]):
    """Check whether an unavailable agent is readable."""

    agent_id: str

    def handle(self, engine: Engine, reply: Reply[None]) -> None:
        engine.operations.look_again(self.agent_id, reply)


@dataclass(frozen=True)
class PutAdapter(Message[bool]):
    """Load an adapter, or a decoder's next piece; the reply says whether it is complete."""

    content: AdapterContent | Decoder

    def handle(self, engine: Engine, reply: Reply[bool]) -> None:
        is_complete = engine.adapters.load(self.content)
        if isinstance(self.content, AdapterContent):
            engine.residuals.open_for(self.content.adapter)
        reply(is_complete)


@dataclass(frozen=True)
class DropAdapter(Message[None]):
    """Drop unused weights."""

    digest: str

    def handle(self, engine: Engine, reply: Reply[None]) -> None:
        engine.adapters.drop(self.digest)
        engine.residuals.close_for(self.digest)
        reply(None)


@dataclass(frozen=True)
class RelieveMemory(Message[None]):
    """Report memory pressure, on change and while it lasts."""

    level: Level

    def handle(self, engine: Engine, reply: Reply[None]) -> None:
        engine.relieve(self.level)
        reply(None)


def _stop_search(submitted: Submit) -> StopSearch | None:
    if not submitted.stops:
        return None
    reading = submitted.request.reading
    if reading.is_plain:
        return StopSearch(submitted.stops, None)
    reader = read_as(reading)
    reader.begin(submitted.match.transcript.text[-PROMPT_END:])
    return StopSearch(submitted.stops, reader)


def _running_request(submitted: Submit, tokenizer: Tokenizer, emit: Reply[Update]) -> RunningRequest:
    use, sampling = submitted.adapter, submitted.request.sampling
    detokenizer = tokenizer.detokenizer(after=submitted.match.transcript.ids[-1])
    return RunningRequest(
        request=submitted.request,
        match=submitted.match,
        max_tokens=submitted.max_tokens,
        output=Output(
            detokenizer,
            _stop_search(submitted),
            tokenizer.markers if isinstance(submitted.request.prompt, ChatPrompt) else {},
            sampling.min_tokens,
        ),
        emit=emit,
        submitted=submitted,
        submitted_at=submitted.submitted_at,
        found=submitted.found,
        system_tokens=submitted.system_tokens,
        repeated_tokens=submitted.repeated_tokens,
        goes_on=submitted.goes_on,
        following=None if submitted.grammar is None else submitted.grammar.follow(),
        adapter=use,
        producer=None if use is None else use.producer,
        stepped_down=StepDown.FAMILY if use is not None and use.stepped_from else None,
    )
