"""The engine's interface for the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from agentcache.api.model import AdapterInfo, ModelInfo
from agentcache.api.report import Update
from agentcache.api.request import Request
from agentcache.api.start_progress import Measuring, Phase
from agentcache.settings.tables import AdapterFolder
from agentcache.system.memory import Level

if TYPE_CHECKING:
    from agentcache.gateway.operations import Operation  # imports mlx: slow

T = TypeVar("T")


class Engine(Protocol):
    """The engine, implemented by `AsyncEngine`. All methods raise errors of `agentcache.errors`."""

    @property
    def ready(self) -> bool: ...

    @property
    def starting(self) -> Phase | None:
        """Phase of the start; None outside one."""

    @property
    def measuring(self) -> Measuring | None:
        """Progress of choosing a precision; until then the engine serves in safe bits."""

    @property
    def failure(self) -> Exception | None: ...

    @property
    def memory_pressure(self) -> Level: ...

    @property
    def model(self) -> ModelInfo: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def generate(self, request: Request, take: Callable[[Update], None], /) -> None:
        """Pass each update to `take`. Cancelling this cancels the completion."""

    async def count_tokens(self, request: Request, /) -> int:
        """Count the prompt's tokens."""

    async def call(self, operation: Operation[T], /) -> T: ...

    async def load_adapter(self, folder: AdapterFolder, /) -> AdapterInfo: ...

    async def unload_adapter(self, name: str, /) -> None: ...
