"""What precision is measured on: a conversation that tells facts and then asks for them.

Answers that lean on single words far back are what a coarse cache spoils first.
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
