from __future__ import annotations

from agentcache.engine.engine import Engine
from agentcache.engine.messages import (
    Cancel,
    CheckIntegrity,
    ClearCache,
    CreateAgent,
    DeleteAgent,
    DropAdapter,
    EvictAgent,
    ForkAgent,
    ImportAgent,
    ListAgents,
    LookAgain,
    MeasurePrecision,
    Message,
    PutAdapter,
    ReadStats,
    RelieveMemory,
    Reply,
    RestoreAgent,
    SaveAgent,
    ShowAgent,
    Submit,
    UseResponses,
)
from agentcache.engine.output import Output
from agentcache.engine.running_request import RunningRequest
from agentcache.errors import AgentCacheError, BrokenInvariant, EngineStopped
from agentcache.models.adapters import AdapterContent
from agentcache.ranks.lost import lost_rank
from agentcache.report import PROMPT_END, StepDown
from agentcache.request import ChatPrompt
from agentcache.system.threads import as_exception
from agentcache.text.replies.stop_search import StopSearch
from agentcache.text.tokenizer import Tokenizer


def dispatch(engine: Engine, message: Message, reply: Reply) -> None:
    """Handle a message on the engine thread. `reply` gets the result or an error, now or later."""
    try:
        _dispatch(engine, message, reply)
    except BaseException as error:
        lost = lost_rank(error)
        reply(lost or as_exception(error))
        if lost or not isinstance(error, AgentCacheError) or isinstance(error, (BrokenInvariant, EngineStopped)):
            engine.fail((), error)


def _dispatch(engine: Engine, message: Message, reply: Reply) -> None:
    agents = engine.operations
    match message:
        case Submit():
            engine.add(_generation(message, engine.served.tokenizer, reply))
        case Cancel(submitted):
            generation = next((each for each in engine.requests if each.submitted is submitted), None)
            if generation is not None:
                engine.cancel(generation)
            reply(None)
        case UseResponses(work):
            engine.persistence.use_responses(work, reply)
        case ListAgents():
            reply(agents.list())
        case ShowAgent(agent_id):
            reply(agents.info(agent_id))
        case LookAgain(agent_id):
            agents.look_again(agent_id, reply)
        case CreateAgent(agent_id, adapter, policy, system):
            agents.create(agent_id, adapter, policy, system, reply)
        case ImportAgent(archive):
            agents.bring_in(archive, reply)
        case ForkAgent(agent_id, new_id, lineage, adapter, policy):
            agents.fork(agent_id, new_id, reply, lineage, adapter, policy)
        case DeleteAgent(agent_id, lineage):
            agents.delete(agent_id, reply, lineage)
        case SaveAgent(agent_id, lineage):
            agents.save(agent_id, reply, lineage)
        case RestoreAgent(agent_id, lineage):
            agents.restore(agent_id, reply, lineage)
        case EvictAgent(agent_id, lineage, kind):
            engine.eviction.evict(agent_id, reply, lineage, kind)
        case PutAdapter(content):
            is_there = engine.adapters.load(content)
            if isinstance(content, AdapterContent):
                engine.residuals.open_for(content.adapter)
            reply(is_there)
        case DropAdapter(digest):
            engine.adapters.drop(digest)
            engine.residuals.close_for(digest)
            reply(None)
        case RelieveMemory(level):
            engine.relieve(level)
            reply(None)
        case MeasurePrecision():
            reply(engine.measure_precision())
        case ReadStats():
            reply(engine.stats())
        case ClearCache():
            engine.clear()
            reply(None)
        case CheckIntegrity():
            engine.check_integrity()
            reply(None)


def _stop_search(submitted: Submit) -> StopSearch | None:
    if not submitted.stops:
        return None
    reading = submitted.request.reading
    if reading.is_plain:
        return StopSearch(submitted.stops, None)
    reader = reading.open()
    reader.begin(submitted.match.transcript.text[-PROMPT_END:])
    return StopSearch(submitted.stops, reader)


def _generation(submitted: Submit, tokenizer: Tokenizer, emit: Reply) -> RunningRequest:
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
