from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import count

from agentcache.errors import RankLost
from agentcache.ranks.commands import ANSWERS, Command, Question, Stop, decode, encode
from agentcache.ranks.lost import CUT_SECONDS, LOOK_SECONDS, Connections, naming_the_lost
from agentcache.ranks.wire import Wire
from agentcache.system.threads import start_thread

_PINGS = 4  # per `patience` seconds

Post = Callable[[Callable[[], None]], None]


class _Asked:
    def __init__(self, ranks: int) -> None:
        self.answers: dict[int, bytes] = {}
        self.future: Future[list[bytes]] = Future()
        self._ranks = ranks

    def take(self, rank: int, answer: bytes) -> None:
        self.answers[rank] = answer
        if len(self.answers) == self._ranks and not self.future.done():
            self.future.set_result([self.answers[each] for each in sorted(self.answers)])


class WorkerLink:
    """Rank 0's channel to workers. `tell` and `ask` are thread-safe; the rest needs the engine thread.

    Commands go out with the next step, in one message; without a step, extra messages carry questions. `post`: runs a
    function on the engine thread. `give_up`: called on another thread when a rank is lost, as the engine thread is
    then stuck in MLX. `patience`: longest silence, in seconds.
    """

    def __init__(
        self,
        wire: Wire,
        post: Post,
        give_up: Callable[[RankLost], None],
        patience: float,
        connections: Connections | None = None,
    ) -> None:
        self.wire = wire
        self._connections = connections or Connections()
        self._post = post
        self._give_up = give_up
        self._patience = patience
        self._outbox: deque[Command] = deque()
        self._asked: dict[int, _Asked] = {}
        self._numbers = count(1)
        self._lock = threading.Lock()  # guards the two above and the fields below
        self._is_posted = False
        self._lost: RankLost | None = None
        self._waits_since: float | None = None
        self._waits_for = patience
        self._heard_at = time.monotonic()
        self._ended = threading.Event()
        self._is_computing = False  # engine thread only
        self._watch = start_thread("agentcache-ranks", self._look, self._died)

    def tell(self, command: Command) -> None:
        self._outbox.append(command)

    def ask(self, question: Callable[[int], Question]) -> Future[list[bytes]]:
        """Ask the workers; the future has their answers by rank, or raises RankLost."""
        asked = _Asked(self.wire.size - 1)
        with self._lock:
            if self._lost is not None:
                asked.future.set_exception(self._lost)
                return asked.future
            number = next(self._numbers)
            self._asked[number] = asked
            self._outbox.append(question(number))
        self._wake()
        return asked.future

    def _wake(self) -> None:
        with self._lock:
            is_posted, self._is_posted = self._is_posted, True
        if not is_posted:
            self._post(self._out_of_turn)

    def exchange(self) -> None:
        """Send commands and receive ready answers. Raises RankLost."""
        if self._lost is not None:
            raise self._lost
        commands = [self._outbox.popleft() for _ in range(len(self._outbox))]
        message = encode(commands)
        with self.waiting():
            _, *heard = self.wire.exchange(message)
            self._heard_at = time.monotonic()
            for rank, said in enumerate(heard, 1):
                for number, answer in decode(said, ANSWERS).items():
                    self._take(rank, number, answer)

    def _take(self, rank: int, number: int, answer: bytes) -> None:
        asked = self._asked.get(number)
        if asked is None:
            raise RankLost(f"rank {rank} answers question {number}, which is not open")
        asked.take(rank, answer)
        if asked.future.done():
            with self._lock:
                del self._asked[number]

    def ask_now(self, question: Callable[[int], Question]) -> list[bytes]:
        """`ask` between steps, waiting for all answers. Raises RankLost."""
        future = self.ask(question)
        while not future.done():
            self.exchange()
        return future.result()

    def _out_of_turn(self) -> None:
        with self._lock:
            self._is_posted = False
        if self._lost is None and not self._is_computing:  # else the message would wait for the step
            self.exchange()
            self.go_on()

    def step_begins(self) -> None:
        """Send no extra messages from now on: workers would read them after the step."""
        self._is_computing = True

    def step_ended(self) -> None:
        self._is_computing = False
        self.go_on()

    def go_on(self) -> None:
        """Schedule extra messages while answers are due; the device must be idle."""
        if self._asked:
            self._wake()

    @contextmanager
    def waiting(self, seconds: float | None = None) -> Iterator[None]:
        """Wait for other ranks inside, for up to `seconds` (default: `patience`)."""
        self._waits_for = self._patience if seconds is None else seconds
        self._waits_since = time.monotonic()
        try:
            with naming_the_lost():
                yield
        except RankLost as lost:
            self._fail(lost)
            raise
        finally:
            self._waits_since = None

    def _fail(self, lost: RankLost) -> None:
        with self._lock:
            self._lost = self._lost or lost
            asked = list(self._asked.values())
            self._asked.clear()
        for each in asked:
            if not each.future.done():
                each.future.set_exception(lost)

    def stop(self) -> None:
        self._ended.set()
        if self._lost is None:
            self.tell(Stop())
            self.exchange()

    def _look(self) -> None:
        """Watchdog thread: sends messages regularly, detects ranks that hang or are gone."""
        cut_at = math.inf
        while not self._ended.wait(LOOK_SECONDS):
            since, now = self._waits_since, time.monotonic()
            if cut_at == math.inf and self._connections.are_cut():
                cut_at = now
            if since is None:
                if cut_at <= now or now - self._heard_at > self._patience / _PINGS:
                    self._wake()
            elif now - max(since, cut_at) > CUT_SECONDS:
                self._leave_alone(RankLost("another process that computes the model is gone"))
                return
            elif now - since > self._waits_for:
                seconds = f"{self._waits_for:.0f} s"
                self._leave_alone(RankLost(f"another process that computes the model has not answered for {seconds}"))
                return

    def _died(self, error: Exception) -> None:
        self._leave_alone(RankLost(f"the watch over the other processes has failed: {error}"))

    def _leave_alone(self, lost: RankLost) -> None:
        self._fail(lost)
        self._give_up(lost)
