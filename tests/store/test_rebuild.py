"""A lineage of which manifest or log is damaged, rebuilt from what is proven."""

from __future__ import annotations

from agentcache.store.lineage_files import Rebuilt, ServedCache, rebuild
from agentcache.store.transcript_log import Content, start_log
from tests.growth import MOST, growth
from tests.store.store_cases import MODEL, SPEC, make_record, make_transcript


def _rebuilt_log(data: bytes) -> Rebuilt:
    found = rebuild("ada", MODEL[:16], ServedCache(SPEC), None, [data], 0.0, is_sound=False)
    assert found is not None
    return found


def _log(num_tokens: int, wrong_chain: int | None) -> bytes:
    """The log of a lineage with so many tokens, of whose chains one may be another's."""
    record = make_record("ada", make_transcript(num_tokens))
    chains = list(record.chains)
    if wrong_chain is not None:
        chains[wrong_chain] = "0" * 40
    content = Content(record.transcript, {"base": tuple(chains)}, None)
    return start_log("ada", MODEL, 1, content)[0]


def test_full_blocks_count_up_to_the_first_that_is_not_proven() -> None:
    for wrong, proven in ((None, 1000), (0, 0), (2, 512), (3, 768)):
        found = _rebuilt_log(_log(1000, wrong))
        assert found.manifest.base.num_saved == proven, wrong
        assert len(found.content.chains.get("base", ())) == -(-proven // 256)


def test_the_time_of_rebuilding_grows_as_the_lineage() -> None:
    """Of a long lineage with a chain that is wrong, the first one: each further block was looked at anew."""
    assert growth(lambda size: _log(256 * size, 0), _rebuilt_log, 100) < MOST
