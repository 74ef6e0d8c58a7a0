"""Tool-call dialogues, with arguments from the question or the last result."""

from __future__ import annotations

import json
from random import Random

from training.dialogue import Dialogue, joined
from training.facts import BY_NAME, UNKNOWN, Fact, FactMaker, OutOfWords, chained
from training.scenery import scene
from training.words import Words

# key and result
_TABLES = {
    "key": ("{s}", "the {v} key"),
    "opens": ("{s} key", "the {v}"),
    "location": ("{s}", "the {v}"),
    "home": ("{s}", "{v}"),
    "trade": ("{s}", "{v}"),
    "friend": ("{s}", "{v}"),
    "owned": ("{s}", "the {v}"),
    "code": ("{s}", "{v}"),
}
_NAMES = ("lookup", "search", "find", "query")
_HOPS = (
    ("key", "opens", "What does the key of {s} open?"),
    ("owned", "location", "Where is the thing that {s} owns?"),
    ("friend", "home", "Where does the friend of {s} live?"),
    ("friend", "trade", "What does the friend of {s} work as?"),
)


def tool_definition(name: str, description: str) -> dict[str, object]:
    parameters = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def call(name: str, key: str) -> str:
    arguments = json.dumps({"name": name, "arguments": {"key": key}})
    return f"I look up {key}.\n<tool_call>\n{arguments}\n</tool_call>"


class _ToolTalk:
    def __init__(self, random: Random, words: Words, budget: int) -> None:
        self._random, self._words = random, words
        self._tool = random.choice(_NAMES)
        self._dialogue = Dialogue(int(budget * random.uniform(0.5, 1.0)))
        self._dialogue.tools = [tool_definition(self._tool, "Looks up what is known about a person or a thing.")]
        self._dialogue.system = f"You are {words.draw('name')}."
        self._maker = FactMaker(random, words)
        self._found: list[tuple[str, str]] = []

    def write(self) -> Dialogue:
        while not self._dialogue.full:
            if self._found and self._random.random() < 0.35:
                self._dialogue.say(*self._random.choice(self._found))
                continue
            try:
                self._random.choice((self._one_hop, self._two_hops))()
            except OutOfWords:  # ends the dialogue
                self._dialogue.budget = min(self._dialogue.budget, self._dialogue.tokens)
        return self._dialogue

    def _prompt(self, question: str) -> str:
        if self._random.random() < 0.3:
            setting = scene(self._random, self._words, self._random.randrange(1, 6))
            return joined(self._random, [setting], question)
        return question

    def _one_hop(self) -> None:
        fact = self._maker.make(BY_NAME[self._random.choice(tuple(_TABLES))])
        question = fact.question(self._random)
        self._dialogue.say(self._prompt(question), call(self._tool, self._key(fact)))
        if self._random.random() < 0.1:
            self._dialogue.say(f'no entry for "{self._key(fact)}"', UNKNOWN, role="tool")
            return
        self._dialogue.say(self._value(fact), fact.answer, role="tool")
        self._found.append((question, fact.answer))

    def _two_hops(self) -> None:
        first, second, text = self._random.choice(_HOPS)
        one = self._maker.make(BY_NAME[first])
        two = self._maker.make(BY_NAME[second], one.value) if self._free(second, one.value) else None
        if two is None:
            return
        question = text.format(s=one.subject)
        self._dialogue.say(self._prompt(question), call(self._tool, self._key(one)))
        self._dialogue.say(self._value(one), call(self._tool, self._key(two)), role="tool")
        answer = chained(one, two)
        self._dialogue.say(self._value(two), answer, role="tool")
        self._found.append((question, answer))

    def _free(self, relation: str, subject: str) -> bool:
        return not self._maker.knows(BY_NAME[relation], subject)

    @staticmethod
    def _key(fact: Fact) -> str:
        return _TABLES[fact.relation.name][0].format(s=fact.subject)

    @staticmethod
    def _value(fact: Fact) -> str:
        return _TABLES[fact.relation.name][1].format(v=fact.value)


def tool_talk(random: Random, words: Words, budget: int) -> Dialogue:
    return _ToolTalk(random, words, budget).write()
