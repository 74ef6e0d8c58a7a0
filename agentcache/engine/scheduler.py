from __future__ import annotations

from collections.abc import Iterable, Sequence

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.engine.requests import Requests
from agentcache.engine.running_request import RunningRequest, State
from agentcache.engine.token_budget import TokenBudget

# The shortest prompt goes first, unless another was passed over this often.
_MOST_TIMES_PASSED_OVER = 3
# First tokens of an answer go before chunks of long prompts: the user is reading.
_FIRST_TOKENS = 32
# A background request passed over this often becomes an ordinary one.
_BACKGROUND_PATIENCE = 8


class Scheduler:
    """Chooses the next request to admit, and the tokens of the next step.

    Attributes:
        stalled: whether the next request waits for blocks of running ones.
        contended: whether the last plan delays decoding or a due chunk.
        one_at_a_time: whether memory allows only one admitted request.
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
        """Return the next request to admit, if the batch has room.

        Background requests leave one place free for interactive ones.
        """
        first = min(self.waiting, key=_rank, default=None)
        if first is None:
            return None
        most = 1 if self.one_at_a_time else self._max_running
        free = most - len(self.running) - len(self.loading)
        kept_free = 1 if first.background and most > 1 else 0
        return first if free > kept_free else None

    def admit(self, generation: RunningRequest, *, loading: bool) -> None:
        """Mark a request as admitted. Earlier requests that still wait are passed over."""
        self._requests.move(generation, State.LOADING if loading else State.RUNNING)
        _pass_over(other for other in self.waiting if other.submitted_at < generation.submitted_at)
        generation.passed_over = 0
        self.stalled = False

    def victim(self, *, beyond_base: bool = False) -> RunningRequest | None:
        """Return the request to preempt: background first, then the youngest. The oldest always completes.

        `beyond_base`: whether it must have blocks in another cache than base's.
        """
        running = [each for each in self.running if len(each.open_plan.tables) > 1] if beyond_base else self.running
        return max(running, key=_rank) if len(running) > 1 else None

    def preempt(self, generation: RunningRequest) -> None:
        """Queue a request again, no longer as background."""
        self._requests.move(generation, State.WAITING)
        generation.background = False
        self.preemptions += 1

    def schedule(self) -> dict[RunningRequest, int]:
        """Return tokens per request for the next step; empty if all wait for the step under way.

        A step is one token of each decoding request, or one chunk. While requests decode, a chunk follows a decode
        step, once decoding has had its share. Short prompts and first tokens of answers may go early, balanced later:
        a long chunk also waits for the first token that is being computed.
        Rows of different models decode in different steps. A source request takes its prompt's turn.
        """
        decoding = [generation for generation in self.running if generation.can_decode]
        prompts = [generation for generation in self.running if generation.can_prefill]
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
        self.contended = any(generation.can_decode or generation.will_decode for generation in self.running)
        chunk = prompt if prompt.leader is None else prompt.leader
        _pass_over(other for other in prompts if other not in (prompt, chunk))
        prompt.passed_over = chunk.passed_over = 0
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
            self._goes_before(generation, prompts) for generation in decoding
        )
        return self.contended

    def _goes_before(self, generation: RunningRequest, prompts: Sequence[RunningRequest]) -> bool:
        """Whether a new answer's first tokens take less time than each waiting prompt.

        A short prompt may wait behind an overdue long one, so all prompts count.
        """
        first = _FIRST_TOKENS - generation.num_generated
        if first <= 0 or generation.background:
            return False
        awaited = (prompt for prompt in prompts if not prompt.background)
        return all(self.token_budget.is_sooner_done(first, each.num_to_launch, each.num_launched) for each in awaited)

    def _awaits_first_token(self, prompts: Sequence[RunningRequest]) -> bool:
        """Whether the step under way chooses a first token whose successors go before each waiting prompt."""
        first = (each for each in self.running if each.will_decode and not each.num_generated)
        return self.token_budget.may_defer_decodes and any(
            self._goes_before(generation, prompts) for generation in first
        )

    def _may_prefill_more(self, prompt: RunningRequest) -> bool:
        left = prompt.num_to_launch
        whole = max(prompt.computed_prompt_tokens, left)
        return (
            not prompt.background
            and self.token_budget.is_short(whole)
            and self.token_budget.may_prefill_more(left, prompt.num_launched)
        )

    def _next_to_decode(self, decoding: Sequence[RunningRequest]) -> list[RunningRequest]:
        if not decoding:
            return []
        decoder = min(decoding, key=lambda generation: generation.decoded_at).current.decoder
        together = [generation for generation in decoding if generation.current.decoder == decoder]
        self._decode_steps += 1
        for generation in together:
            generation.decoded_at = self._decode_steps
        return together

    def _chunk_for(self, prompt: RunningRequest, *, contended: bool) -> int:
        """A chunk that crosses a block boundary ends on one, or with the prompt; also at the next checkpoint."""
        largest = self.token_budget.chunk_tokens(prompt.num_launched, contended=contended)
        left, to_boundary = prompt.num_to_prefill, BLOCK_SIZE - prompt.num_launched % BLOCK_SIZE
        if prompt.snapshots is not None:
            left = min(left, prompt.snapshots.next_after(prompt.num_launched) - prompt.num_launched)
        if left <= largest:
            return left
        if largest < to_boundary:
            return _equal_part(min(left, to_boundary), largest)
        return largest - (prompt.num_launched + largest) % BLOCK_SIZE


def _equal_part(num_tokens: int, largest: int) -> int:
    """The first of the fewest equal parts: a short last one would cost nearly as much."""
    parts = -(-num_tokens // largest)
    return -(-num_tokens // parts)


def _rank(generation: RunningRequest) -> tuple[bool, float]:
    return generation.background, generation.submitted_at


def _prompt_rank(prompt: RunningRequest) -> tuple[int, bool, int, float]:
    """Order of prompts: overdue, interactive, shortest."""
    overdue = prompt.passed_over if prompt.passed_over >= _MOST_TIMES_PASSED_OVER and not prompt.background else 0
    return -overdue, prompt.background, prompt.num_to_launch, prompt.submitted_at


def _pass_over(generations: Iterable[RunningRequest]) -> None:
    for generation in generations:
        generation.passed_over += 1
        generation.background &= generation.passed_over < _BACKGROUND_PATIENCE
