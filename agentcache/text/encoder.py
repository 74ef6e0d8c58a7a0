"""Tokenises marked text (`marks.py`)."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import cached_property
from typing import Any

import tokenizers

from agentcache.blocks.transcript import Encoding
from agentcache.compat import TokenizerWrapper
from agentcache.errors import InvalidRequest
from agentcache.text.detokenizer import DummySpace, TokenBytes
from agentcache.text.marks import MarkOffsets, Marks, any_of
from agentcache.text.work_limit import UNLIMITED, WorkLimit

_Token = tuple[int, tuple[int, int]]
_USUAL_CHARS = 6  # per token of the limit; longer texts are counted first
_PIECE_CHARS = 16_384
_CUT_TOKENS = 64  # that a cut may add
# Longer texts are a batch: tokenizers releases the GIL only for batches.
_SHORT_CHARS = 4096
_COMPOSED = 4  # most that a Unicode normal form merges
_COMPOSING = {"NFC", "NFD", "NFKC", "NFKD"}
_SPLITTING = {"ByteLevel", "Metaspace", "Split", "Digits", "Punctuation"}


class MarkedEncoder:
    """Tokenises marked text. Thread-safe.

    Sections (between control tokens) with marks use a tokenizer that knows control tokens by marks, not strings.
    """

    def __init__(self, saved: str, marks: Marks, controls: Mapping[int, str]) -> None:
        self._saved = saved
        self._marks = marks
        self._controls = controls
        self._control = any_of(controls.values())
        self._backend = _bare(saved)
        content = json.loads(saved)
        self._normalises = _normalises_controls(content, set(controls.values()))
        self._longest_token = longest_token(content)
        self._lock = threading.Lock()
        self._made_plain_backend: tokenizers.Tokenizer | None = None

    def encode(self, text: str, limit: WorkLimit = UNLIMITED) -> Encoding:
        """Tokenise without special tokens. Raises InvalidRequest for lone surrogates, and as `limit`."""
        self.check_length(len(text), limit)
        check_characters(text, None)
        limit.go_on()
        has_marks = self._marks.are_in(text)
        if limit.max_tokens is not None:
            num_chars = len(self._marks.unmark(text)) if has_marks else len(text)
            if num_chars > _USUAL_CHARS * limit.max_tokens:
                self._count(text, limit)
        whole = _encode(self._backend, text)
        if not has_marks and not (self._normalises and self._has_lookalikes(whole, text)):
            limit.check(len(whole))
            return Encoding(whole.ids, _clean_ends(whole.offsets, len(text)))
        tokens: list[_Token] = []
        for section in self._sections(whole, text):
            tokens.extend(section)
            limit.go_on()
            limit.check(len(tokens))
        return Encoding([token[0] for token in tokens], _clean_ends([token[1] for token in tokens], len(text)))

    def check_length(self, num_chars: int, limit: WorkLimit) -> None:
        """Refuse a text that is too long however tokenised."""
        if self._longest_token is not None:
            limit.check(num_chars // self._longest_token)

    def most_chars(self, limit: WorkLimit) -> int | None:
        if limit.max_tokens is None or self._longest_token is None:
            return None
        return limit.max_tokens * self._longest_token

    def _count(self, text: str, limit: WorkLimit) -> None:
        at_least = 0
        for begin in range(0, len(text), _PIECE_CHARS):
            limit.go_on()
            at_least += max(0, self._num_tokens(text[begin : begin + _PIECE_CHARS]) - _CUT_TOKENS)
            limit.check(at_least)

    def _num_tokens(self, piece: str) -> int:
        if not self._marks.are_in(piece):
            return len(self._backend.encode_batch_fast([piece], add_special_tokens=False)[0])
        # A lower bound: space at control tokens may vanish; a section may begin with a space's token.
        sections = [self._marks.unmark(section).strip() for section in self._control.split(piece)]
        plain = self._plain_backend.encode_batch_fast(sections, add_special_tokens=False)
        return sum(max(0, len(section) - 1) for section in plain) + len(sections) - 1

    def _sections(self, whole: tokenizers.Encoding, text: str) -> Iterator[Sequence[_Token]]:
        tokens = list(zip(whole.ids, whole.offsets, strict=True))
        bounds = [index for index, token in enumerate(tokens) if self._is_control(token, text)]
        control, begin, first = None, 0, 0
        for bound in [*bounds, len(tokens)]:
            end = tokens[bound][1][0] if bound < len(tokens) else len(text)
            has_lookalike = self._normalises and any(token[0] in self._controls for token in tokens[first:bound])
            if has_lookalike or self._marks.are_in(text[begin:end]):
                yield self._encode_plain(text[begin:end], begin, control)
            else:
                yield tokens[first:bound]
            if bound < len(tokens):
                yield tokens[bound : bound + 1]
                control, begin, first = tokens[bound][0], tokens[bound][1][1], bound + 1

    def _is_control(self, token: _Token, text: str) -> bool:
        # A normaliser can turn other characters into a control token.
        special = self._controls.get(token[0])
        return special is not None and (not self._normalises or special in text[slice(*token[1])])

    def _has_lookalikes(self, whole: tokenizers.Encoding, text: str) -> bool:
        found = [token for token in zip(whole.ids, whole.offsets, strict=True) if token[0] in self._controls]
        return not all(self._is_control(token, text) for token in found)

    def _encode_plain(self, section: str, begin: int, control: int | None) -> Sequence[_Token]:
        # Some tokenizers depend on the preceding control token.
        front = "" if control is None else self._marks.mark_of[self._controls[control]]
        plain = _encode(self._plain_backend, front + self._marks.unmark(section))
        offsets = MarkOffsets(self._marks, section)
        first = plain.ids.index(control) + 1 if control is not None else 0
        return [
            (token_id, (begin + offsets.low(max(start - len(front), 0)), begin + offsets.high(stop - len(front))))
            for token_id, (start, stop) in zip(plain.ids[first:], plain.offsets[first:], strict=True)
        ]

    @property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        with self._lock:  # make only one: it is large
            if self._made_plain_backend is None:
                self._made_plain_backend = _bare(_renamed(self._saved, self._marks.mark_of))
            return self._made_plain_backend


def _encode(backend: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
    if len(text) <= _SHORT_CHARS:
        return backend.encode(text, add_special_tokens=False)
    return backend.encode_batch([text], add_special_tokens=False)[0]


def _bare(saved: str) -> tokenizers.Tokenizer:
    # The post-processor also trims offsets.
    backend = tokenizers.Tokenizer.from_str(saved)
    backend.post_processor = None
    backend.no_truncation()
    backend.no_padding()
    return backend


def _normalises_controls(content: Mapping[str, Any], controls: Set[str]) -> bool:
    added = content.get("added_tokens") or ()
    return content.get("normalizer") is not None and any(
        token.get("normalized") and token["content"] in controls for token in added
    )


def _renamed(saved: str, names: Mapping[str, str]) -> str:
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
    # An empty or overlapping token gets the next one's end.
    ends = [length] * len(offsets)
    next_start = length
    for index in range(len(offsets) - 2, -1, -1):
        next_start = min(next_start, offsets[index + 1][0])
        start, end = offsets[index]
        ends[index] = ends[index + 1] if start == end or end > next_start else end
    return ends


class TextStart:
    """BOS and the space that a tokenizer adds at a text's start. Thread-safe."""

    def __init__(
        self,
        wrapper: TokenizerWrapper,
        encoder: MarkedEncoder,
        token_bytes: TokenBytes,
        added: Mapping[int, str],
        control_ids: Set[int],
    ) -> None:
        self._wrapper = wrapper
        self._encoder = encoder
        self._token_bytes = token_bytes
        self._added = added
        self._control_ids = control_ids
        self._lock = threading.Lock()

    def prompt(self, text: str) -> str:
        if not self._bos or text.startswith(self._bos):
            return text
        # Some tokenizers add a space at a text's start, but not after BOS.
        adds_space = self._space_at_start is not DummySpace.NONE and self._space_after_control is DummySpace.NONE
        begins_word = bool(text) and text[0] != " " and not any(map(text.startswith, self._added.values()))
        return self._bos + (" " if adds_space and begins_word else "") + text

    def dummy_space(self, after: int | None) -> DummySpace:
        if not self._token_bytes.strips_space or (after is not None and after not in self._control_ids):
            return DummySpace.NONE
        return self._space_at_start if after is None else self._space_after_control

    @cached_property
    def _bos(self) -> str:
        with self._lock:  # transformers changes the tokenizer's settings for every text
            with_special = self._wrapper.encode("a")
        without = self._encoder.encode("a").ids
        num_front = 0
        while num_front < len(with_special) - len(without) and with_special[num_front] in self._control_ids:
            num_front += 1
        return "".join(self._added[token_id] for token_id in with_special[:num_front])

    @cached_property
    def _space_at_start(self) -> DummySpace:
        return self._space_behind("")

    @cached_property
    def _space_after_control(self) -> DummySpace:
        front = self._bos or "".join(self._added[token_id] for token_id in sorted(self._control_ids)[:1])
        return self._space_behind(front) if front else DummySpace.NONE

    def _space_behind(self, front: str) -> DummySpace:
        if self._spaces_before_word(front + "a") == 0:
            return DummySpace.NONE
        return DummySpace.LONE if self._spaces_before_word(front + " a") == 1 else DummySpace.ANY

    def _spaces_before_word(self, text: str) -> int:
        spelled = b"".join(map(self._token_bytes, self._encoder.encode(text).ids))
        return len(spelled[:-1]) - len(spelled[:-1].rstrip(b" "))


