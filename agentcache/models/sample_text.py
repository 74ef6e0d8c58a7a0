"""Texts for measuring precision: a conversation with facts and questions about them, prose, and code.

A coarse cache first spoils answers that depend on single distant words; prose and code depend on all earlier text.
"""

from __future__ import annotations

_FACTS = (
    "Marc lives in Cairo. Marc wears a silver coat. Alan works at the windmill. Dora has a friend called Nadia. "
    "The ladder is in the barn. Ines likes nuts best. Nadia likes figs best. The watch is in the red box.",
)
_QUESTIONS = (
    ("Where does Marc live?", "Marc lives in Cairo."),
    ("What does Nadia like best?", "Nadia likes figs best."),
    ("Where is the ladder?", "The ladder is in the barn."),
    ("What colour of coat does Marc wear?", "Marc wears a silver coat."),
    ("Where does Alan work?", "Alan works at the windmill."),
    ("Where is the watch?", "The watch is in the red box."),
)

SAMPLE = tuple(
    message
    for said, answer in (*((fact, "Noted.") for fact in _FACTS), *_QUESTIONS)
    for message in ({"role": "user", "content": said}, {"role": "assistant", "content": answer})
)

PROSE = """The ferry leaves the harbour at seven, before the fog has lifted, and the first passengers are nearly always
the same: two teachers who work on the island, a woman with a crate of bread, and the man who repairs the
clocks. Nobody talks much until the engine settles into its rhythm. Then the bread is passed around, still
warm, and somebody asks how the winter has treated the roof of the school. By the time the lighthouse comes
into view, the fog has turned into a thin white line above the water, and the conversation has moved on to the
price of fish.
"""

CODE = '''import re
from collections import Counter


def count_words(path, ignore=("the", "a", "an")):
    """Return how often each word occurs in a text file."""
    counts = Counter()
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            for word in re.findall(r"[a-z]+", line.lower()):
                if word not in ignore:
                    counts[word] += 1
    return counts


def print_report(counts, limit=10):
    for word, count in counts.most_common(limit):
        print(f"{word:<20} {count:>6}")
'''
