"""Plays turns, says what the context is now, and waits to be killed.

`python -m tests.serving.finish_turns MODEL CACHE LENGTH…`
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from tests.serving.conversation import TokenTalk, open_llm


def main(model: str, cache_dir: str, *lengths: str) -> None:
    with open_llm(Path(model), Path(cache_dir)) as llm:
        talk = TokenTalk()
        for length in lengths:
            talk.turn(llm, int(length))
        print(json.dumps(talk.ids), flush=True)
        time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
