"""Marked text to tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import tokenizers

from agentcache.blocks.transcript import Encoding
from agentcache.models.marks import MarkPlaces, Marks

_Token = tuple[int, tuple[int, int]]


class MarkedEncoder:
    """Tokenises marked text with one tokenizer and two readings of it.

    Text without marks goes through the tokenizer as it is. A section with marks, between two control tokens, goes
    through a copy in which every control token has its mark for a name: there its string is text like any other.

    Args:
        saved: content of tokenizer.json.
        marks: of the control tokens' strings.
        controls: the control tokens' strings by id.
    """

    def __init__(self, saved: str, marks: Marks, controls: Mapping[int, str]) -> None:
        self._saved = saved
        self._marks = marks
        self._controls = controls
        self._backend = _bare(saved)

    def encode(self, text: str) -> Encoding:
        """Tokens of marked text; adds none that the text does not ask for."""
        whole = self._backend.encode(text, add_special_tokens=False)
        if not self._marks.are_in(text):
            return Encoding(whole.ids, _clean_ends(whole.offsets, len(text)))
        tokens = [token for section in self._sections(whole, text) for token in section]
        return Encoding([token[0] for token in tokens], _clean_ends([token[1] for token in tokens], len(text)))

    def _sections(self, whole: tokenizers.Encoding, text: str) -> Iterator[Sequence[_Token]]:
        """Tokens with their offsets, section by section; control tokens part the sections."""
        tokens = list(zip(whole.ids, whole.offsets, strict=True))
        bounds = [index for index, token in enumerate(tokens) if token[0] in self._controls]
        control, begin, first = None, 0, 0
        for bound in [*bounds, len(tokens)]:
            end = tokens[bound][1][0] if bound < len(tokens) else len(text)
            if self._marks.are_in(text[begin:end]):
                yield self._encode_plain(text[begin:end], begin, control)
            else:
                yield tokens[first:bound]
            if bound < len(tokens):
                yield tokens[bound : bound + 1]
                control, begin, first = tokens[bound][0], tokens[bound][1][1], bound + 1

    def _encode_plain(self, section: str, begin: int, control: int | None) -> Sequence[_Token]:
        """Tokens of a section with marks. The control token before it goes in front: some tokenizers heed it."""
        front = "" if control is None else self._marks.mark_of[self._controls[control]]
        plain = self._plain_backend.encode(front + self._marks.unmark(section), add_special_tokens=False)
        places = MarkPlaces(self._marks, section)
        first = plain.ids.index(control) + 1 if control is not None else 0
        return [
            (token_id, (begin + places.low(max(start - len(front), 0)), begin + places.high(stop - len(front))))
            for token_id, (start, stop) in zip(plain.ids[first:], plain.offsets[first:], strict=True)
        ]

    @cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        """The tokenizer with every control token renamed to its mark, so that no text spells one."""
        return _bare(_renamed(self._saved, self._marks.mark_of))


def _bare(saved: str) -> tokenizers.Tokenizer:
    """A tokenizer that neither adds, cuts nor pads, and whose offsets no post-processor trims."""
    backend = tokenizers.Tokenizer.from_str(saved)
    backend.post_processor = None
    backend.no_truncation()
    backend.no_padding()
    return backend


def _renamed(saved: str, names: Mapping[str, str]) -> str:
    """A tokenizer.json in which the vocabulary entries and added tokens in `names` have new names and the same ids."""
    content = json.loads(saved)
    for token in content["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = content["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(piece, piece): token_id for piece, token_id in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not _makes(merge, names)]
    content["post_processor"] = None
    return json.dumps(content)


def _makes(merge: str | list[str], names: Mapping[str, str]) -> bool:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left in names or right in names or left + right in names


def _clean_ends(offsets: Sequence[tuple[int, int]], length: int) -> list[int]:
    """Where tokens end in a text of `length`. A token that overlaps the next, or has no width, ends with the next."""
    ends = [length] * len(offsets)
    next_start = length
    for index in range(len(offsets) - 2, -1, -1):
        next_start = min(next_start, offsets[index + 1][0])
        start, end = offsets[index]
        ends[index] = ends[index + 1] if start == end or end > next_start else end
    return ends
