from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from agentcache.adapters.table import AdapterTable, ServedAdapter, check_adapter_name, resolve_policy
from agentcache.api.model import AdapterInfo
from agentcache.api.policy import RESIDUAL_IS_OFF, Policy
from agentcache.engine.messages import DropAdapter, PutAdapter
from agentcache.errors import (
    AgentCacheError,
    InvalidRequest,
    OutOfBlocks,
    Overloaded,
    UnreadableAdapter,
    UnsupportedAdapter,
    UnsupportedPolicy,
)
from agentcache.gateway.engine_thread import EngineThread
from agentcache.gateway.prompt_workers import Workers
from agentcache.models.adapter_files import MAX_BYTES, MAX_HEADER_BYTES
from agentcache.models.adapters import AdapterContent, producer_groups, read_adapter, read_again
from agentcache.models.decoder import Decoder, is_decoder_folder, read_decoder, read_decoder_again
from agentcache.settings.tables import AdapterFolder

if TYPE_CHECKING:
    from agentcache.adapters.table import AdapterSource

T = TypeVar("T")
P = ParamSpec("P")
Content = AdapterContent | Decoder

# A waiting request is next after this many later ones.
_MOST_TIMES_PASSED_OVER = 16


@dataclass(eq=False)
class _Wait:
    """`passed_over`: later requests for other weights."""

    digest: str
    passed_over: int = 0


