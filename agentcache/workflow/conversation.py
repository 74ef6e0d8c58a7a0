from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentcache.workflow.chat import Message
from agentcache.workflow.script import Script, Step, steps_of


@dataclass(frozen=True)
class Exchange:
    """Messages that a turn adds to the speaker's history, and its final answer, which other agents hear."""

    messages: tuple[Message, ...]
    text: str


class Conversation:
    """The histories of all agents. Each only grows at its end.

    Statements of other agents since the speaker's last turn are part of its next user message, in script order, if the
    turn sees them; otherwise never. This depends on positions only, so independent turns may run in any order.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self._steps = steps_of(script)
        self._exchanges: dict[int, Exchange] = {}

    @property
    def done(self) -> frozenset[int]:
        return frozenset(self._exchanges)

    def needs(self, step: Step) -> frozenset[int]:
        """Steps that must end before this one.

        All of earlier phases, and of its own those that it hears or that its speaker took.
        """
        before = (other for other in self._steps[: step.index] if other.phase_number < step.phase_number)
        return frozenset(other.index for other in (*before, *self._own(step), *self._heard(step)))

    def message_for(self, step: Step) -> Message:
        """The opening user message: statements heard since the speaker's last turn, then the prompt."""
        heard = [self._spoken(other) for other in self._heard(step)]
        return message("user", "\n\n".join([*heard, step.turn.prompt]))

    def history(self, step: Step, *, this_phase_only: bool = False) -> list[Message]:
        own = [other for other in self._own(step) if not this_phase_only or other.phase_number == step.phase_number]
        said = [each for other in own for each in self._exchanges[other.index].messages]
        system = self._script.agent(step.turn.speaker).system
        return [*([message("system", system)] if system else []), *said]

    def add(self, step: Step, exchange: Exchange) -> None:
        self._exchanges[step.index] = exchange

    def _own(self, step: Step) -> list[Step]:
        return [other for other in self._steps[: step.index] if other.turn.speaker == step.turn.speaker]

    def _heard(self, step: Step) -> Sequence[Step]:
        own = self._own(step)
        since = self._steps[own[-1].index + 1 if own else 0 : step.index]
        return [other for other in since if other.turn.speaker in step.turn.sees]

    def _spoken(self, step: Step) -> str:
        name = self._script.agent(step.turn.speaker).name
        words = self._exchanges[step.index].text.strip()
        return f"{name} said: {words}" if words else f"{name} said nothing."


def message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
