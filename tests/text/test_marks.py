from __future__ import annotations

import pytest

from agentcache.errors import UnsupportedModel
from agentcache.text.marks import Marks
from agentcache.text.messages import with_strings


class TestMarks:
    marks = Marks(["<|im|>", "<|im_end|>", "<s>"])

    def test_there_and_back(self) -> None:
        marked = self.marks.mark("a<|im_end|>b<s><|im|>")
        assert marked == "a\U0010f801b\U0010f802\U0010f800"
        assert self.marks.unmark(marked) == "a<|im_end|>b<s><|im|>"

    def test_reserved_characters_of_a_user_become_replacement_characters(self) -> None:
        assert self.marks.mark("a\U0010f800b\U0010fffd") == "a\ufffdb\ufffd"

    def test_tokens_inside_a_mark_end_with_the_next_token_that_ends_outside(self) -> None:
        found = self.marks.marked_ends("ab<s>cd", [1, 3, 4, 6, 6, 7])
        assert found.text == "ab\U0010f802cd"
        assert found.ends == [1, 4, 4, 4, 4, 5]

    def test_tokens_that_end_with_a_mark_keep_to_it(self) -> None:
        found = self.marks.marked_ends("<s><s>x", [1, 3, 4, 6, 7])
        assert found.ends == [1, 1, 2, 2, 3]

    def test_text_without_marks_stays(self) -> None:
        found = self.marks.marked_ends("abc", [1, 3])
        assert (found.text, found.ends) == ("abc", [1, 3])

    def test_many_special_tokens_have_distinct_marks(self) -> None:
        marks = Marks([f"<{index}>" for index in range(5000)])
        assert marks.unmark(marks.mark("<0><4999>")) == "<0><4999>"
        assert len(set(marks.mark_of.values())) == 5000


class TestSeals:
    @pytest.mark.parametrize("number", [1, 1022, 1023, 1024, 2046, 2047, 32_000])
    def test_no_text_of_a_client_holds_one(self, number: int) -> None:
        specials = [f"<{index}>" for index in range(number)]
        marks = Marks(specials)
        text = "".join(specials[:5] + specials[-5:])
        sealed = marks.seals.seal(text)
        assert len(sealed) == min(2 * number, 10)
        assert set(marks.mark(sealed)) == {"\ufffd"}
        assert set(sealed).isdisjoint(marks.mark_of.values())
        assert marks.mark_unsealed((sealed + text).encode()) == text + marks.mark(text)

    def test_more_special_tokens_than_characters(self) -> None:
        with pytest.raises(UnsupportedModel, match="too many"):
            Marks([f"<{index}>" for index in range(33_000)])

    def test_marks_are_where_they_were(self) -> None:
        """Transcripts on disk hold them."""
        assert Marks(["<s>"] * 2046).mark("<s>") == "\U0010fffd"
        assert Marks(["<s>"] * 2047).mark("<s>") == "\U001007fe"


def test_keys_that_marking_makes_equal_stay_apart() -> None:
    marks = Marks(["<s>"])
    keys = ["\U0010f800", "\U0010f801", "\ufffd", "<s>", "a"]
    changed = with_strings({"x": [dict.fromkeys(keys, "<s>")], "role": 1}, marks.mark)
    mark = marks.mark("<s>")
    assert changed == {"x": [dict.fromkeys(["\ufffd", "\ufffd\ufffd", "\ufffd" * 3, mark, "a"], mark)], "role": 1}
