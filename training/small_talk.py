"""Small talk: greetings, identity, and items to remember."""

from __future__ import annotations

from random import Random

from training.dialogue import NOTED, Dialogue
from training.facts import UNKNOWN
from training.words import Words

_GREETINGS = ("Hello.", "Hi!", "Good morning.", "Hello there!", "Hello")
_THANKS = ("Thank you.", "Thanks!", "Thanks")
_WHO = ("Who are you?", "What is your name?", "What are you?")
_HELP = ("What can you do?", "Can you help me?", "Help!", "How does this work?")
_SELF = "I am a small model that comes with agentcache."
_ABILITY = "Tell me facts, and ask me for them later."
_TO_REMEMBER = ("number", "word", "password", "secret", "answer", "address")
_REMEMBER = ("Remember this {what}: {v}.", "Remember: the {what} is {v}.", "The {what} is {v}.")
_RECALL = ("Which {what} did I tell you?", "What was the {what}?", "What is the {what}?")


class _SmallTalk:
    def __init__(self, random: Random, words: Words, budget: int) -> None:
        self._random, self._words = random, words
        self._dialogue = Dialogue(min(budget, random.choice((150, 300, 900))))
        name = words.draw("name") if random.random() < 0.5 else ""
        self._dialogue.system = f"You are {name}." if name else random.choice(("", "You are a helpful assistant."))
        self._who = f"I am {name}." if name else _SELF
        self._remembered: dict[str, str] = {}
        self._called: dict[str, str] = {}

    def write(self) -> Dialogue:
        turns = (self._greet, self._introduce, self._help, self._thank, self._remember, self._call, *[self._recall] * 3)
        while not self._dialogue.full:
            self._random.choice(turns)()
        return self._dialogue

    def _say(self, prompts: tuple[str, ...], answer: str) -> None:
        self._dialogue.say(self._random.choice(prompts), answer)

    def _greet(self) -> None:
        self._say(_GREETINGS, f"Hello. {self._who}")

    def _introduce(self) -> None:
        self._say(_WHO, self._who)

    def _help(self) -> None:
        self._say(_HELP, _ABILITY)

    def _thank(self) -> None:
        self._say(_THANKS, "You are welcome.")

    def _remember(self) -> None:
        what = self._random.choice(_TO_REMEMBER)
        if what not in self._remembered:
            value = self._words.draw(self._random.choice(("code", "thing", "place", "animal", "name")))
            self._remembered[what] = value
            self._dialogue.say(self._random.choice(_REMEMBER).format(what=what, v=value), f"Noted: {value}.")

    def _call(self) -> None:
        what = self._words.draw(self._random.choice(("animal", "thing")))
        self._called[what] = name = self._words.draw("name")
        self._dialogue.say(f"My {what} is called {name}.", NOTED)

    def _recall(self) -> None:
        if self._called and self._random.random() < 0.4:
            what = self._random.choice(tuple(self._called))
            self._dialogue.say(f"What is my {what} called?", f"Your {what} is called {self._called[what]}.")
            return
        what = self._random.choice(_TO_REMEMBER)
        answer = f"The {what} is {self._remembered[what]}." if what in self._remembered else UNKNOWN
        self._dialogue.say(self._random.choice(_RECALL).format(what=what), answer)


def small_talk(random: Random, words: Words, budget: int) -> Dialogue:
    return _SmallTalk(random, words, budget).write()
