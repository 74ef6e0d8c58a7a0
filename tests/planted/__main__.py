"""`python -m tests.planted list | check | run [NAME or WING ...]`: bugs of the kind that moving code makes.

Each entry of the `*.toml` files beside this one is a bug: where it is, what it changes, and which tests are to catch
it. `run` plants them one by one in a copy of the tree: those named, or those that have no result yet, of a wing or of
all. When code moves, its entries are moved along.
"""

from __future__ import annotations

import argparse
from collections import Counter

from tests.planted.run import Bug, bugs, misplaced, read_results, run

CAUGHT = ("caught", "hung")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__)
    parser.add_argument("action", choices=("list", "check", "run"))
    parser.add_argument("names", nargs="*", help="of bugs or wings; `all` for all, `missed` for those not caught")
    chosen = parser.parse_args()
    if chosen.action == "check":
        wrong = misplaced()
        raise SystemExit("\n".join(wrong) if wrong else 0)
    results = read_results()
    if chosen.action == "run":
        for name in chosen.names or [""]:
            run([bug for bug in bugs() if _is_chosen(bug, name)])
        results = read_results()
    else:
        for bug in bugs():
            found = results.get(bug.name)
            print(f"{bug.wing:8} {bug.name:36} {found.result if found else '-':8} {found.by if found else bug.idea}")
    counts = Counter(found.result for found in results.values())
    caught = sum(counts[kind] for kind in CAUGHT)
    print(f"{caught} of {len(bugs())} are caught; {dict(counts)}")


def _is_chosen(bug: Bug, name: str) -> bool:
    """Whether `name` means the bug; of a wing, those that have no result yet."""
    found = read_results().get(bug.name)
    if name == "missed":
        return found is not None and found.result not in CAUGHT
    return name in ("all", bug.name) or (name in ("", bug.wing) and found is None)


if __name__ == "__main__":
    main()