def check_characters(text: str, param: str | None) -> None:
    """Raise InvalidRequest for a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("The text holds a lone surrogate, which is no character.", param=param) from error


def longest_token(saved: Mapping[str, Any]) -> int | None:
    """Return the most characters per token, but for absorbed white space; None if characters may be dropped."""
    model = saved["model"]
    vocabulary = model.get("vocab")
    pieces = list(vocabulary) if isinstance(vocabulary, dict) else [piece for piece, _ in vocabulary or ()]
    splits = list(_steps(saved.get("pre_tokenizer"), "pretokenizers"))
    changes = list(_steps(saved.get("normalizer"), "normalizers"))
    if not _knows_every_byte(model, pieces, splits) or not all(map(_keeps_text, splits)):
        return None
    if not all(step["type"] in _COMPOSING or _lengthens(step) for step in changes):
        return None
    added = [token["content"] for token in saved.get("added_tokens") or ()]
    factor = _COMPOSED if any(step["type"] in _COMPOSING for step in changes) else 1
    return factor * max(map(len, [*pieces, *added]), default=1)


def _steps(part: Mapping[str, Any] | None, name: str) -> Iterator[Mapping[str, Any]]:
    if part is None:
        return
    if part["type"] == "Sequence":
        for step in part[name]:
            yield from _steps(step, name)
    else:
        yield part


def _knows_every_byte(model: Mapping[str, Any], pieces: list[str], splits: list[Mapping[str, Any]]) -> bool:
    known = set(pieces)
    if model.get("byte_fallback"):
        return all(f"<0x{value:02X}>" in known for value in range(256))
    is_byte_level = any(step["type"] == "ByteLevel" for step in splits)
    return is_byte_level and sum(len(piece) == 1 for piece in known) >= 256


def _keeps_text(step: Mapping[str, Any]) -> bool:
    return step["type"] in _SPLITTING and step.get("behavior") != "Removed"


def _lengthens(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Replace":
        old = step["pattern"].get("String")
        return old is not None and len(step["content"]) >= len(old)
    return bool(step["type"] == "Prepend")
