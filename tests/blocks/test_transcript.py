"""A transcript: text, tokens and who wrote them stay together."""

from __future__ import annotations

from array import array

from agentcache.blocks.transcript import Transcript, TranscriptContent


def test_cut_and_extended_keep_text_ends_and_spans_together() -> None:
    transcript = (
        Transcript.empty().extended("abc", [1, 2], [1, 3], "prompt").extended("de", [4, 5], [1, 2], "generated")
    )
    assert transcript == Transcript(
        "abcde", array("I", [1, 2, 4, 5]), array("I", [1, 3, 4, 5]), (("prompt", 2), ("generated", 2))
    )
    assert transcript.cut(3) == Transcript(
        "abcd", array("I", [1, 2, 4]), array("I", [1, 3, 4]), (("prompt", 2), ("generated", 1))
    )
    assert transcript.cut(2).spans == (("prompt", 2),)
    assert transcript.cut(4) == transcript
    assert transcript.cut(0) == Transcript.empty()


def test_neighbouring_spans_of_one_kind_become_one() -> None:
    transcript = Transcript.empty().extended("a", [1], [1], "prompt").extended("b", [2], [1], "prompt")
    assert transcript.spans == (("prompt", 2),)
    assert transcript.extended("", [], [], "generated").spans == (("prompt", 2),)


def test_a_transcript_that_has_left_ram_is_read_from_its_log() -> None:
    reads: list[TranscriptContent] = []

    def read() -> TranscriptContent:
        reads.append(TranscriptContent("abc", array("I", [1, 2]), array("I", [1, 3]), (("prompt", 2),)))
        return reads[-1]

    transcript = Transcript("abc", array("I", [1, 2]), array("I", [1, 3]), (("prompt", 2),))
    transcript.leave_ram()
    assert transcript.is_kept, "no log has it"
    transcript.store_in(read)
    content = transcript.content()
    transcript.leave_ram()
    assert transcript.is_in_ram and not transcript.is_kept
    assert transcript.text == "abc" and transcript.cut(1).text == "a" and not reads, "a request holds it"
    del content
    assert not transcript.is_in_ram and (len(transcript), transcript.num_chars, transcript.num_spans) == (2, 3, 1)
    copy = transcript.copy()
    assert transcript.ids == array("I", [1, 2]) and len(reads) == 1
    assert copy == transcript and copy is not transcript
