"""Messages to the engine thread, with what each does there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from agentcache.adapters.weights import Content
from agentcache.api.report import PROMPT_END, Update
from agentcache.api.start_progress import Measuring
from agentcache.engine.output import Output
from agentcache.engine.running_request import RunningRequest, TurnOutput
from agentcache.errors import AgentCacheError, BrokenInvariant, EngineStopped
from agentcache.plans.submitted import SubmittedRequest
from agentcache.ranks.lost import lost_rank
from agentcache.system.memory import Level
from agentcache.system.threads import as_exception
from agentcache.text.replies.reader import read_as
from agentcache.text.replies.stop_strings import StopSearch
from agentcache.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from agentcache.engine.engine import Engine

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Reply = Callable[[T | BaseException], None]


class Message(ABC, Generic[T_co]):
    """A message from the event loop, with replies of type T_co or errors."""

    @abstractmethod
    def handle(self, engine: Engine, reply: Reply[T_co]) -> None:
        """Reply now or later; a raised error is the reply."""


def dispatch(engine: Engine, message: Message[T], reply: Reply[T]) -> None:
    try:
        message.handle(engine, reply)
    except BaseException as error:
        lost = lost_rank(error)
        reply(lost or as_exception(error))
        if lost or not isinstance(error, AgentCacheError) or isinstance(error, (BrokenInvariant, EngineStopped)):
            engine.fail((), error)


class Submit(SubmittedRequest, Message[Update]):
    def handle(self, engine: Engine, reply: Reply[Update]) -> None:
        engine.add(_running_request(self, engine.served.tokenizer, reply))


@dataclass(frozen=True)
class Cancel(Message[None]):
    """The request gets an error of its own."""

    submitted: Submit

    def handle(self, engine: Engine, reply: Reply[None]) -> None:
        request = next((each for each in engine.requests if each.submitted is self.submitted), None)
        if request is not None:
            engine.cancel(request)
        reply(None)


@dataclass(frozen=True)
class MeasurePrecision(Message[Measuring]):
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
    """Load an adapter, or its next piece; the reply says whether it is complete."""

    content: Content

    def handle(self, engine: Engine, reply: Reply[bool]) -> None:
        reply(engine.planner.load(self.content))


@dataclass(frozen=True)
class DropAdapter(Message[None]):
    digest: str

    def handle(self, engine: Engine, reply: Reply[None]) -> None:
        engine.planner.drop(self.digest)
        reply(None)


@dataclass(frozen=True)
class RelieveMemory(Message[None]):
    level: Level

    def handle(self, engine: Engine, reply: Reply[None]) -> None:
        engine.relieve(self.level)
        reply(None)


def _stop_search(submitted: SubmittedRequest) -> StopSearch | None:
    if not submitted.stops:
        return None
    reading = submitted.request.reading
    if reading.is_plain:
        return StopSearch(submitted.stops, None)
    reader = read_as(reading)
    reader.begin(submitted.match.transcript.text[-PROMPT_END:])
    return StopSearch(submitted.stops, reader)


def _running_request(submitted: SubmittedRequest, tokenizer: Tokenizer, emit: Reply[Update]) -> RunningRequest:
    detokenizer = tokenizer.detokenizer(after=submitted.match.transcript.ids[-1])
    markers = tokenizer.markers if submitted.is_chat else {}
    text = Output(detokenizer, _stop_search(submitted), markers, submitted.request.sampling.min_tokens)
    matcher = None if submitted.grammar is None else submitted.grammar.follow()
    return RunningRequest(submitted, TurnOutput(text, emit, matcher))
