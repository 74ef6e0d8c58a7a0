"""Who has said and heard what, whatever order the turns end in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentcache.workflow.chat import Message
from agentcache.workflow.script import Script, Step, steps_of


@dataclass(frozen=True)
class Exchange:
    """What a turn adds to the speaker's history.

    Args:
        messages: from the user message that opens it to the final answer.
        text: the final answer, which is what others hear.
    """

    messages: tuple[Message, ...]
    text: str


class Conversation:
    """Owns what was said. Each agent has a history of its own, which only ever grows at the end.

    What the others said since an agent's last turn reaches it inside its next user message, in the script's order, as
    far as the turn lets it see them. A statement it was not allowed to see then is never shown to it later. All of this
    is a matter of places in the script, so that turns which do not hear each other may be taken in any order.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self._steps = steps_of(script)
        self._exchanges: dict[int, Exchange] = {}  # by index of the step

    @property
    def done(self) -> frozenset[int]:
        """Indices of the steps that are over."""
        return frozenset(self._exchanges)

    def needs(self, step: Step) -> frozenset[int]:
        """Indices of the steps that must be over before this one: all earlier phases, and in its own phase what it
        hears and what its speaker said before."""
        before = (other for other in self._steps[: step.index] if other.phase_number < step.phase_number)
        return frozenset(other.index for other in (*before, *self._own(step), *self._heard(step)))

    def message_for(self, step: Step) -> Message:
        """The user message that opens this turn: what the speaker heard since its last turn, then its prompt."""
        heard = [self._spoken(other) for other in self._heard(step)]
        return message("user", "\n\n".join([*heard, step.turn.prompt]))

    def history(self, step: Step, *, this_phase_only: bool = False) -> list[Message]:
        """The speaker's messages before this turn.

        Args:
            this_phase_only: leave out what the speaker was asked and said in earlier phases.
        """
        own = [other for other in self._own(step) if not this_phase_only or other.phase_number == step.phase_number]
        said = [each for other in own for each in self._exchanges[other.index].messages]
        system = self._script.agent(step.turn.speaker).system
        return [*([message("system", system)] if system else []), *said]

    def add(self, step: Step, exchange: Exchange) -> None:
        """The turn is over."""
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
