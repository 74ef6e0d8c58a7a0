"""A change of adapter on a cached context."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentcache.api.policy import Policy
from agentcache.client import Completion
from agentcache.server_process import ServerProcess
from benchmarks.adapters.made import MadeAdapter, Passage, PassageSource
from benchmarks.compare import OURS, PEER
from benchmarks.streams import RunningStream
from benchmarks.workload import Progress

COLD, HOT = "base, cold", "base, hot"
TRUNK = f"{OURS}, trunk"


@dataclass(frozen=True)
class Turn:
    """A turn after base's first one; after the previous one if `goes_on`."""

    name: str
    policy: Policy | None = None
    goes_on: bool = False


TURNS = (
    Turn(HOT),
    Turn("exact, switch", Policy.EXACT),
    Turn("exact, next turn", Policy.EXACT, goes_on=True),
    Turn("activated, switch", Policy.ACTIVATED),
    Turn("prefill-share, switch", Policy.PREFILL_SHARE),
    Turn("back to base"),
)
EXACT_TURNS = tuple(turn for turn in TURNS if turn.policy in (None, Policy.EXACT))


@dataclass(frozen=True)
class SwitchPlan:
    context: int = 4096
    turn_tokens: int = 24
    answer_tokens: int = 4
    rounds: int = 3


@dataclass(frozen=True)
class Cost:
    """Cost of one turn; bytes are growth, layer tokens include the answer's, None is not reported."""

    ttft_ms: float
    prompt_tokens: int
    computed_tokens: int
    ram_bytes: int | None = None
    disk_bytes: int | None = None
    computed_layer_tokens: int | None = None
    trunk_bytes: int | None = None


@dataclass(frozen=True)
class Answer:
    said: Passage
    cost: Cost


@dataclass(frozen=True)
class SwitchSample:
    server: str
    turn: str
    round: int
    cost: Cost


class Peer:
    """`mlx_lm.server`; requests with an adapter must name the model folder; `bias` prevents ends of turns."""

    def __init__(self, server: ServerProcess, model: Path, bias: Mapping[str, float]) -> None:
        self._server, self._model, self._bias = server, model, bias

    def send(self, prompt: Passage, max_tokens: int, adapter: MadeAdapter | None = None) -> RunningStream:
        body: dict[str, Any] = {"model": str(self._model), "prompt": prompt.text, "max_tokens": max_tokens}
        body |= {"temperature": 0, "logit_bias": self._bias}
        if adapter is not None:
            body["adapters"] = str(adapter.path)
        return RunningStream(self._server.client.url, "/v1/completions", body)


def complete(
    server: ServerProcess,
    prompt: Passage,
    max_tokens: int,
    adapter: MadeAdapter | None = None,
    agent: str | None = None,
) -> Completion:
    name = None if adapter is None else adapter.name
    return server.client.complete(
        prompt.ids, max_tokens=max_tokens, temperature=0, ignore_eos=True, adapter=name, agent=agent
    )


class OurSide:
    def __init__(
        self, server: ServerProcess, source: PassageSource, name: str = OURS, turns: Sequence[Turn] = TURNS
    ) -> None:
        self.name, self.turns = name, turns
        self._server, self._source = server, source

    def answer(self, number: int, prompt: Passage, max_tokens: int, adapter: MadeAdapter | None) -> Answer:
        before = self._stats()
        agent = f"{adapter.policy if adapter else 'base'}-{number}"
        done = complete(self._server, prompt, max_tokens, adapter, agent)
        after = self._stats()
        cost = Cost(
            ttft_ms=done.ttft_ms,
            prompt_tokens=done.report["prompt_tokens"],
            computed_tokens=done.report["computed_tokens"],
            ram_bytes=after["ram_used_bytes"]["base"] - before["ram_used_bytes"]["base"],
            disk_bytes=after["disk_bytes"] - before["disk_bytes"],
            computed_layer_tokens=after["computed_layer_tokens"] - before["computed_layer_tokens"],
            trunk_bytes=after["ram_bytes"]["trunk"] - before["ram_bytes"]["trunk"],
        )
        return Answer(self._source.of_ids(done.token_ids), cost)

    def _stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self._server.client.request("GET", "/v1/cache/stats")
        return stats


class PeerSide:
    name = PEER
    turns: Sequence[Turn] = EXACT_TURNS

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def answer(self, number: int, prompt: Passage, max_tokens: int, adapter: MadeAdapter | None) -> Answer:
        stream = self._peer.send(prompt, max_tokens, adapter).result()
        read = int(stream.usage["prompt_tokens"])
        cached = int((stream.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))
        return Answer(Passage(stream.text, ()), Cost(stream.ttft_ms, read, read - cached))


class SwitchBench:
    def __init__(
        self,
        plan: SwitchPlan,
        sides: Sequence[OurSide | PeerSide],
        adapters: Mapping[Policy, Sequence[MadeAdapter]],
        source: PassageSource,
    ) -> None:
        self._plan, self._sides, self._adapters, self._source = plan, sides, adapters, source

    def measure(self, progress: Progress) -> list[SwitchSample]:
        samples: list[SwitchSample] = []
        for number in range(self._plan.rounds):
            context = self._source.take(self._plan.context)
            for side in self._sides if number % 2 == 0 else reversed(self._sides):
                for sample in self._round(number, side, context):
                    samples.append(sample)
                    progress(_line(sample))
        return samples

    def _round(self, number: int, side: OurSide | PeerSide, context: Passage) -> Iterator[SwitchSample]:
        first = side.answer(number, context, self._plan.answer_tokens, None)
        yield SwitchSample(side.name, COLD, number, first.cost)
        told = last = context + first.said
        for turn in side.turns:
            prompt = (last if turn.goes_on else told) + self._ask(turn)
            adapter = None if turn.policy is None else self._adapters[turn.policy][0]
            answer = side.answer(number, prompt, self._plan.answer_tokens, adapter)
            yield SwitchSample(side.name, turn.name, number, answer.cost)
            last = prompt + answer.said

    def _ask(self, turn: Turn) -> Passage:
        words = self._source.take(self._plan.turn_tokens)
        return self._source.invocation() + words if turn.policy is Policy.ACTIVATED else words


def _line(sample: SwitchSample) -> str:
    cost = sample.cost
    return (
        f"{sample.server:<17} {sample.turn:<22} {cost.ttft_ms:8.1f} ms to the first token, "
        f"{cost.computed_tokens} of {cost.prompt_tokens} tokens computed"
    )
