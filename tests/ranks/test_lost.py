"""A lost rank is found in whatever it has been wrapped in."""

from __future__ import annotations

import pytest

from agentcache.errors import EngineStopped, InternalError, RankLost, UnsupportedModel
from agentcache.ranks.lost import lost_rank


@pytest.mark.parametrize("wrapper", [EngineStopped, InternalError, ValueError])
@pytest.mark.parametrize(
    "first", [RankLost("gone"), RuntimeError("[ring] Receiving failed"), UnsupportedModel("layer 0: [jaccl] closed")]
)
def test_a_lost_rank_is_found_behind_other_errors(first: Exception, wrapper: type[Exception]) -> None:
    assert isinstance(lost_rank(first), RankLost)
    assert isinstance(lost_rank(_raised_in(first, wrapper, named=True)), RankLost)
    assert isinstance(lost_rank(_raised_in(first, wrapper, named=False)), RankLost)


def test_other_errors_are_no_lost_rank() -> None:
    assert lost_rank(_raised_in(RuntimeError("no memory"), EngineStopped, named=True)) is None


def test_a_circle_of_causes_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert lost_rank(first) is None


def _raised_in(first: Exception, wrapper: type[Exception], *, named: bool) -> Exception:
    try:
        try:
            raise first
        except Exception as error:
            if named:
                raise wrapper("the work has failed") from error
            raise wrapper("the work has failed")  # noqa: B904 (what libraries do)
    except wrapper as error:
        return error
