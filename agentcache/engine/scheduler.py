from __future__ import annotations

from collections.abc import Iterable, Sequence

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.engine.running_request import Requests, RunningRequest, State
from agentcache.engine.token_budget import TokenBudget

# The shortest prompt goes first, unless another was passed over this often.
_MOST_TIMES_PASSED_OVER = 3
# First tokens of an answer go before long prompts: the user is reading.
_FIRST_TOKENS = 32
# A background request passed over this often becomes an ordinary one.
_BACKGROUND_PATIENCE = 8


class Scheduler:
    """Chooses the next request to admit, and the tokens of the next step.

    `stalled`: the next request waits for blocks of running ones. `contended`: the last plan delays due work.
    """

    def __init__(self, requests: Requests, *, max_running: int, token_budget: TokenBudget) -> None:
        self._requests = requests
        self._max_running = max_running
        self._chunk_under_way = False
        self._decode_steps = 0
        self.token_budget = token_budget
        self.stalled = False
        self.contended = False
        self.preemptions = 0
        self.one_at_a_time = False

    @property
    def waiting(self) -> Sequence[RunningRequest]:
        return self._requests.waiting

    @property
    def loading(self) -> Sequence[RunningRequest]:
        return self._requests.loading

    @property
    def running(self) -> Sequence[RunningRequest]:
        return self._requests.running

    @property
    def has_work(self) -> bool:
        return bool(self.running or (self.next_to_admit() and not (self.stalled and self.loading)))

    def next_to_admit(self) -> RunningRequest | None:
        """The next request to admit, if there is room; background ones leave one place for interactive ones."""
        first = min(self.waiting, key=_rank, default=None)
        if first is None:
            return None
        most = 1 if self.one_at_a_time else self._max_running
        free = most - len(self.running) - len(self.loading)
        kept_free = 1 if first.progress.background and most > 1 else 0
        return first if free > kept_free else None

    def admit(self, running: RunningRequest, *, loading: bool) -> None:
        self._requests.move(running, State.LOADING if loading else State.RUNNING)
        _pass_over(other for other in self.waiting if other.submitted.submitted_at < running.submitted.submitted_at)
        running.progress.passed_over = 0
        self.stalled = False

    def victim(self, *, beyond_base: bool = False) -> RunningRequest | None:
        """The request to preempt: background first, then the youngest, so that the oldest completes.

        `beyond_base`: only those with blocks outside base's cache.
        """
        among = [each for each in self.running if len(each.open_plan.tables) > 1] if beyond_base else self.running
        return max(among, key=_rank) if len(among) > 1 else None

    def preempt(self, running: RunningRequest) -> None:
        self._requests.move(running, State.WAITING)
        running.progress.background = False
        self.preemptions += 1

    def schedule(self) -> dict[RunningRequest, int]:
        """Tokens per request for the next step; empty if all wait for the step under way.

        A step is one token of each decoding request of one model, or one chunk; while requests decode, a decode step
        follows each chunk. A source request takes its prompt's turn.
        """
        decoding = [running for running in self.running if running.can_decode]
        prompts = [running for running in self.running if running.can_prefill]
        prompt = min(prompts, key=_prompt_rank, default=None)
        if prompt is None and not self._chunk_under_way:
            self.token_budget.reset()
        self.contended = False
        if prompt is None or (decoding and self._decoding_goes_first(prompt, prompts, decoding)):
            self._chunk_under_way = False
            return dict.fromkeys(self._next_to_decode(decoding), 1)
        if self._awaits_first_token(prompts):
            return {}
        self._chunk_under_way = True
        self.contended = any(running.can_decode or running.will_decode for running in self.running)
        chunk = prompt if prompt.progress.source is None else prompt.progress.source
        _pass_over(other for other in prompts if other not in (prompt, chunk))
        prompt.progress.passed_over = chunk.progress.passed_over = 0
        return {chunk: self._chunk_for(chunk, contended=self.contended)}

    def _decoding_goes_first(
        self, prompt: RunningRequest, prompts: Sequence[RunningRequest], decoding: Sequence[RunningRequest]
    ) -> bool:
        if self._chunk_under_way:
            return True
        if self._may_prefill_more(prompt):
            return False
        if self.token_budget.decoding_is_due:
            return True
        self.contended = self.token_budget.may_defer_decodes and any(
            self._goes_before(running, prompts) for running in decoding
        )
        return self.contended

    def _goes_before(self, running: RunningRequest, prompts: Sequence[RunningRequest]) -> bool:
        """Whether an answer's first tokens take less time than each waiting prompt."""
        first = _FIRST_TOKENS - running.num_generated
        if first <= 0 or running.progress.background:
            return False
        awaited = (prompt for prompt in prompts if not prompt.progress.background)
        return all(self.token_budget.is_sooner_done(first, each.num_to_launch, each.num_launched) for each in awaited)

    def _awaits_first_token(self, prompts: Sequence[RunningRequest]) -> bool:
        """Whether successors of a first token under way go before all waiting prompts."""
        first = (each for each in self.running if each.will_decode and not each.num_generated)
        return self.token_budget.may_defer_decodes and any(self._goes_before(running, prompts) for running in first)

    def _may_prefill_more(self, prompt: RunningRequest) -> bool:
        left = prompt.num_to_launch
        whole = max(prompt.open_plan.computed_prompt_tokens, left)
        return (
            not prompt.progress.background
            and self.token_budget.is_short(whole)
            and self.token_budget.may_prefill_more(left, prompt.num_launched)
        )

    def _next_to_decode(self, decoding: Sequence[RunningRequest]) -> list[RunningRequest]:
        if not decoding:
            return []
        model = min(decoding, key=lambda running: running.progress.decoded_at).current.model
        together = [running for running in decoding if running.current.model == model]
        self._decode_steps += 1
        for running in together:
            running.progress.decoded_at = self._decode_steps
        return together

    def _chunk_for(self, prompt: RunningRequest, *, contended: bool) -> int:
        """A chunk that crosses a block boundary ends on one, or with the prompt; also at the next checkpoint."""
        largest = self.token_budget.chunk_tokens(prompt.num_launched, contended=contended)
        left, to_boundary = prompt.num_to_prefill, BLOCK_SIZE - prompt.num_launched % BLOCK_SIZE
        if (snapshots := prompt.open_plan.snapshots) is not None:
            left = min(left, snapshots.next_after(prompt.num_launched) - prompt.num_launched)
        if left <= largest:
            return left
        if largest < to_boundary:
            return _equal_part(min(left, to_boundary), largest)
        return largest - (prompt.num_launched + largest) % BLOCK_SIZE


def _equal_part(num_tokens: int, largest: int) -> int:
    """Equal, as a short last part would cost nearly as much."""
    parts = -(-num_tokens // largest)
    return -(-num_tokens // parts)


def _rank(running: RunningRequest) -> tuple[bool, float]:
    return running.progress.background, running.submitted.submitted_at


def _prompt_rank(prompt: RunningRequest) -> tuple[int, bool, int, float]:
    overdue = (
        prompt.progress.passed_over
        if prompt.progress.passed_over >= _MOST_TIMES_PASSED_OVER and not prompt.progress.background
        else 0
    )
    return -overdue, prompt.progress.background, prompt.num_to_launch, prompt.submitted.submitted_at


def _pass_over(requests: Iterable[RunningRequest]) -> None:
    for running in requests:
        running.progress.passed_over += 1
        running.progress.background &= running.progress.passed_over < _BACKGROUND_PATIENCE
