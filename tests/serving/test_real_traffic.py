"""The engine shares time as its simulation does: what `test_traffic.py` shows of the one is true of the other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from agentcache.engine.token_budget import TokenBudget
from tests.conftest import ModelFolder
from tests.marks import slow
from tests.serving import inside
from tests.serving.by_hand import ByHand, Receiver, by_hand
from tests.serving.conversation import greedy, make_ids
from tests.serving.simulation import MAX_STALL, Client, Costs, Simulation

CHUNK, DECODE_SHARE, COSTS = 64, 0.7, Costs()


@dataclass(frozen=True)
class Arrival:
    """A request for `wanted` tokens behind `prompt` others."""

    at: float
    prompt: int
    wanted: int


# A chunk that lets someone wait is owed for.
TALK_BESIDE_A_LONG_PROMPT = [Arrival(0.0, 40, 100), Arrival(0.3, 30, 30), Arrival(1.0, 900, 3)]
# First tokens go before it, and that is on account; the chunks from before they came are not.
BEGINNERS_BESIDE_A_LONG_PROMPT = [Arrival(0.0, 1500, 3), *(Arrival(0.05 + 0.2 * i, 1, 25) for i in range(9))]


class KnownCosts:
    """Has the engine believe that its device takes what a formula says; `now` is the sum."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        inside.set_costs(patch, self._cost)

    def _cost(self, num_rows: int, num_tokens: int, context: int) -> float:
        seconds = COSTS.prefill(num_tokens, context) if num_tokens > 1 else COSTS.decode(num_rows)
        self.now += seconds
        return seconds


def in_simulation(arrivals: Iterable[Arrival]) -> list[list[float]]:
    """When each one's tokens come."""
    token_budget = TokenBudget(
        max_stall=MAX_STALL, decode_share=DECODE_SHARE, chunk=CHUNK, idle_chunk=CHUNK, token_seconds=1.0
    )
    simulation, clients = Simulation(costs=COSTS, token_budget=token_budget), list[Client]()

    def arrive(arrival: Arrival) -> None:
        clients.append(simulation.submit(arrival.prompt, arrival.wanted))

    simulation.run(arrivals=[(arrival.at, partial(arrive, arrival)) for arrival in arrivals])
    return [client.token_times for client in clients]


def on_engine(hand: ByHand, clock: KnownCosts, arrivals: Iterable[Arrival]) -> list[list[float]]:
    """When each one's tokens come."""
    due, receivers, times = list(arrivals), list[Receiver](), list[list[float]]()
    while due or not all(receiver.is_done for receiver in receivers):
        while due and due[0].at <= clock.now:
            arrival = due.pop(0)
            receivers.append(hand.submit(make_ids(arrival.prompt, seed=len(due)), greedy(arrival.wanted)))
            times.append([])
        hand.step()
        for receiver, seen in zip(receivers, times, strict=True):
            seen += [clock.now] * (len(receiver.token_ids) - len(seen))
    return times


@pytest.mark.parametrize("arrivals", [slow(TALK_BESIDE_A_LONG_PROMPT), BEGINNERS_BESIDE_A_LONG_PROMPT])
def test_every_token_comes_when_it_does_in_the_simulation(
    arrivals: list[Arrival], model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_folder("qwen3", num_hidden_layers=2)
    settings = {"max_stall_ms": 1e3 * MAX_STALL, "decode_share": DECODE_SHARE, "prefill_chunk": CHUNK}
    with by_hand(model, tmp_path, max_concurrent_requests=16, **settings) as hand:
        inside.set_chunk(hand.engine, CHUNK)  # on every device, also while nobody decodes
        assert on_engine(hand, KnownCosts(monkeypatch), arrivals) == in_simulation(arrivals)
