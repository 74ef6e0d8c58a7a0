from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from agentcache.errors import RankLost, UnsupportedModel

_BACK_ENDS: Sequence[str] = ("ring", "jaccl", "nccl", "mpi")


def lost_rank(error: BaseException) -> RankLost | None:
    """Return the `RankLost` behind `error`.

    Connection errors of `mx.distributed` back ends count, also inside an UnsupportedModel from a model's proof.
    """
    due, seen = [error], set[int]()
    while due:
        link = due.pop()
        if id(link) in seen:
            continue
        seen.add(id(link))
        if isinstance(link, RankLost):
            return link
        if isinstance(link, (RuntimeError, UnsupportedModel)) and any(f"[{name}]" in str(link) for name in _BACK_ENDS):
            lost = RankLost(f"another process that computes the model is gone: {link}")
            lost.__cause__ = link
            return lost
        due += [each for each in (link.__context__, link.__cause__) if each is not None]
    return None


@contextmanager
def naming_the_lost() -> Iterator[None]:
    """Turn connection errors inside into `RankLost` (`lost_rank`)."""
    try:
        yield
    except (RuntimeError, UnsupportedModel) as error:
        lost = lost_rank(error)
        if lost is None:
            raise
        raise lost from error
