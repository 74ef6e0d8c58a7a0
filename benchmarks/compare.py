"""Conversations on agentcache and `mlx_lm.server`, killed halfway; at the end all agents speak at once."""

from __future__ import annotations

import random
import re
import statistics
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from agentcache.bench.plots import draw_bars, new_figure, save_figure
from agentcache.bench.reporter import Report, Reporter, clearly_less, clearly_more, megabytes, number_table
from agentcache.bench.ttft import WORDS
from agentcache.server_process import SERVE, ServerProcess
from agentcache.text.tokenizer import Tokenizer
from benchmarks.mlx_lm_server import COMMAND
from benchmarks.streams import RunningStream, Stream, overall_rate, run_together
from benchmarks.workload import NEVER, WEIGHTS_MODEL, Progress, given_or_random

OURS, PEER = "agentcache", "mlx_lm.server"
_CHAT = "/v1/chat/completions"
_PEER_CACHE = re.compile(r"Prompt Cache: \d+ sequences, ([\d.]+) GB")
CAVEATS = [
    "mlx_lm.server runs with its defaults: keys and values in the model's type (float32 for the random model; 16 bits "
    "would halve its cache), prompt cache in RAM. agentcache keeps 4 bits. Answers differ where that rounds.",
    "Start-up is not part of a turn's time; it stands beside it. Block files were written moments before: they come "
    "from the page cache.",
    "Times are the clients', over loopback HTTP; compare ratios within one run.",
]


@dataclass(frozen=True)
class ComparePlan:
    """Parameters; `first_tokens` and `turn_tokens` are approximate."""

    agents: int = 3
    turns: int = 4
    first_tokens: int = 2048
    turn_tokens: int = 128
    answer_tokens: int = 24
    together_tokens: int = 48
    model: str | None = None
    seed: int = 0
    command: tuple[str, ...] = (*SERVE, "--kv", "4")  # `auto` says nothing on random keys
    peer: tuple[str, ...] = COMMAND

    @property
    def restart_turn(self) -> int:
        return self.turns // 2


QUICK = ComparePlan(agents=2, first_tokens=512, turn_tokens=64, answer_tokens=12, together_tokens=16)


@dataclass(frozen=True)
class TurnSample:
    server: str
    agent: int
    turn: int
    ttft_ms: float
    decode_tokens_per_s: float
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class ServerSample:
    """One server at the end; `start_seconds` to the first answer; None if not reported."""

    server: str
    start_seconds: float
    together_tokens_per_s: float
    cache_ram_bytes: int | None
    cache_disk_bytes: int
    process_ram_bytes: int


@dataclass(frozen=True)
class CompareResult:
    turns: tuple[TurnSample, ...]
    servers: tuple[ServerSample, ...]


def measure_comparison(plan: ComparePlan, progress: Progress) -> CompareResult:
    with given_or_random(plan.model, WEIGHTS_MODEL) as (home, model):
        return _Bench(plan, home, model, progress).run()


@dataclass
class _Side:
    name: str
    command: tuple[str, ...]
    folder: Path
    conversations: list[list[dict[str, str]]]
    start_seconds: float = 0.0
    samples: list[TurnSample] = field(default_factory=list)

    @property
    def log(self) -> Path:
        return self.folder / "log"


