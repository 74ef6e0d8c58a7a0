"""Dialogues of an agent in a gossip network, and of map-reduce over records."""

from __future__ import annotations

from random import Random

from training.dialogue import NOTED, Dialogue, joined, spoken
from training.facts import FOOD, LOCATION, PET, Fact, FactMaker
from training.scenery import scene
from training.words import Words

PASS_ON = ("Pass on everything you know.", "Tell your neighbours all that you know.")
NOTHING = "I know nothing."
NONE = "None."


def gossip(random: Random, words: Words, budget: int) -> Dialogue:
    dialogue = Dialogue(int(budget * random.uniform(0.5, 1.0)))
    maker = FactMaker(random, words)
    neighbours = [words.draw("name") for _ in range(random.randrange(1, 4))]
    known: list[Fact] = [maker.make(LOCATION)] if random.random() < 0.7 else []
    told = " ".join(fact.answer for fact in known)
    scenery = scene(random, words, random.randrange(1, max(2, budget // 100)))
    dialogue.system = " ".join(filter(None, [f"You are {words.draw('name')}.", _knowing(told), scenery]))
    largest = random.choice((4, 6, 10))
    while not dialogue.full:
        heard = []
        for name in random.sample(neighbours, random.randrange(0, len(neighbours) + 1)):
            fresh = [maker.make(LOCATION) for _ in range(random.randrange(0, 3)) if len(known) < largest]
            repeated = random.sample(known, random.randrange(0, len(known) + 1)) if random.random() < 0.5 else []
            said = [*repeated, *fresh]
            heard.append(spoken(name, " ".join(fact.answer for fact in said) or NOTHING))
            known += [fact for fact in said if fact not in known]
        setting = [scene(random, words, random.randrange(1, 5))] if random.random() < 0.5 else []
        answer = " ".join(fact.answer for fact in known) or NOTHING
        dialogue.say(joined(random, [*heard, *setting], random.choice(PASS_ON)), answer)
        if random.random() < 0.5 or dialogue.full:
            _ask_what_arrived(random, dialogue, maker, known)
    return dialogue


def _knowing(told: str) -> str:
    return told if told else NOTHING.replace("I ", "You ")


def _ask_what_arrived(random: Random, dialogue: Dialogue, maker: FactMaker, known: list[Fact]) -> None:
    for _ in range(random.randrange(1, 4)):
        if known and random.random() < 0.7:
            fact = random.choice(known)
            dialogue.say(fact.question(random), fact.answer)
        else:
            question = maker.unanswerable([LOCATION])
            dialogue.say(question.text, question.answer)


_ASK_RECORDS = {
    PET: ("Who keeps a {v}?", "Which of them keeps a {v}? Name them all."),
    FOOD: ("Who likes {v} best?", "Which of them likes {v} best? Name them all."),
}


def records(random: Random, words: Words, budget: int) -> Dialogue:
    dialogue = Dialogue(budget)
    relation = random.choice((PET, FOOD))
    values = [words.draw(relation.value) for _ in range(random.randrange(2, 5))]
    maker = FactMaker(random, words)
    facts = [_with_value(maker.make(relation), random.choice(values)) for _ in range(random.randrange(3, 13))]
    lines = [fact.answer for fact in facts]
    if random.random() < 0.5:
        dialogue.system = f"You are {words.draw('name')}. " + " ".join(lines)
    else:
        dialogue.say(" ".join(lines), NOTED)
    while not dialogue.full:
        setting = [scene(random, words, random.randrange(1, 6))] if random.random() < 0.5 else []
        if random.random() < 0.6:
            value = random.choice([*values, words.draw(relation.value)])
            names = [fact.subject for fact in facts if fact.value == value]
            question = random.choice(_ASK_RECORDS[relation]).format(v=value)
            dialogue.say(joined(random, setting, question), name_list(names))
        else:
            fact = random.choice(facts)
            dialogue.say(joined(random, setting, fact.question(random)), fact.answer)
    return dialogue


def _with_value(fact: Fact, value: str) -> Fact:
    return Fact(fact.relation, fact.subject, value)


def name_list(names: list[str]) -> str:
    return f"{', '.join(names)}." if names else NONE


MERGE = ("Put together what they found.", "Make one list of all the names.")


def merging(random: Random, words: Words, budget: int) -> Dialogue:
    dialogue = Dialogue(budget)
    dialogue.system = f"You are {words.draw('name')}."
    workers = [words.draw("name") for _ in range(random.randrange(2, 5))]
    findings: list[list[str]] = []
    while not dialogue.full:
        found = [[words.draw("name") for _ in range(random.randrange(0, 4))] for _ in workers]
        heard = [spoken(worker, name_list(names)) for worker, names in zip(workers, found, strict=True)]
        setting = [scene(random, words, random.randrange(1, 6))] if random.random() < 0.5 else []
        findings.append([name for names in found for name in names])
        dialogue.say(joined(random, [*heard, *setting], random.choice(MERGE)), name_list(findings[-1]))
        if random.random() < 0.4:
            dialogue.say("Repeat the last list.", name_list(findings[-1]))
    return dialogue
