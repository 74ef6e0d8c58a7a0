"""Filler sentences between facts; no question refers to them."""

from __future__ import annotations

from random import Random

from training.words import Words

_TEMPLATES = (
    "The rain falls on the roof of the {place} all night.",
    "A {animal} runs over the square near the {place}.",
    "It smells of {food} and cold coffee.",
    "Somewhere a door is closed, and a {animal} makes a noise.",
    "The road to {city} is long and empty at this hour.",
    "People say that the winter in {city} was hard.",
    "A {colour} light burns behind a window of the {place}.",
    "The clock of the {place} strikes {hour}, but nobody counts.",
    "Two boats come back from {city} with {food}.",
    "On the table lie a {thing} without owner and a cold plate.",
    "Nobody has swept the steps of the {place} this week.",
    "There is talk of a {trade} who left for {city} long ago.",
    "The wind turns a page of the newspaper, and then it is quiet again.",
    "Snow lies on the fences, and the river moves slowly under the ice.",
    "Children throw {colour} stones into the water behind the {place}.",
    "The evening train is late, as on every other evening.",
    "An old {trade} walks past the {place} and does not look up.",
    "All of this happened before, and it will happen again.",
    "You think of the long way home and of the people who wait there.",
    "The guard leans on the gate with a book under the arm and whistles.",
    "There are a hundred things to say, and no way to say most of them.",
    "You have walked eleven times around the yard to keep warm.",
    "It is six in the morning, and the roofs of {city} are white.",
    "Nobody will read what you write tonight, and nobody has asked you to.",
    "You like people, and people like you; that has never helped you at the {place}.",
    "She speaks in short, plain sentences and never says more than she means to say.",
    "He takes the pencil, opens the book, and lays both on the table again.",
    "The bed is too short, the window is high, and the wall is wet.",
    "Silence often tells more than an answer, as every {trade} knows.",
    "The last pages come in, and somebody carries water up the stairs.",
    "A stranger stands at the door, thinks for a while, and asks again.",
    "The shutters are opened, the doors are not, and the walls are thin.",
    "You keep the two of them apart, and you tell both of them the same.",
    "What was said is still in the air; it goes round and round like a {animal}.",
    "The office is quiet, and the archive is cold.",
    "They let everybody into the yard, because the rooms are cold.",
    "Two rooms, a wall between them, and one lamp for both: that is all there is.",
    "In this town everybody knows the {trade}, and nobody knows the {animal}.",
)
_COMMON = """
    old small quiet cold warm slow heavy empty narrow dark bright early late heart hand door window street river
    bridge stone paper pencil coat table chair lamp fire smoke voice word story day night morning winter summer
    rain wind snow corner wall room house road boat wheel bread glass water field hill tree leaf bird dog child
    woman man guard stranger walks stands waits listens looks turns sits sleeps speaks thinks remembers forgets
    carries holds opens closes leaves behind before under over near between without with against after until
    because while and but so then there here nobody somebody everything nothing again never always often
    sometimes almost
"""
_WORDS = _COMMON.split()


def scene_sentence(random: Random, words: Words) -> str:
    if random.random() < 0.25:
        chain = " ".join(random.choice(_WORDS) for _ in range(random.randrange(5, 16)))
        return f"The {chain}."
    template = random.choice(_TEMPLATES)
    kinds = ("place", "animal", "food", "city", "colour", "hour", "thing", "trade")
    return template.format(**{kind: words.draw(kind) for kind in kinds if f"{{{kind}}}" in template})


def scene(random: Random, words: Words, sentences: int) -> str:
    return " ".join(scene_sentence(random, words) for _ in range(sentences))
