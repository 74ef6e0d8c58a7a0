"""The offline interface: the engine without a server.

with LLM("path/to/model") as llm:
    print(llm.chat([{"role": "user", "content": "Hi"}], agent="alice").text)
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

import mlx.core as mx

from agentcache.api.answer_form import AnswerForm
from agentcache.api.model import AdapterInfo, ModelInfo
from agentcache.api.policy import Policy, parse_policy
from agentcache.api.report import AgentInfo, FinishReason, Report, RestoreReport, TokenLogprob, Update
from agentcache.api.request import ChatPrompt, Prompt, Reading, Request, TextPrompt, TokenPrompt
from agentcache.api.sampling import SamplingParams
from agentcache.api.stats import CacheStats
from agentcache.gateway.async_engine import AsyncEngine
from agentcache.gateway.operations import (
    CheckIntegrity,
    DeleteAgent,
    EvictAgent,
    ForkAgent,
    ImportAgent,
    ListAgents,
    Operation,
    ReadStats,
    RestoreAgent,
    ShowAgent,
)
from agentcache.settings.config import Config
from agentcache.settings.sources import load_config
from agentcache.settings.tables import AdapterFolder
from agentcache.text.replies.dialects import calling_format
from agentcache.text.replies.events import Block, Event, blocks_of
from agentcache.text.replies.reader import read_as

T = TypeVar("T")

__all__ = ["LLM", "Completion", "SamplingParams"]


@dataclass(frozen=True)
class Completion:
    """A finished completion. `blocks`: a chat's reply as thoughts, text and calls, in order."""

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason
    report: Report
    blocks: tuple[Block, ...] = ()


class RequestOptions(TypedDict, total=False):
    """Options of `LLM.chat` and `LLM.generate`, as in `agentcache.api.request.Request`."""

    agent: str | None
    lineage: str | None
    salt: str
    adapter: str | None
    policy: Policy | str | None
    invocation_optional: bool
    form: AnswerForm | None


