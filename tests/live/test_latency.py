"""The server answers at once while the engine is busy."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from agentcache.server_process import ServerProcess
from tests.conftest import ModelFolder
from tests.live.servers import complete, http_of, make_ids, serving
from tests.rounds import check_bound, in_rounds

LIMIT = 0.100  # seconds
NUM_TOKENS = 2304
SEEDS = itertools.count(10)  # a prompt that is not cached, and a new agent, in each round


@pytest.fixture(scope="module")
def server(model_folder: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A model with much cache for its size: about 4.6 kB a token."""
    wide = model_folder("llama", num_attention_heads=8, num_key_value_heads=8, head_dim=128, hidden_size=64)
    with serving(wide, tmp_path_factory.mktemp("latency") / "cache") as server:
        complete(server, make_ids(300, seed=9), 2)
        yield server


def latencies_while(work: Callable[[], object], http: httpx.Client, path: str, pause: float) -> list[float]:
    """Seconds that each GET of `path` took while `work` was under way."""
    working = threading.Thread(target=work)
    working.start()
    seconds = []
    while working.is_alive():
        beginning = time.perf_counter()
        assert http.get(path).status_code == 200
        seconds.append(time.perf_counter() - beginning)
        time.sleep(pause)
    working.join()
    return seconds


def p95(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=20)[-1]


def described(seconds: list[float]) -> str:
    return f"p95 {p95(seconds) * 1e3:.1f} ms, max {max(seconds) * 1e3:.1f} ms of {len(seconds)};"


@pytest.mark.slow
@in_rounds
def test_health_is_quick_during_a_prefill_and_a_save(server: ServerProcess) -> None:
    seed = next(SEEDS)
    prompt, agent = make_ids(NUM_TOKENS, seed=seed), f"agent-{seed}"
    with http_of(server) as http:
        during_prefill = latencies_while(lambda: complete(server, prompt, 1), http, "/health", 0.005)
        # The blocks are in RAM, and nobody's: to make them an agent's is to write them all at once.
        saved: list[dict[str, object]] = []
        save = lambda: saved.append(complete(server, prompt, 1, agent=agent)["agentcache"])  # noqa: E731
        during_save = latencies_while(save, http, "/health", 0.0)
    assert saved[0]["computed_tokens"] == 1 and saved[0]["saved"] is True
    assert int(str(saved[0]["written_bytes"])) > 10e6
    figures = f"{described(during_prefill)} {described(during_save)}"
    check_bound(len(during_prefill) > 100, figures)
    check_bound(p95(during_prefill) < LIMIT and p95(during_save) < LIMIT, figures)
