"""Converts chats to marked text (`marks.py`), this to tokens, tokens to text."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from functools import cached_property, partial
from itertools import accumulate, groupby
from pathlib import Path

from agentcache.api.model import HARMONY, HARMONY_ENDS, MarkerToken, ReplyFormat, ThinkingVariables
from agentcache.blocks.transcript import Encoding, Spelling
from agentcache.compat import TokenizerWrapper, renders_by_code
from agentcache.errors import UnsupportedModel
from agentcache.text.chat import ChatRenderer
from agentcache.text.detokenizer import Detokenizer, TokenBytes
from agentcache.text.encoder import MarkedEncoder, TextStart, check_characters
from agentcache.text.grammars.compiler import GrammarCompiler, Vocabulary
from agentcache.text.marks import MarkedEnds, Marks, any_of
from agentcache.text.model_folder import end_tokens, load_wrapper
from agentcache.text.next_prompt import NextPrompts
from agentcache.text.replies.find_format import format_of, templates_of
from agentcache.text.template import ChatTemplate
from agentcache.text.thinking import find_variables
from agentcache.text.work_limit import UNLIMITED, WorkLimit

# DeepSeek's <｜User｜> is not flagged special.
_CONTROL_NAME = re.compile(r"<([|｜])[^<>|｜]+\1>")


class Tokenizer:
    """A Hugging Face fast tokenizer, loaded by mlx-lm. `end_tokens`: further ids that end replies.

    Raises UnsupportedModel without a fast tokenizer, and as `TokenBytes`.
    """

    def __init__(self, wrapper: TokenizerWrapper, end_tokens: Collection[int] = ()) -> None:
        backend = getattr(wrapper, "backend_tokenizer", None)
        if backend is None:
            raise UnsupportedModel(
                "The model has no fast tokenizer (tokenizer.json); slow tokenizers are not supported."
            )
        self._wrapper = wrapper
        saved: str = backend.to_str()
        added = backend.get_added_tokens_decoder()
        known_ends = (token_id for token_id in end_tokens if backend.id_to_token(token_id) is not None)
        self.eos_ids: frozenset[int] = frozenset((*wrapper.eos_token_ids, *known_ends))
        self._contents: dict[int, str] = {token_id: token.content for token_id, token in added.items()}
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.reply_format: ReplyFormat = format_of(wrapper, added, self.eos_ids)
        self.thinking: ThinkingVariables = _thinking_variables(wrapper)
        reply_markers = {token.name for token in self.reply_format.tokens}
        self.control_ids: frozenset[int] = frozenset(
            token_id
            for token_id, token in added.items()
            if token.special
            or token_id in self.eos_ids
            or (_CONTROL_NAME.fullmatch(token.content) is not None and token.content not in reply_markers)
        )
        # Harmony replies end after calls, whatever the folder says.
        if self.reply_format.dialect == HARMONY:
            enders = {token.id for token in self.reply_format.tokens if token.name in HARMONY_ENDS}
            self.eos_ids |= enders
        self.markers: dict[int, MarkerToken] = {token.id: token for token in self.reply_format.tokens}
        self._hidden_markers = {
            token.id: token.name for token in self.reply_format.tokens if token.id in self.control_ids
        }
        controls = {token_id: self._contents[token_id] for token_id in sorted(self.control_ids)}
        self.marks = Marks(list(controls.values()))
        self.encoder = MarkedEncoder(saved, self.marks, controls)
        decoder = json.loads(saved).get("decoder")
        self.token_bytes = TokenBytes(decoder, backend.id_to_token, self._contents, self.control_ids)
        self._start = TextStart(wrapper, self.encoder, self.token_bytes, self._contents, self.control_ids)
        template = ChatTemplate(wrapper, self.marks)
        self.chats = ChatRenderer(template, self.marks, self.encoder, self._start, self.reply_format)
        self.next_prompts = NextPrompts(self.chats, self.encoder, self.reply_format)
        # Reply readers treat these as markers everywhere.
        not_text = self.control_ids | self.markers.keys()
        num_ids = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=0)
        # No reference to self: a cycle would keep child processes alive.
        self.grammars = GrammarCompiler(
            partial(Vocabulary, self.token_bytes, num_ids, not_text, self.eos_ids, self.encoder)
        )

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        return cls(load_wrapper(Path(path)), end_tokens(Path(path)))

    def start(self) -> None:
        self.grammars.start()
        self.chats.start()

    def close(self) -> None:
        """End the child processes; a later call restarts them."""
        self.chats.close()
        self.grammars.close()

    def raw_prompt(self, text: str) -> str:
        """Convert to marked text: special tokens are control tokens; BOS if used."""
        text = self.marks.clean(text)
        check_characters(text, "prompt")
        return self._start.prompt(text)

    def with_markers(self, marked: MarkedEnds, token_ids: Sequence[int]) -> MarkedEnds:
        """Insert strings of control tokens that structure replies."""
        if not self._hidden_markers.keys() & set(token_ids):
            return marked
        parts: list[str] = []
        ends: list[int] = []
        done, grown = 0, 0
        for token_id, end in zip(token_ids, marked.ends, strict=True):
            name = self._hidden_markers.get(token_id)
            if name is not None:
                parts += [marked.text[done:end], name]
                done, grown = end, grown + len(name)
            ends.append(end + grown)
        return MarkedEnds("".join([*parts, marked.text[done:]]), ends)

    @cached_property
    def turn_ends(self) -> list[str]:
        """Control tokens that may end replies, not markers inside."""
        parts = {token.name for token in self.reply_format.tokens} - {"<|end|>", *HARMONY_ENDS}
        return [self._contents[token_id] for token_id in self.control_ids if self._contents[token_id] not in parts]

    @cached_property
    def controls(self) -> re.Pattern[str]:
        return any_of(self._contents[token_id] for token_id in self.control_ids)

    def encode(self, marked_text: str, limit: WorkLimit = UNLIMITED) -> Encoding:
        return self.encoder.encode(marked_text, limit)

    def spell(self, token_ids: Sequence[int]) -> Spelling:
        """Convert tokens to marked text, as `encode` would take it."""
        parts, ends = list[str](), list[int]()
        length, after = 0, None
        for is_control, group in groupby(token_ids, self.control_ids.__contains__):
            run = list(group)
            if is_control:
                names = [self._contents[token_id] for token_id in run]
                piece = MarkedEnds("".join(names), list(accumulate(map(len, names))))
            else:
                piece = self._spell_run(run, after)
            parts.append(piece.text)
            ends.extend(length + end for end in piece.ends)
            length += len(piece.text)
            after = run[-1]
        return Spelling("".join(parts), ends)

    def detokenizer(self, after: int | None = None) -> Detokenizer:
        """Return a detokenizer after a token (None: at the start) that drops a space added by `encode`."""
        return Detokenizer(self.token_bytes, self.control_ids | self.eos_ids, self._start.dummy_space(after))

    def _spell_run(self, token_ids: Sequence[int], after: int | None) -> MarkedEnds:
        detokenizer = self.detokenizer(after)
        for token_id in token_ids:
            detokenizer.add(token_id)
        detokenizer.finish()
        return self.marks.marked_ends(detokenizer.text, detokenizer.ends)


def _thinking_variables(wrapper: TokenizerWrapper) -> ThinkingVariables:
    # mlx-lm maps `enable_thinking` to variables of templates that are Python code.
    if wrapper.has_chat_template and renders_by_code(wrapper):
        return ThinkingVariables(("enable_thinking",))
    return find_variables("\n".join(templates_of(wrapper)))
