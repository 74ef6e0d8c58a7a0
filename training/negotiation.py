"""The prisoner's dilemma as one of three agents sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from training.dialogue import Dialogue, own_facts, spoken
from training.facts import SECOND, FactMaker
from training.scenery import scene
from training.words import TITLES, Words

SILENT, SPEAK = "stay silent", "speak"
_ACTS = {SILENT: "stays silent", SPEAK: "speaks"}

ASK_ALIBI = (
    "Ask both prisoners where they were at the hour of the theft.",
    "Open the interrogation: ask for the alibis.",
)
ANSWER_ALIBI = ("Answer the {title}.", "Give the {title} your alibi.")
TELL_HIDING = (
    "Tell {other} where you hid the {loot}, and give {other} your promise.",
    "Say to {other} where the {loot} is hidden, and make your promise.",
)
REPEAT_HIDING = (
    "Repeat what {other} told you, and give {other} your promise.",
    "Say what you heard from {other}, and make your own promise.",
)
CONFIRM = ("Tell {other} what you heard as a promise.", "Repeat the promise of {other}.")
SUM_UP = ("Sum up both alibis for the record.", "Write down both alibis.")
REMEMBER = ("Remind yourself of both promises.", "Who promised what? Go through both promises.")
WHERE_LOOT = ("Remind yourself where the {loot} is.", "Think of the {loot}: where is it?")
OFFER = ("State the offer to both of them.", "Put the offer to the two prisoners.")
DECIDE = ("Give the {title} your decision.", "Decide: will you speak or stay silent?")
SENTENCE = ("Pronounce the sentence.", "Say who did what and how long each of them serves.")
LAST_WORD = ("Say your last word to {other}.", "Tell {other} what became of the promise, and where the {loot} is.")
MY_YEARS = ("How long do you serve?", "Say how many years you have to serve.")


@dataclass(frozen=True)
class Prisoner:
    name: str
    place: str
    witness: str
    promise: str
    keeps: bool

    @property
    def decision(self) -> str:
        return self.promise if self.keeps else {SILENT: SPEAK, SPEAK: SILENT}[self.promise]

    @property
    def alibi(self) -> str:
        return f"at the {self.place} with {self.witness}"


@dataclass(frozen=True)
class Game:
    title: str
    hour: str
    loot: str
    scene: str
    hiding: str
    one: Prisoner
    two: Prisoner
    years_silent: str
    years_speak: str
    years_betrayed: str

    def years(self, who: Prisoner) -> str | None:
        other = self.two if who is self.one else self.one
        if who.decision == other.decision:
            return self.years_silent if who.decision == SILENT else self.years_speak
        return None if who.decision == SPEAK else self.years_betrayed

    def fate(self, who: Prisoner) -> str:
        years = self.years(who)
        return f"{who.name} goes free" if years is None else f"{who.name} serves {years} years"

    @property
    def offer(self) -> str:
        return (
            f"If both of you stay silent, each serves {self.years_silent} years. "
            f"If both of you speak, each serves {self.years_speak} years. "
            f"If only one speaks, that one goes free and the other serves {self.years_betrayed} years."
        )

    @property
    def verdict(self) -> str:
        one, two = self.one, self.two
        return (
            f"{one.name} {_ACTS[one.decision]} and {two.name} {_ACTS[two.decision]}. "
            f"{self.fate(one)} and {self.fate(two)}."
        )


def make_game(random: Random, words: Words) -> Game:
    prisoners = [
        Prisoner(
            words.draw("name"),
            words.draw("place"),
            words.draw("name"),
            random.choice((SILENT, SILENT, SPEAK)),
            random.random() < 0.6,
        )
        for _ in range(2)
    ]
    return Game(
        title=random.choice(TITLES),
        hour=words.draw("hour"),
        loot=words.draw("thing"),
        scene=words.draw("place"),
        hiding=words.draw("place"),
        one=prisoners[0],
        two=prisoners[1],
        years_silent=words.draw("years"),
        years_speak=words.draw("years"),
        years_betrayed=words.draw("years"),
    )


class _View:
    def __init__(self, random: Random, words: Words, game: Game, budget: int) -> None:
        self.random, self.words, self.game = random, words, game
        self.scenery = max(0, int((budget * random.uniform(0.3, 0.9) - 450) / 16 / 4))
        self.dialogue = Dialogue(budget)
        self.heard: list[str] = []
        self.told: list[str] = []

    def hear(self, name: str, words: str) -> None:
        self.heard.append(spoken(name, words))

    def turn(self, forms: Sequence[str], answer: str, **names: str) -> None:
        prompt = self.random.choice(forms).format(**names)
        setting = [scene(self.random, self.words, self.random.randrange(1, self.scenery + 1))] if self.scenery else []
        if setting and self.random.random() < 0.6:
            prompt = f"{setting.pop()} {prompt}"
        if self.told and setting and self.random.random() < 0.5:
            setting = [f"{' '.join(self.told)} {setting[0]}"]
        elif self.told:
            prompt = f"{' '.join(self.told)} {prompt}"
        self.told.clear()
        self.dialogue.say("\n\n".join([*self.heard, *setting, prompt]), answer)
        self.heard.clear()


def _facts_around(view: _View, count: int) -> list[str]:
    maker = FactMaker(view.random, view.words)
    return [maker.any().statement(view.random) for _ in range(count)]


def _title(game: Game) -> str:
    return f"The {game.title}"


def _warden(view: _View) -> None:
    game, one, two = view.game, view.game.one, view.game.two
    rules = [f"The {game.loot} was stolen from the {game.scene} at {game.hour}.", f"The offer: {game.offer}"]
    view.random.shuffle(rules)
    around = _facts_around(view, view.random.randrange(0, view.scenery * 2 + 1))
    lines = [f"You are the {game.title}. You hold {one.name} and {two.name} for a theft."]
    view.dialogue.system = " ".join([*lines, *_mixed(view.random, rules, around)])
    view.turn(ASK_ALIBI, _question_of(game))
    view.hear(one.name, f"I was {one.alibi} at {game.hour}.")
    view.hear(two.name, f"I was {two.alibi} at {game.hour}.")
    if view.random.random() < 0.8:
        for name, words in _yard(game):
            view.hear(name, words)
    view.turn(SUM_UP, f"{one.name} was {one.alibi}. {two.name} was {two.alibi}.")
    view.turn(OFFER, game.offer)
    view.hear(one.name, _decision(one))
    view.hear(two.name, _decision(two))
    view.turn(SENTENCE, game.verdict)


def _question_of(game: Game) -> str:
    return f"{game.one.name} and {game.two.name}, where were you at {game.hour}, and with whom?"


def _yard(game: Game) -> list[tuple[str, str]]:
    one, two = game.one, game.two
    return [
        (one.name, f"I hid the {game.loot} in the {game.hiding}. I promise to {one.promise}."),
        (two.name, f"You hid the {game.loot} in the {game.hiding}, and you promise to {one.promise}. "
                   f"I promise to {two.promise}."),
        (one.name, f"You promise to {two.promise}, {two.name}."),
    ]  # fmt: skip


def _decision(who: Prisoner) -> str:
    keeps = "keep" if who.keeps else "break"
    return f"I promised to {who.promise}, and I {keeps} my promises. I {who.decision}."


def _prisoner(view: _View, me: Prisoner, other: Prisoner) -> None:
    game = view.game
    first = me is game.one
    secret = f"You hid the {game.loot} in the {game.hiding}."
    mine = [
        f"You were {me.alibi} at {game.hour}.",
        f"You {'keep' if me.keeps else 'break'} your promises.",
        f"You promise to {me.promise}.",
        *([secret] if first else []),
        *(fact.stated(SECOND) for fact in own_facts(view.random, view.words, me.name, view.random.randrange(0, 5))),
    ]
    view.random.shuffle(mine)
    around = _facts_around(view, view.random.randrange(0, view.scenery * 2 + 1))
    lines = [f"You are {me.name}. You and {other.name} were arrested by the {game.title} for a theft."]
    told_later = view.random.random() < 0.6
    view.dialogue.system = " ".join([*lines, *_mixed(view.random, [] if told_later else mine, around)])
    view.hear(_title(game), _question_of(game))
    if told_later:
        view.told += mine
    view.turn(ANSWER_ALIBI, f"I was {me.alibi} at {game.hour}.", title=game.title)
    names = {"other": other.name, "loot": game.loot, "title": game.title}
    yard = [words for _, words in _yard(game)]
    if first:
        view.turn(TELL_HIDING, yard[0], **names)
        view.hear(other.name, yard[1])
        view.turn(CONFIRM, yard[2], **names)
    else:
        view.hear(other.name, yard[0])
        view.turn(REPEAT_HIDING, yard[1], **names)
        if view.random.random() < 0.8:
            view.hear(other.name, yard[2])
    if view.random.random() < 0.8:
        view.hear(_title(game), f"{game.one.name} was {game.one.alibi}. {game.two.name} was {game.two.alibi}.")
    view.turn(REMEMBER, f"I promise to {me.promise}, and {other.name} promises to {other.promise}.", **names)
    if view.random.random() < 0.5:
        view.turn(WHERE_LOOT, f"The {game.loot} is in the {game.hiding}.", **names)
    view.hear(_title(game), game.offer)
    view.turn(DECIDE, _decision(me), **names)
    if first and view.random.random() < 0.5:
        view.hear(other.name, _decision(other))
        told = True
    else:
        told = view.random.random() < 0.5
        if told:
            view.hear(other.name, _decision(other))
    view.hear(_title(game), game.verdict)
    kept = "kept" if other.keeps else "broke"
    last = f"You promised to {other.promise}, and you {kept} your promise. The {game.loot} is in the {game.hiding}."
    view.turn(LAST_WORD, last, **names)
    if view.random.random() < 0.5:
        years = game.years(me)
        view.turn(MY_YEARS, "I go free." if years is None else f"I serve {years} years.", **names)


def _mixed(random: Random, lines: list[str], around: list[str]) -> list[str]:
    mixed = [*lines, *around]
    random.shuffle(mixed)
    return mixed


def negotiation(random: Random, words: Words, budget: int) -> Dialogue:
    game = make_game(random, words)
    view = _View(random, words, game, budget)
    role = random.randrange(3)
    if role == 0:
        _warden(view)
    elif role == 1:
        _prisoner(view, game.one, game.two)
    else:
        _prisoner(view, game.two, game.one)
    return view.dialogue