class _Bench:
    def __init__(self, plan: ComparePlan, home: Path, model: Path, progress: Progress) -> None:
        self._plan = plan
        self._model = model
        self._progress = progress
        self._random = random.Random(plan.seed)
        self._eos_bias = {str(token): NEVER for token in Tokenizer.load(model).eos_ids}
        commands = {OURS: plan.command, PEER: plan.peer}
        self._sides = [self._side(name, command, home / name) for name, command in commands.items()]

    def _side(self, name: str, command: tuple[str, ...], folder: Path) -> _Side:
        folder.mkdir()
        return _Side(name, command, folder, [[] for _ in range(self._plan.agents)])

    def run(self) -> CompareResult:
        restart = self._plan.restart_turn
        with ExitStack() as stack:
            self._take_turns(self._start(stack), range(restart))
        with ExitStack() as stack:
            servers = self._start(stack)
            self._take_turns(servers, range(restart, self._plan.turns))
            together = self._speak_together(servers)
            ends = [self._end(side, servers[side.name], together[side.name]) for side in self._sides]
        return CompareResult(tuple(sample for side in self._sides for sample in side.samples), tuple(ends))

    def _start(self, stack: ExitStack) -> dict[str, ServerProcess]:
        servers = {}
        for side in self._sides:
            started = time.perf_counter()
            server = ServerProcess(side.folder / "cache", side.log, model=str(self._model), command=side.command)
            servers[side.name] = stack.enter_context(server)
            stack.callback(server.kill)
            self._send(server, self._body([{"role": "user", "content": "Hello."}], 2)).result()
            side.start_seconds = time.perf_counter() - started
        return servers

    def _take_turns(self, servers: dict[str, ServerProcess], turns: range) -> None:
        for turn in turns:
            for agent in range(self._plan.agents):
                said = self._words(self._plan.turn_tokens if turn else self._plan.first_tokens)
                for side in self._sides if (turn + agent) % 2 else reversed(self._sides):
                    self._take_turn(side, servers[side.name], agent, turn, said)

    def _take_turn(self, side: _Side, server: ServerProcess, agent: int, turn: int, said: str) -> None:
        messages = side.conversations[agent]
        messages.append({"role": "user", "content": said})
        body = self._body(messages, self._plan.answer_tokens, _agent_name(side, agent))
        stream = self._send(server, body).result()
        messages.append({"role": "assistant", "content": stream.text})
        side.samples.append(_sample(side.name, agent, turn, stream))
        self._progress(_line(side.samples[-1]))

    def _speak_together(self, servers: dict[str, ServerProcess]) -> dict[str, float]:
        said = [self._words(self._plan.turn_tokens) for _ in range(self._plan.agents)]
        return {side.name: self._rate_together(side, servers[side.name], said) for side in self._sides}

    def _rate_together(self, side: _Side, server: ServerProcess, said: Sequence[str]) -> float:
        bodies = []
        for agent, words in enumerate(said):
            messages = [*side.conversations[agent], {"role": "user", "content": words}]
            bodies.append(self._body(messages, self._plan.together_tokens, _agent_name(side, agent)))
        rate = overall_rate(run_together(server.client.url, _CHAT, bodies))
        self._progress(f"{side.name:<14} {len(said)} agents at once: {rate:.1f} tokens/s")
        return rate

    def _end(self, side: _Side, server: ServerProcess, together: float) -> ServerSample:
        if side.name == OURS:
            agents = server.client.request("GET", "/v1/agents")["data"]
            ram, disk = (sum(agent[f"{where}_bytes"] for agent in agents) for where in ("ram", "disk"))
        else:
            # The peer logs its cache on the next request.
            self._send(server, self._body([{"role": "user", "content": "Goodbye."}], 2)).result()
            ram, disk = _logged_cache_bytes(side.log), 0
        return ServerSample(side.name, side.start_seconds, together, ram, disk, _resident_bytes(server.pid))

    def _body(self, messages: Sequence[dict[str, str]], max_tokens: int, agent: str | None = None) -> dict[str, Any]:
        body = {"messages": list(messages), "max_tokens": max_tokens, "temperature": 0, "logit_bias": self._eos_bias}
        return body if agent is None else {**body, "agent": agent}

    def _send(self, server: ServerProcess, body: dict[str, Any]) -> RunningStream:
        return RunningStream(server.client.url, _CHAT, body)

    def _words(self, num_tokens: int) -> str:
        return " ".join(self._random.choices(WORDS.split(), k=num_tokens * 2 // 3))


def _agent_name(side: _Side, agent: int) -> str | None:
    return f"agent-{agent}" if side.name == OURS else None


def _sample(server: str, agent: int, turn: int, stream: Stream) -> TurnSample:
    usage = stream.usage
    return TurnSample(
        server=server,
        agent=agent,
        turn=turn,
        ttft_ms=stream.ttft_ms,
        decode_tokens_per_s=(len(stream.token_times) - 1) / stream.decode_seconds,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage.get("prompt_tokens_details", {}).get("cached_tokens", 0),
    )


def _line(sample: TurnSample) -> str:
    return (
        f"{sample.server:<14} turn {sample.turn}, agent {sample.agent}: {sample.ttft_ms:8.1f} ms to the first token, "
        f"{sample.cached_tokens} of {sample.prompt_tokens} tokens cached"
    )


def _logged_cache_bytes(log: Path) -> int | None:
    found = _PEER_CACHE.findall(log.read_text(encoding="utf-8", errors="replace"))
    return round(float(found[-1]) * 1e9) if found else None


def _resident_bytes(pid: int) -> int:
    shown = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=True)
    return int(shown.stdout) * 1024


def build_report(plan: ComparePlan, result: CompareResult) -> Report:
    turns = [_summarise_turn(plan, result, turn) for turn in range(plan.turns)]
    servers = {server.server: asdict(server) for server in result.servers}
    return COMPARE.report(
        plan,
        CAVEATS,
        peer_wins=peer_wins(turns, servers),
        model=plan.model or "random, 84M parameters, float32",
        turns=turns,
        servers=servers,
        samples=[asdict(sample) for sample in result.turns],
    )


def _summarise_turn(plan: ComparePlan, result: CompareResult, turn: int) -> dict[str, Any]:
    by_server = {
        name: [sample for sample in result.turns if sample.turn == turn and sample.server == name]
        for name in (OURS, PEER)
    }
    kind = "first" if turn == 0 else "after the restart" if turn == plan.restart_turn else "next"
    return {"turn": turn, "kind": kind, **{name: _medians(samples) for name, samples in by_server.items()}}


def _medians(samples: Sequence[TurnSample]) -> dict[str, float]:
    names = ("ttft_ms", "decode_tokens_per_s", "prompt_tokens", "cached_tokens")
    return {name: statistics.median(getattr(sample, name) for sample in samples) for name in names}


def peer_wins(turns: Sequence[dict[str, Any]], servers: dict[str, dict[str, Any]]) -> list[str]:
    wins = []
    for turn in turns:
        name = f"turn {turn['turn'] + 1} ({turn['kind']})"
        ours, theirs = turn[OURS], turn[PEER]
        if clearly_less(theirs["ttft_ms"], ours["ttft_ms"]):
            wins.append(f"{name}: first token after {theirs['ttft_ms']:.0f} ms, here {ours['ttft_ms']:.0f} ms")
        if clearly_more(theirs["decode_tokens_per_s"], ours["decode_tokens_per_s"]):
            wins.append(f"{name}: {theirs['decode_tokens_per_s']:.1f} tokens/s, here {ours['decode_tokens_per_s']:.1f}")
    mine, other = servers[OURS], servers[PEER]
    if clearly_more(other["together_tokens_per_s"], mine["together_tokens_per_s"]):
        wins.append(
            f"all agents at once: {other['together_tokens_per_s']:.1f} tokens/s, "
            f"here {mine['together_tokens_per_s']:.1f}"
        )
    if clearly_less(other["start_seconds"], mine["start_seconds"]):
        wins.append(f"start-up: {other['start_seconds']:.1f} s, here {mine['start_seconds']:.1f} s")
    return wins


def turns_table(report: Report) -> Table:
    plan = report["plan"]
    restart = plan["turns"] // 2 + 1
    table = number_table(
        f"{plan['agents']} agents in conversation, medians; both servers killed before turn {restart}",
        ("turn", "prompt", f"{OURS}: first token", f"{PEER}: first token", "ratio", "cached", "tokens/s"),
    )
    for turn in report["turns"]:
        ours, theirs = turn[OURS], turn[PEER]
        table.add_row(
            f"{turn['turn'] + 1} {turn['kind']}",
            f"{ours['prompt_tokens']:.0f}",
            f"{ours['ttft_ms']:.0f} ms",
            f"{theirs['ttft_ms']:.0f} ms",
            f"{theirs['ttft_ms'] / ours['ttft_ms']:.2f}x",
            f"{ours['cached_tokens']:.0f} / {theirs['cached_tokens']:.0f}",
            f"{ours['decode_tokens_per_s']:.1f} / {theirs['decode_tokens_per_s']:.1f}",
        )
    return table


def servers_table(report: Report) -> Table:
    table = number_table(
        "The servers", ("", "all agents at once", "start-up", "cache in RAM", "cache on disk", "process")
    )
    for name, server in report["servers"].items():
        table.add_row(
            name,
            f"{server['together_tokens_per_s']:.1f} tokens/s",
            f"{server['start_seconds']:.1f} s",
            megabytes(server["cache_ram_bytes"]),
            megabytes(server["cache_disk_bytes"]),
            megabytes(server["process_ram_bytes"]),
        )
    return table


def plot_turns(report: Report, path: Path) -> None:
    turns = report["turns"]
    figure = new_figure(max(6, 1.3 * len(turns)), 4.5)
    axes = figure.add_subplot()
    draw_bars(axes, {name: [turn[name]["ttft_ms"] for turn in turns] for name in (OURS, PEER)})
    axes.set_xticks(range(len(turns)), [f"turn {turn['turn'] + 1}\n{turn['kind']}" for turn in turns])
    axes.set_ylabel("time to first token (ms)")
    save_figure(figure, axes, "A conversation whose server is killed in the middle", path)


COMPARE = Reporter("compare", "conversations against mlx_lm.server", (turns_table, servers_table), {"": plot_turns})
