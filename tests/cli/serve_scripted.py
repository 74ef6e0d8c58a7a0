"""`python -m tests.cli.serve_scripted serve …`: the real command on a scripted engine, for signals and ports."""

from __future__ import annotations

import asyncio
import os

from agentcache.api.report import FinishReason, Update
from agentcache.api.request import Request
from agentcache.cli import connection
from agentcache.cli.main import main
from agentcache.errors import CacheFolderInUse, EngineStopped
from agentcache.settings.config import Config
from tests.server.fake_engine import REPORT, FakeEngine
from tests.throwing import PanicException


def slow(request: Request) -> list[Update | float | Exception]:
    end = Update(finish_reason=FinishReason.STOP, report=REPORT)
    return [Update("a", (1,), prompt_token_ids=(1,)), 1.0, Update("b", (2,)), end]


class Scripted(FakeEngine):
    async def close(self) -> None:
        print("engine closed", flush=True)

    async def start(self) -> None:
        await super().start()
        if os.environ.get("SCRIPTED_FAILURE") == "later":
            asyncio.get_running_loop().call_later(0.5, setattr, self, "failure", EngineStopped("the device is gone"))


def open_engine(config: Config, *, warm_up: bool) -> FakeEngine:
    assert warm_up
    error: dict[str, BaseException] = {
        "in-use": CacheFolderInUse("the cache folder is in use"),
        "crash": ValueError("bad weights"),
        "panic": PanicException("bad trie"),
    }
    return Scripted(script=slow, ready=False, start_error=error.get(os.environ.get("SCRIPTED_FAILURE", "")))


if __name__ == "__main__":
    connection.open_engine = open_engine
    main()
