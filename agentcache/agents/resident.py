from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from agentcache.blocks.ledger import TRANSCRIPTS, UNBOUNDED, Ledger
from agentcache.blocks.transcript import Transcript

_LEAST_BUDGET = 16 << 20
_SHARE = 64  # divisor of the RAM budget; transcripts get that part on top of it


def transcript_budget(ram_budget: int) -> int:
    return max(_LEAST_BUDGET, ram_budget // _SHARE)


class ResidentTranscripts:
    """Keeps recently used transcripts in RAM, within a budget. Engine thread only.

    Unsaved transcripts stay. Requests own the copies of evicted ones that they read.
    """

    def __init__(self, ledger: Ledger, budget: int) -> None:
        self._budget = budget
        self._account = ledger.open(TRANSCRIPTS, apart=UNBOUNDED, floor=budget)
        self._kept: OrderedDict[str, tuple[Transcript, int]] = OrderedDict()

    def keep(self, name: str, transcript: Transcript) -> None:
        known, num_bytes = self._kept.get(name, (None, 0))
        if known is not transcript:
            self.forget(name)
            if not transcript.is_kept:
                return
            num_bytes = transcript.content().num_bytes
            self._account.claim(num_bytes)
        self._kept[name] = transcript, num_bytes
        self._kept.move_to_end(name)

    def forget(self, name: str) -> None:
        if name in self._kept:
            _, num_bytes = self._kept.pop(name)
            self._account.release(num_bytes)

    def trim(self, is_needed: Callable[[str], bool]) -> None:
        excess, leaving = self._account.claimed - self._budget, list[str]()
        for name, (transcript, num_bytes) in self._kept.items():
            if excess <= 0:
                break
            if transcript.is_stored and not is_needed(name):
                leaving.append(name)
                excess -= num_bytes
        for name in leaving:
            self._kept[name][0].leave_ram()
            self.forget(name)
