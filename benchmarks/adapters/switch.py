"""A change of adapter on a cached context, on agentcache and on `mlx_lm.server`, turn by turn.

Every turn continues what base has read and said. `mlx_lm.server` gets its adapter as `adapters` in the request, for
which it loads the whole model again. Plain LoRA is also measured on an agentcache with a trunk: its adapter goes on
from the hidden states that base has left at the adapter's first layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentcache.adapter_settings import Policy
from agentcache.client import Completion
from agentcache.server_process import ServerProcess
from benchmarks.adapters.made import MadeAdapter, Passage, PassageSource
from benchmarks.compare.measure import OURS, PEER
from benchmarks.streams import RunningStream

COLD, HOT = "base, cold", "base, hot"
TRUNK = f"{OURS}, trunk"


@dataclass(frozen=True)
class Turn:
    """A turn behind base's first one; with `goes_on`, behind the turn before. No policy means base."""

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
    """What to measure.

    Args:
        context: tokens that base has read before.
        turn_tokens: new tokens of each turn.
        answer_tokens: generated in each turn.
        rounds: times everything is measured, each on a context of its own.
    """

    context: int = 4096
    turn_tokens: int = 24
    answer_tokens: int = 4
    rounds: int = 3


@dataclass(frozen=True)
class Cost:
    """What one turn took.

    Args:
        ttft_ms: by the client's clock.
        computed_tokens: tokens of the prompt that went through the model.
        ram_bytes, disk_bytes: by which the cache has grown; None where the server does not say.
        computed_layer_tokens: tokens, the answer's too, each once for each layer that it went through; else as above.
        trunk_bytes: by which the cached hidden states have grown, which are not in `ram_bytes`; else as above.
    """

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
    """One turn on one server, in one of the rounds."""

    server: str
    turn: str
    round: int
    cost: Cost


class Peer:
    """`mlx_lm.server`: requests name the model's folder, because with its default model it ignores adapters.

    Args:
        bias: keeps the end of a turn from being chosen.
    """

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
    """A greedy completion by agentcache, of fixed length."""
    name = None if adapter is None else adapter.name
    return server.client.complete(
        prompt.ids, max_tokens=max_tokens, temperature=0, ignore_eos=True, adapter=name, agent=agent
    )


class OurSide:
    """Turns on agentcache, by an agent for each round and policy."""

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
    """Turns on `mlx_lm.server`, which has one way to use an adapter."""

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
    """The servers and the adapters on them."""

    def __init__(
        self,
        plan: SwitchPlan,
        sides: Sequence[OurSide | PeerSide],
        adapters: Mapping[Policy, Sequence[MadeAdapter]],
        source: PassageSource,
    ) -> None:
        self._plan, self._sides, self._adapters, self._source = plan, sides, adapters, source

    def measure(self, progress: Callable[[str], None]) -> list[SwitchSample]:
        """All rounds; in each the servers take turns, every other time from the last to the first."""
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
        """New tokens, behind what activates an adapter that has to be."""
        words = self._source.take(self._plan.turn_tokens)
        return self._source.invocation() + words if turn.policy is Policy.ACTIVATED else words


def _line(sample: SwitchSample) -> str:
    cost = sample.cost
    return (
        f"{sample.server:<17} {sample.turn:<22} {cost.ttft_ms:8.1f} ms to the first token, "
        f"{cost.computed_tokens} of {cost.prompt_tokens} tokens computed"
    )