class AdapterLoader:
    """Keeps the weights of adapters in use on the device. Belongs to one event loop."""

    def __init__(self, thread: EngineThread, memo: Path) -> None:
        self._thread = thread
        self._memo = memo
        self._model = thread.view.model
        self._table = AdapterTable(self._model.adapter_budget)
        # The 16-bit matrices of a larger file would not fit. Reading takes several times a file's size.
        self._max_bytes = min(MAX_BYTES, 2 * self._model.adapter_budget + MAX_HEADER_BYTES)
        self._reader = Workers(1, name="agentcache-adapters")
        self._loading = asyncio.Lock()
        self._released = asyncio.Event()
        self._waits: list[_Wait] = []  # in order of arrival

    async def close(self, error: AgentCacheError) -> None:
        await self._reader.close(error)

    def list(self) -> tuple[AdapterInfo, ...]:
        return tuple(self._table.info(adapter) for adapter in self._table)

    def get(self, name: str) -> ServedAdapter:
        """The served adapter. Raises NotFound."""
        return self._table.get(name)

    async def load(self, folder: AdapterFolder) -> AdapterInfo:
        """Serve an adapter folder, replacing one of its name. Raises InvalidRequest, UnsupportedAdapter."""
        name = check_adapter_name(folder.name)
        try:
            async with self._loading:
                content = await self._read(_path(folder))
                adapter = self._serve(name, folder, _source(content))
                if self._make_room(adapter.source):
                    with suppress(OutOfBlocks):
                        await self._put(content)
                self._table.put(adapter)
        finally:
            self._drop_orphans()
        return self._table.info(adapter)

    async def _read(self, path: Path) -> Content:
        try:
            if is_decoder_folder(path):
                return await self._in_background(read_decoder, path, self._model.path, self._memo)
            return await self._in_background(read_adapter, path, self._model.modules, self._max_bytes)
        except UnsupportedAdapter as error:
            raise type(error)(error.message, param="path") from None
        except OSError as error:
            raise UnreadableAdapter(f"the folder cannot be read: {error!s:.200}", param="path") from None

    def _serve(self, name: str, folder: AdapterFolder, source: AdapterSource) -> ServedAdapter:
        unknown = max(source.invocation_tokens or (0,))
        if unknown >= self._model.tokenizer.vocab_size:
            raise UnsupportedAdapter(f"it is invoked by token {unknown}, which the model does not have", param="path")
        if source.nbytes > self._table.budget:
            raise InvalidRequest(
                f"the adapter takes {source.nbytes} bytes; of the RAM budget, adapters may take {self._table.budget}",
                param="path",
                code="insufficient_memory",
            )
        if self._model.spec.recurrent and isinstance(source, Decoder):
            message = f"decoders do not go with {self._model.spec.model_type}, whose layers keep recurrent state"
            raise UnsupportedAdapter(f"{message}: they are trained to read base's keys and values", param="path")
        if self._model.ranks > 1 and isinstance(source, Decoder):
            raise UnsupportedAdapter("decoders are not spread over ranks", param="path")
        refusal = self._residual_refusal(source)
        policy = resolve_policy(folder.policy, source, refusal)
        groups = range(len(self._model.spec.groups))
        changed = groups if isinstance(source, Decoder) else producer_groups(source, self._model.spec)
        may_share = folder.policy is Policy.AUTO and not refusal
        return ServedAdapter(name, source, policy, frozenset(changed), refusal, may_share)

    def _residual_refusal(self, source: AdapterSource) -> str:
        if self._model.check_lossy is None or isinstance(source, Decoder):
            return RESIDUAL_IS_OFF
        try:
            self._model.check_lossy(source)
        except UnsupportedPolicy as error:
            return error.message
        return ""

    def unload(self, name: str) -> None:
        """Refuse new requests; the weights go after the last running one. Raises NotFound."""
        self._table.remove(name)
        self._drop_orphans()

    @asynccontextmanager
    async def lease(self, name: str | None) -> AsyncIterator[ServedAdapter | None]:
        """Keep an adapter's weights on the device inside the block. None for base.

        Raises NotFound, UnsupportedAdapter (dropped weights whose folder is gone or changed), Overloaded (RAM budget).
        """
        if name is None:
            yield None
            return
        adapter = self._table.get(name)
        self._table.claim(adapter)
        try:
            await self._ensure(adapter)
            yield self._table.with_family(adapter)
        finally:
            self._table.release(adapter)
            self._drop_orphans()
            self._tell_released()

    async def _ensure(self, adapter: ServedAdapter) -> None:
        wait = _Wait(adapter.digest)
        self._waits.append(wait)
        try:
            while not await self._is_there(adapter, wait):
                continue
            for other in self._waits[: self._waits.index(wait)]:
                other.passed_over += other.digest != wait.digest
        finally:
            self._waits.remove(wait)
            if wait.passed_over >= _MOST_TIMES_PASSED_OVER:
                self._tell_released()  # wake the requests that it blocked

    async def _is_there(self, adapter: ServedAdapter, wait: _Wait) -> bool:
        """If false, try again: the state has changed."""
        released = self._released
        if self._is_kept_back(wait):
            self._table.release(adapter)  # its weights may have to make room
            try:
                await released.wait()
            finally:
                self._table.claim(adapter)
            return False
        if self._table.is_resident(adapter.digest):
            return True
        async with self._loading:
            if self._is_kept_back(wait):
                return False
            if self._make_room(adapter.source):
                if not self._table.is_resident(adapter.digest):
                    try:
                        await self._put(await self._content_again(adapter.source))
                    except OutOfBlocks as error:
                        raise Overloaded(str(error), code="insufficient_memory") from error
                return True
        await released.wait()  # adapters in use leave no room
        return False

    def _is_kept_back(self, wait: _Wait) -> bool:
        overdue = (other for other in self._waits if other.passed_over >= _MOST_TIMES_PASSED_OVER)
        first = next(overdue, None)
        return first is not None and first.digest != wait.digest

    async def _content_again(self, source: AdapterSource) -> Content:
        if isinstance(source, Decoder):
            return await self._in_background(read_decoder_again, source, self._model.path, self._memo)
        return await self._in_background(read_again, source, self._model.modules, self._max_bytes)

    def _tell_released(self) -> None:
        self._released.set()
        self._released = asyncio.Event()

    def _make_room(self, source: AdapterSource) -> bool:
        if self._table.is_resident(source.digest):
            return True
        victims = self._table.victims(source.nbytes)
        for digest in victims or ():
            self._drop(digest)
        return victims is not None

    async def _put(self, content: Content) -> None:
        # To its end, even if the caller is cancelled: table and device must agree.
        put = asyncio.ensure_future(self._put_to_the_end(content))
        try:
            await asyncio.shield(put)
        finally:
            await asyncio.wait({put})

    async def _put_to_the_end(self, content: Content) -> None:
        while not await self._thread.ask(PutAdapter(content)):
            continue  # the engine computes steps between the pieces of a decoder
        self._table.set_resident(_source(content).digest, _source(content).nbytes)

    def _drop_orphans(self) -> None:
        for digest in self._table.orphans():
            self._drop(digest)

    def _drop(self, digest: str) -> None:
        self._table.set_dropped(digest)
        self._thread.tell(DropAdapter(digest))

    async def _in_background(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._reader.run(0, lambda has_ended: function(*args, **kwargs))


def _path(folder: AdapterFolder) -> Path:
    try:
        return Path(folder.path).expanduser().absolute()
    except RuntimeError as error:  # ~user without a home
        raise UnsupportedAdapter(f"{folder.path}: {error}", param="path") from None


def _source(content: Content) -> AdapterSource:
    return content if isinstance(content, Decoder) else content.adapter