class LLM:
    """A model with durable agents, for scripts.

    Args:
        model: folder or hub id; None for the embedded model.
        adapters: by name, as `PATH` or `PATH:POLICY`.
        settings: other settings of `agentcache.settings.config.Config`, such as `ram_budget="8GB"`.

        Raises UnsupportedModel, CacheFolderInUse, ConfigError.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        cache_dir: str | Path | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        **settings: Any,
    ) -> None:
        own = {"model": None if model is None else str(model), "cache_dir": cache_dir, "adapters": adapters}
        self._start(load_config({**own, **settings}))

    @classmethod
    def from_config(cls, config: Config) -> LLM:
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    def _start(self, config: Config) -> None:
        self._engine = AsyncEngine(config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="agentcache-llm", daemon=True)
        self._thread.start()
        try:
            self._wait(self._engine.start())
        except BaseException:
            self._stop_loop()
            raise

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Finish pending writes; release the cache folder and the model's memory."""
        if self._loop.is_closed():
            return
        self._wait(self._engine.close())
        self._stop_loop()
        gc.collect()  # the model is in reference cycles
        mx.clear_cache()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _call(self, operation: Operation[T]) -> T:
        return self._wait(self._engine.call(operation))

    @property
    def model(self) -> ModelInfo:
        async def describe() -> ModelInfo:
            return self._engine.model

        return self._wait(describe())

    def generate(
        self,
        prompt: str | list[int],
        sampling: SamplingParams | None = None,
        *,
        invocation_start: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion:
        """Continue raw text or token ids. Raises RequestError, TypeError (unknown option)."""
        wrapped = TextPrompt(prompt) if isinstance(prompt, str) else TokenPrompt(list(prompt))
        return self._complete(wrapped, sampling, invocation_start, options)

    def chat(
        self,
        messages: list[dict[str, Any]],
        sampling: SamplingParams | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion:
        """Answer messages through the chat template; otherwise like `generate`."""
        prompt = ChatPrompt(messages, tools, dict(chat_template_kwargs or {}))
        return self._complete(prompt, sampling, None, options)

    def _complete(
        self, prompt: Prompt, sampling: SamplingParams | None, invocation_start: int | None, options: RequestOptions
    ) -> Completion:
        for name in options.keys() - RequestOptions.__annotations__.keys():
            raise TypeError(f"there is no option {name!r}; there are {', '.join(RequestOptions.__annotations__)}")
        as_asked: dict[str, Any] = {**options, "policy": _policy(options.get("policy"))}
        sampling = sampling or SamplingParams(max_tokens=512, **self.model.sampling.known)
        reading = self._reading(prompt, options.get("form")) if isinstance(prompt, ChatPrompt) else Reading()
        request = Request(
            uuid.uuid4().hex, prompt, sampling, invocation_start=invocation_start, reading=reading, **as_asked
        )
        return self._wait(self._collect(request))

    def _reading(self, prompt: ChatPrompt, form: AnswerForm | None) -> Reading:
        calls = bool(prompt.tools) or (form is not None and form.must_call)
        known = self._engine.model.reply_format
        return Reading(calling_format(known) if calls else known, prompt.tools or None, thoughts=True)

    def token_times(self, request: Request) -> list[float]:
        """Run a request and return each token's arrival (`time.perf_counter`)."""
        times: list[float] = []

        def take(update: Update) -> None:
            if update.token_ids:
                times.append(time.perf_counter())

        self._wait(self._engine.generate(request, take))
        return times

    async def _collect(self, request: Request) -> Completion:
        updates: list[Update] = []
        await self._engine.generate(request, updates.append)
        last, first = updates[-1], next(u for u in updates if u.prompt_token_ids is not None)
        assert last.finish_reason is not None and last.report is not None and first.prompt_token_ids is not None
        return Completion(
            text="".join(update.text for update in updates),
            token_ids=tuple(token for update in updates for token in update.token_ids),
            prompt_token_ids=first.prompt_token_ids,
            logprobs=tuple(logprob for update in updates for logprob in update.logprobs),
            prompt_logprobs=first.prompt_logprobs,
            finish_reason=last.finish_reason,
            report=last.report,
            blocks=self._read(request, updates),
        )

    def _read(self, request: Request, updates: Sequence[Update]) -> tuple[Block, ...]:
        if not isinstance(request.prompt, ChatPrompt):
            return ()
        reader = read_as(request.reading, whole=True)
        events: list[Event] = []
        for update in updates:
            if update.prompt_end is not None:
                reader.begin(update.prompt_end)
            events += reader.add(update.text, update.markers)
        is_cut_off = updates[-1].finish_reason is FinishReason.LENGTH
        return tuple(blocks_of([*events, *reader.finish(cut_off=is_cut_off)]))

    def adapters(self) -> tuple[AdapterInfo, ...]:
        """All adapters, by name."""
        return self.model.adapters

    def load_adapter(self, name: str, path: str | Path, policy: Policy | str = Policy.AUTO) -> AdapterInfo:
        """Load an adapter, replacing one of that name. Raises RequestError."""
        folder = AdapterFolder(name, str(path), parse_policy(policy))
        return self._wait(self._engine.load_adapter(folder))

    def unload_adapter(self, name: str) -> None:
        """Refuse new requests for an adapter. Raises NotFound."""
        self._wait(self._engine.unload_adapter(name))

    def agents(self) -> list[AgentInfo]:
        """All agents, by id."""
        return self._call(ListAgents())

    def agent(self, agent_id: str) -> AgentInfo:
        """One agent. Raises NotFound."""
        return self._call(ShowAgent(agent_id))

    def fork(
        self,
        agent_id: str,
        new_id: str,
        lineage: str | None = None,
        *,
        adapter: str | None = None,
        policy: Policy | str | None = None,
    ) -> AgentInfo:
        """Copy an agent, or one lineage; None keeps a setting. Raises NotFound, InvalidRequest, Conflict."""
        return self._call(ForkAgent(agent_id, new_id, lineage, adapter, _policy(policy)))

    def import_agent(self, agent_id: str, path: str | Path) -> AgentInfo:
        """Create an agent from a file of `agentcache export`. Raises ArchiveRejected, Conflict, StoreError."""
        return self._call(ImportAgent(agent_id, str(path)))

    def delete(self, agent_id: str, lineage: str | None = None) -> None:
        """Delete an agent, or a lineage. Raises NotFound."""
        self._call(DeleteAgent(agent_id, lineage))

    def restore(self, agent_id: str, lineage: str | None = None) -> RestoreReport:
        """Load an agent, or a lineage, from disk into RAM."""
        return self._call(RestoreAgent(agent_id, lineage))

    def evict(self, agent_id: str, lineage: str | None = None, kind: str | None = None) -> AgentInfo:
        """Free an agent's or a lineage's RAM, of one `kind` (`base`, `residual`) or all. Files stay."""
        return self._call(EvictAgent(agent_id, lineage, kind))

    def stats(self) -> CacheStats:
        return self._call(ReadStats())

    def check_integrity(self) -> None:
        """Raise BrokenInvariant unless every block is accounted for."""
        self._call(CheckIntegrity())


def _policy(policy: Policy | str | None) -> Policy | None:
    return None if policy is None else parse_policy(policy)
