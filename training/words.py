from __future__ import annotations

import hashlib
from random import Random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    """Ada Adam Agnes Alan Alba Alice Alma Amos Anna Anton Arne Astrid Ben Bella Bert Bob Boris Carl Carla Cecil
    Clara Cora Daisy Dan Dana David Dora Edda Edgar Ella Elsa Emil Emma Eric Erik Esther Eva Felix Finn
    Flora Frank Frida Fred Georg Gina Greta Gus Hanna Hans Harry Hugo Ida Igor Ines Iris Ivan Jack Jana
    Jasper Joan Jonas Jude Julia Karl Kate Klara Kurt Lara Lars Laura Leo Lena Lina Louis Lucy Luke Mara
    Marc Maria Max Mia Milo Nadia Nell Nick Nils Nina Nora Olga Oscar Otto Paul Pia Piet Quinn Rita Rob Rosa
    Ruth Sam Sara Selma Simon Sonja Stella Sven Tara Tess Theo Tilda Tim Tom Una Vera Victor Walter Wanda
    Willa Yara Zeno Zoe"""
)
CITIES = _words(
    """Riga Oslo Bern Rome Paris Lisbon Prague Vienna Berlin Dublin London Madrid Moscow Athens Warsaw Zagreb
    Geneva Milan Turin Porto Ghent Bruges Kiel Bremen Hamburg Munich Leipzig Dresden Krakow Tallinn Vilnius
    Bergen Malmo Aarhus Turku Cairo Tunis Dakar Lagos Nairobi Delhi Mumbai Tokyo Kyoto Osaka Seoul Lima
    Quito Bogota Havana Boston Denver Dallas Toronto Ottawa Sydney Perth"""
)
PLACES = _words(
    """harbour mill tower cellar chapel stable barn bakery library market bridge station garden kitchen attic
    school theatre museum hospital factory brewery tavern castle temple forest quarry mine lighthouse
    boathouse workshop laundry bank prison archive greenhouse orchard vineyard cemetery fountain square
    tunnel depot pharmacy bookshop barracks church courtyard dairy ferry gallery hotel jetty kiosk lodge
    meadow nursery pier reservoir sawmill smithy tannery warehouse windmill zoo"""
)
THINGS = _words(
    """ring lamp coin map letter watch knife book cup crown flute violin mirror necklace painting statue sword
    shield vase bell candle compass carpet chest clock dagger diary drum feather flag goblet hammer harp
    helmet jewel kettle ladder lantern locket lute mask medal needle pearl pipe plate purse quilt rope
    saddle scroll shovel spoon stamp suitcase telescope ticket trumpet umbrella wallet whistle wig"""
)
ANIMALS = _words(
    """cat dog goat horse rabbit parrot turtle hamster donkey pigeon raven goose duck hen sheep cow pig mule ferret
    lizard snake frog swan falcon fox badger beaver camel pony canary"""
)
TRADES = _words(
    """baker tailor doctor lawyer painter carpenter farmer sailor teacher plumber mason potter weaver butcher
    barber gardener fisher miner nurse pilot singer dancer writer judge banker broker clerk cook driver
    guard hunter jeweller locksmith mechanic porter shepherd tanner watchmaker"""
)
FOODS = _words(
    """bread soup rice cheese honey apples plums cherries grapes lemons figs dates nuts beans peas carrots onions
    potatoes cabbage spinach mushrooms olives salmon herring trout cake pancakes dumplings noodles porridge
    chocolate pudding yoghurt waffles pickles pears peaches melons ham sausages"""
)
COLOURS = _words("red blue green yellow white black brown grey purple orange pink golden silver copper")
HOURS = _words("one two three four five six seven eight nine ten eleven twelve")
YEARS = _words("two three four five six seven eight nine ten eleven twelve fifteen twenty thirty")
TITLES = _words("warden inspector judge captain sheriff constable")

LISTS: dict[str, tuple[str, ...]] = {
    "name": NAMES,
    "city": CITIES,
    "place": PLACES,
    "thing": THINGS,
    "animal": ANIMALS,
    "trade": TRADES,
    "food": FOODS,
    "colour": COLOURS,
    "hour": HOURS,
    "years": YEARS,
}
_CAPITALISED = frozenset({"name", "city"})
_INVENTABLE = frozenset({"name", "city", "place", "thing", "animal", "food"})
_CONSONANTS = _words("b d f g h j k l m n p r s t v w z br dr fl gr kl pr st tr")
_VOWELS = _words("a e i o u ai oo")
_ONE_HELD_OUT_IN = 8


def held_out(subject: str, value: str) -> bool:
    """Whether training never states this pair."""
    digest = hashlib.blake2b(f"{subject}|{value}".lower().encode(), digest_size=2).digest()
    return int.from_bytes(digest, "big") % _ONE_HELD_OUT_IN == 0


class Words:
    """Words by kind; `invented` is the share of random ones."""

    def __init__(self, random: Random, invented: float = 0.0) -> None:
        self._random = random
        self._invented = invented
        self._left: dict[str, list[str]] = {}

    def draw(self, kind: str) -> str:
        if kind == "code":
            return f"{self._random.randrange(1000, 10000)}"
        if kind in _INVENTABLE and self._random.random() < self._invented:
            return self._invent(kind in _CAPITALISED)
        left = self._left.get(kind)
        if not left:
            left = self._left[kind] = self._random.sample(LISTS[kind], len(LISTS[kind]))
        return left.pop()

    def _invent(self, capitalised: bool) -> str:
        syllables = self._random.choice((2, 2, 3))
        word = "".join(self._random.choice(_CONSONANTS) + self._random.choice(_VOWELS) for _ in range(syllables))
        return word.capitalize() if capitalised else word
