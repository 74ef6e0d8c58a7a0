"""`agentcache demo`: kill the server in the middle of a conversation, and hear the agents go on with the same words.

Three runs of one workflow on real server processes, each with a cache folder of its own:

    hot     all phases without interruption: the reference
    warm    SIGKILL after phase 3 and again after phase 4; each time a new process goes on from disk
    cold    what phases 4 and 5 cost a server that has nothing cached: every prompt computed as a whole
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from agentcache.cli.demo_report import DemoResult, build_demo_report, demo_table, summary_lines, write_demo_report
from agentcache.cli.run import say, take_steps
from agentcache.client import HttpChat
from agentcache.server_process import SERVE, ServerProcess, ending_on_signals
from agentcache.workflow.run import Chat, Message, Reply, Settings, WorkflowRun
from agentcache.workflow.script import Script, read_script
from agentcache.workflow.transcript import TurnRecord, WorkflowTranscript

SCRIPT = "prisoners_dilemma"
SESSION = "demo"
FIRST_KILL = 3  # the phase after which the server is killed for the first time
COLD_TOKENS = 8  # enough for the first to be on its way before the last one is saved
WARM_UP = [{"role": "user", "content": "Good morning."}]


def demo(
    out: Annotated[Path, typer.Option(help="Folder for transcript, table, plot and logs.")] = Path("agentcache-demo"),
    model: Annotated[str | None, typer.Option(help="Folder or hub id. Default: the embedded model.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens a turn; overrides the script's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Three agents, two SIGKILLs, the same words: what a restart costs with and without the cache. Needs no network."""
    console = Console(stderr=True)
    out.mkdir(parents=True, exist_ok=True)
    with ending_on_signals(), tempfile.TemporaryDirectory(prefix="agentcache-demo-") as caches:
        result = Demo(read_script(SCRIPT), out, Path(caches), console, model, max_tokens).run()
    report = build_demo_report(result)
    paths = write_demo_report(report, result, out)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        Console(width=max(Console().width, 120)).print(demo_table(report))
    for line in [*summary_lines(report), f"Written: {', '.join(str(path) for path in paths)}"]:
        say(console if as_json else Console(), line)
    if not report["passed"]:
        raise typer.Exit(1)


@dataclass(frozen=True)
class Demo:
    """The three runs. Every server process is gone when `run` returns or raises.

    Args:
        script: the workflow; it has phases after `FIRST_KILL`.
        out: folder for transcripts and server logs.
        caches: folder for the three cache folders.
        console: where progress goes.
        model: folder or hub id; None for the embedded model.
        max_tokens: tokens a turn; None for the script's.
        command: what to start in place of `agentcache serve`.
    """

    script: Script
    out: Path
    caches: Path
    console: Console
    model: str | None = None
    max_tokens: int | None = None
    command: tuple[str, ...] = SERVE

    def run(self) -> DemoResult:
        say(self.console, "1/3 hot: all phases without interruption, the reference")
        hot, sent = self._uninterrupted()
        say(self.console, f"2/3 warm: SIGKILL after phase {FIRST_KILL}, and again after each later phase")
        warm = self._killed()
        say(self.console, f"3/3 cold: the prompts after phase {FIRST_KILL}, sent to a server with an empty cache")
        late = [index for index, record in enumerate(hot.turns) if record.phase > FIRST_KILL]
        cold = self._cold([sent[index] for index in late])
        return DemoResult(hot, warm, tuple(late), tuple(cold))

    def _uninterrupted(self) -> tuple[WorkflowTranscript, list[list[Message]]]:
        with self._server("hot") as server:
            chat = _Recorder(HttpChat(server.client))
            transcript = self._take(chat, (), range(1, len(self.script.phases) + 1), self.out / "reference")
            return transcript, chat.sent

    def _killed(self) -> WorkflowTranscript:
        last = len(self.script.phases)
        parts = [range(1, FIRST_KILL + 1), *(range(phase, phase + 1) for phase in range(FIRST_KILL + 1, last + 1))]
        done: tuple[TurnRecord, ...] = ()
        for phases in parts:
            with self._server("warm") as server:
                transcript = self._take(HttpChat(server.client), done, phases, self.out)
                done = transcript.turns
                if phases.stop <= last:
                    server.kill()
                    say(self.console, f"SIGKILL to process {server.pid} after phase {phases.stop - 1}")
        return transcript

    def _cold(self, prompts: Sequence[Sequence[Message]]) -> list[Reply]:
        """Each prompt in an agent and a salt of its own: nothing of the prompts before it can be reused."""
        replies = []
        with self._server("cold") as server:
            for number, messages in enumerate(prompts, 1):
                name = f"cold-{number}"
                chat = HttpChat(server.client, salt=name)
                replies.append(chat.chat(name, messages, max_tokens=COLD_TOKENS, temperature=0.0, seed=None))
                say(self.console, _cold_line(name, replies[-1]))
        return replies

    @contextmanager
    def _server(self, name: str) -> Iterator[ServerProcess]:
        log = self.out / f"server-{name}.log"
        with ServerProcess(self.caches / name, log, model=self.model, command=self.command) as server:
            # The first request of a process pays for more than its own work; the turns that are compared should not.
            server.client.chat(WARM_UP, max_tokens=2, temperature=0.0, salt="warm-up")
            yield server

    def _take(self, chat: Chat, done: Sequence[TurnRecord], phases: range, folder: Path) -> WorkflowTranscript:
        workflow = WorkflowRun(self.script, chat, Settings(SESSION, max_tokens=self.max_tokens), done)
        return take_steps(workflow, workflow.pending(phases), done, folder, self.console)


class _Recorder:
    """A `Chat` that remembers every list of messages it passes on."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self.sent: list[list[Message]] = []

    def chat(
        self, agent: str, messages: Sequence[Message], *, max_tokens: int, temperature: float, seed: int | None
    ) -> Reply:
        self.sent.append(list(messages))
        return self._chat.chat(agent, messages, max_tokens=max_tokens, temperature=temperature, seed=seed)


def _cold_line(name: str, reply: Reply) -> str:
    report = reply.report
    return (
        f"{name:<14} {report['cache_state']:<4} {report['prompt_tokens']:>6} tokens, "
        f"{report['computed_tokens']:>5} computed, first token {reply.ttft_ms:7.0f} ms"
    )
