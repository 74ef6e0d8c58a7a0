"""Convert chat messages to marked text (`marks.py`), marked text to tokens, tokens to text."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agentcache.api.model import HARMONY, HARMONY_ENDS, MarkerToken, ReplyFormat, ThinkingVariables
from agentcache.blocks.transcript import Encoding, Spelling
from agentcache.compat import TokenizerWrapper, load_tokenizer, renders_by_code, tool_format
from agentcache.errors import ContextLengthExceeded, InvalidRequest, UnsupportedModel
from agentcache.text.chat import ChatRenderer, RenderedChat
from agentcache.text.detokenizer import Detokenizer, DummySpace, TokenBytes
from agentcache.text.encoder import MarkedEncoder, longest_token
from agentcache.text.grammars.compiler import GrammarCompiler, Vocabulary
from agentcache.text.marks import MarkedEnds, Marks, any_of
from agentcache.text.messages import with_strings
from agentcache.text.model_folder import complete_template, end_tokens
from agentcache.text.next_prompt import NextPrompts
from agentcache.text.replies.find_format import WrittenReply, find_format, write_replies
from agentcache.text.template import MAX_BYTES, ChatTemplate, RenderedTooLong, check_kwargs
from agentcache.text.thinking import find_variables
from agentcache.text.work_limit import UNLIMITED, WorkLimit

__all__ = ["Detokenizer", "Encoding", "MarkedEnds", "Tokenizer"]

_CONTROL_NAME = re.compile(r"<([|｜])[^<>|｜]+\1>")
_FAST_CLASS = "PreTrainedTokenizerFast"
_TOKENIZER_SUFFIXES = (".json", ".jinja", ".txt", ".model")
_PROBE_BYTES = 1 << 16
_UTF8_BYTES = 4  # per character


class Tokenizer:
    """A Hugging Face fast tokenizer, loaded by mlx-lm.

    Args:
        end_tokens: further ids that end a reply; unknown ids are ignored.

    Raises:
        UnsupportedModel: no fast tokenizer, or its decoder does not work token by token.
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
        self.reply_format: ReplyFormat = _find_format(wrapper, added, self.eos_ids)
        self.thinking: ThinkingVariables = _thinking_variables(wrapper)
        reply_markers = {token.name for token in self.reply_format.tokens}
        self.control_ids: frozenset[int] = frozenset(
            token_id
            for token_id, token in added.items()
            if token.special or token_id in self.eos_ids or _is_control_name(token.content, reply_markers)
        )
        # A Harmony reply ends after a call even if the folder does not list that token.
        if self.reply_format.dialect == HARMONY:
            enders = {token.id for token in self.reply_format.tokens if token.name in HARMONY_ENDS}
            self.eos_ids |= enders
        self.markers: dict[int, MarkerToken] = {token.id: token for token in self.reply_format.tokens}
        self._hidden_markers = {
            token.id: token.name for token in self.reply_format.tokens if token.id in self.control_ids
        }
        controls = {token_id: self._contents[token_id] for token_id in sorted(self.control_ids)}
        self._marks = Marks(list(controls.values()))
        self._encoder = MarkedEncoder(saved, self._marks, controls)
        content = json.loads(saved)
        self._token_bytes = TokenBytes(content.get("decoder"), backend.id_to_token, self._contents)
        self._longest_token = longest_token(content)
        self._template = ChatTemplate(wrapper, self._marks)
        self._chat = ChatRenderer(self._marks, self.reply_format, wrapper.has_chat_template)
        self._next_prompts = NextPrompts()
        self._bytes_of = partial(_bytes_of, self.control_ids, self._contents, self._token_bytes)
        # Reply readers treat marker tokens as markers everywhere: a grammar must not use them as text.
        not_text = self.control_ids | self.markers.keys()
        num_ids = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=0)
        # No reference to self: a cycle would keep the child processes alive.
        self.grammars = GrammarCompiler(
            partial(_vocabulary, self._bytes_of, self._encoder, num_ids, not_text, self.eos_ids)
        )
        self._lock = threading.Lock()

    @property
    def has_chat_template(self) -> bool:
        """Whether a template renders chats: False once it has refused every chat."""
        return self._chat.uses_template

    @property
    def has_template_file(self) -> bool:
        """Whether a chat template exists, even unused."""
        return bool(self._wrapper.has_chat_template)

    def template_repairs(self) -> tuple[str, ...] | None:
        """Return the template's `Repairs` by name; None if it is unused. The first call renders many probes.

        Raises UnsupportedModel for a syntax error in the template.
        """
        return self._chat.repairs(partial(self._probe_template, UNLIMITED))

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Load from a model folder without running its code. Raises UnsupportedModel."""
        path = Path(path)
        try:
            wrapper = load_tokenizer(path, {"trust_remote_code": False})
        except (ValueError, OSError, ImportError, LookupError, TypeError, AttributeError) as error:
            if not (path / "tokenizer.json").is_file():
                raise UnsupportedModel(f"The tokenizer in {path} cannot be loaded: {error}") from error
            wrapper = _load_without_class(path, error)
        complete_template(wrapper, path)
        return cls(wrapper, end_tokens(path))

    def start(self) -> None:
        """Start the child processes and render a chat: the first request is faster."""
        self.grammars.start()
        if self.has_chat_template:
            self._template.start()
            self.render_chat([{"role": "user", "content": "hello"}])

    def close(self) -> None:
        """End the child processes; a later call restarts them."""
        self._template.close()
        self.grammars.close()

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        return self.tell_chat(messages, tools, add_generation_prompt).text

    def tell_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        limit: WorkLimit = UNLIMITED,
    ) -> RenderedChat:
        """Render `messages` as marked text, with the template's repairs. Special-token strings in them stay text.

        Raises:
            InvalidRequest: refused by the template, time or memory limit, reserved `template_kwargs`, deep nesting.
            ContextLengthExceeded: the text is too long.
        """
        template_kwargs = template_kwargs or {}
        check_kwargs(template_kwargs)
        try:
            kwargs = with_strings(template_kwargs, self.mark)

            def render(messages: Any, tools: Any, variables: Mapping[str, Any]) -> str:
                variables = {**self._unknown(variables), **kwargs}
                return self._apply_template(messages, tools, add_generation_prompt, variables, limit)

            probe = partial(self._probe_template, limit)
            without = partial(self._without_template, add_generation_prompt)
            told = self._chat.tell(render, probe, without, messages, tools, add_generation_prompt)
        except RecursionError as error:
            raise InvalidRequest("The messages or tools are nested too deeply.", param="messages") from error
        return replace(told, text=_without_surrogates(told.text, "messages"))

    def next_prompt_leaves(
        self,
        prompt: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any],
        limit: WorkLimit = UNLIMITED,
        *,
        tells_thoughts: bool,
    ) -> int | None:
        """See `NextPrompts.left_at`."""
        if not self.has_chat_template:
            return None
        whatever_size = WorkLimit(has_ended=limit.has_ended)

        def render(shorter: Sequence[Mapping[str, Any]]) -> str:
            return self.tell_chat(shorter, tools, True, template_kwargs, whatever_size).text

        return self._next_prompts.left_at(
            prompt,
            messages,
            tools,
            template_kwargs,
            self.reply_format,
            render,
            self.encode,
            tells_thoughts=tells_thoughts,
        )

    def raw_prompt(self, text: str, *, reserved_are_marks: bool = False) -> str:
        """Convert to marked text, with special tokens as control; add BOS if the model uses it."""
        text = _without_surrogates(text if reserved_are_marks else self._marks.clean(text), "prompt")
        if not self._bos or text.startswith(self._bos):
            return text
        # Some tokenizers add a space before a text's first word, but not after BOS.
        return self._bos + (" " if self._wants_space_after_bos(text) else "") + text

    def mark(self, text: str) -> str:
        return self._marks.mark(text)

    def unmark(self, text: str) -> str:
        return self._marks.unmark(text)

    def marked_ends(self, text: str, ends: Sequence[int]) -> MarkedEnds:
        return self._marks.marked_ends(text, ends)

    def with_markers(self, marked: MarkedEnds, token_ids: Sequence[int]) -> MarkedEnds:
        """Insert the strings of control tokens that structure a reply."""
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
        """Control tokens that may end a reply, not markers inside it."""
        parts = {token.name for token in self.reply_format.tokens} - {"<|end|>", *HARMONY_ENDS}
        return [self._contents[token_id] for token_id in self.control_ids if self._contents[token_id] not in parts]

    @cached_property
    def controls(self) -> re.Pattern[str]:
        return any_of(self._contents[token_id] for token_id in self.control_ids)

    def encode(self, marked_text: str, limit: WorkLimit = UNLIMITED) -> Encoding:
        """Tokenise without adding special tokens. Raises InvalidRequest for lone surrogates."""
        self.check_length(len(marked_text), limit)
        return self._encoder.encode(_without_surrogates(marked_text, None), limit)

    def check_length(self, num_chars: int, limit: WorkLimit) -> None:
        """Refuse a text that exceeds the limit however it tokenises."""
        if self._longest_token is not None:
            limit.check(num_chars // self._longest_token)

    def spell(self, token_ids: Sequence[int]) -> Spelling:
        parts: list[str] = []
        ends: list[int] = []
        position, after = 0, None
        for control, run in _runs(token_ids, self.control_ids):
            piece = (
                MarkedEnds(self._contents[run[0]], [len(self._contents[run[0]])])
                if control
                else self._spell_run(run, after)
            )
            parts.append(piece.text)
            ends.extend(position + end for end in piece.ends)
            position += len(piece.text)
            after = run[-1]
        return Spelling("".join(parts), ends)

    def detokenizer(self, after: int | None = None) -> Detokenizer:
        """Return a detokenizer for the text after token `after`, None at a text's start.

        It drops a leading space that the tokenizer would add again.
        """
        return Detokenizer(self._token_bytes, self.control_ids | self.eos_ids, self._dummy_space(after))

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes_of(token_id)

    def _without_template(self, add_generation_prompt: bool, messages: Sequence[Mapping[str, Any]]) -> str:
        lines = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return self.raw_prompt(lines + ("assistant:" if add_generation_prompt else ""), reserved_are_marks=True)

    def _probe_template(self, limit: WorkLimit, messages: Any, tools: Any, variables: Mapping[str, Any]) -> str:
        # A probe ignores the request's token limit.
        work = WorkLimit(has_ended=limit.has_ended)
        if self._template.is_greedy(tools, work):
            raise InvalidRequest("the model's chat template takes too much for a few words", param="messages")
        try:
            return self._template.render(
                messages, tools, True, self._unknown(variables), limit=work, max_bytes=_PROBE_BYTES
            )
        except RenderedTooLong as error:
            raise InvalidRequest(f"{error} for a few words", param="messages") from None

    def _unknown(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in variables.items() if name not in self._wrapper.special_tokens_map}

    def _apply_template(
        self,
        messages: Any,
        tools: Any,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any],
        limit: WorkLimit,
    ) -> str:
        most = self._most_chars(limit)
        max_bytes = MAX_BYTES if most is None else _UTF8_BYTES * most
        try:
            return self._template.render(
                messages, tools, add_generation_prompt, template_kwargs, limit=limit, max_bytes=max_bytes
            )
        except RenderedTooLong as error:
            self.check_length(error.num_bytes // _UTF8_BYTES, limit)
            raise ContextLengthExceeded(str(error), param="messages") from None

    def _most_chars(self, limit: WorkLimit) -> int | None:
        if limit.max_tokens is None or self._longest_token is None:
            return None
        return limit.max_tokens * self._longest_token

    def _spell_run(self, token_ids: Sequence[int], after: int | None) -> MarkedEnds:
        detokenizer = self.detokenizer(after)
        for token_id in token_ids:
            detokenizer.add(token_id)
        detokenizer.finish()
        return self.marked_ends(detokenizer.text, detokenizer.ends)

    @cached_property
    def _bos(self) -> str:
        with self._lock:  # transformers changes the tokenizer's settings for every text
            with_special = self._wrapper.encode("a")
        without = self.encode("a").ids
        num_front = 0
        while num_front < len(with_special) - len(without) and with_special[num_front] in self.control_ids:
            num_front += 1
        return "".join(self._contents[token_id] for token_id in with_special[:num_front])

    def _dummy_space(self, after: int | None) -> DummySpace:
        if not self._token_bytes.strips_space or (after is not None and after not in self.control_ids):
            return DummySpace.NONE
        return self._dummy_space_at_start if after is None else self._dummy_space_after_control

    @cached_property
    def _dummy_space_at_start(self) -> DummySpace:
        return self._dummy_space_behind("")

    @cached_property
    def _dummy_space_after_control(self) -> DummySpace:
        controls = [self._contents[token_id] for token_id in sorted(self.control_ids)]
        return self._dummy_space_behind(self._bos or controls[0]) if controls else DummySpace.NONE

    def _dummy_space_behind(self, front: str) -> DummySpace:
        if self._spaces_before_word(front + "a") == 0:
            return DummySpace.NONE
        return DummySpace.LONE if self._spaces_before_word(front + " a") == 1 else DummySpace.ANY

    def _spaces_before_word(self, text: str) -> int:
        spelled = b"".join(map(self._token_bytes, self.encode(text).ids))
        return len(spelled[:-1]) - len(spelled[:-1].rstrip(b" "))

    def _wants_space_after_bos(self, text: str) -> bool:
        if self._dummy_space_at_start is DummySpace.NONE or self._dummy_space_after_control is not DummySpace.NONE:
            return False
        return bool(text) and text[0] != " " and not any(map(text.startswith, self._contents.values()))


def _load_without_class(path: Path, error: Exception) -> TokenizerWrapper:
    """Load from tokenizer.json alone: the folder's class needs another package, or is code that is never run."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        for file in path.iterdir():
            if file.suffix in _TOKENIZER_SUFFIXES and not file.name.startswith("."):
                (folder / file.name).symlink_to(file.resolve())
        config = folder / "tokenizer_config.json"
        try:
            # Refuse a truncated file: its chat template would be missing.
            names = json.loads(config.read_bytes().strip() or b"{}") if config.exists() else {}
            config.unlink(missing_ok=True)
            names = {key: value for key, value in names.items() if key != "auto_map"} | {"tokenizer_class": _FAST_CLASS}
            config.write_text(json.dumps(names), encoding="utf-8")
            return load_tokenizer(folder, {"trust_remote_code": False})
        except (ValueError, OSError, ImportError, LookupError, TypeError, AttributeError):
            raise UnsupportedModel(f"The tokenizer in {path} cannot be loaded: {error}") from error


def _is_control_name(content: str, reply_markers: Collection[str]) -> bool:
    # DeepSeek's <｜User｜> is not flagged special.
    return _CONTROL_NAME.fullmatch(content) is not None and content not in reply_markers


def _bytes_of(
    control_ids: Collection[int], contents: Mapping[int, str], token_bytes: Callable[[int], bytes], token_id: int
) -> bytes:
    return contents[token_id].encode() if token_id in control_ids else token_bytes(token_id)


def _vocabulary(
    bytes_of: Callable[[int], bytes],
    encoder: MarkedEncoder,
    num_ids: int,
    not_text: Collection[int],
    eos_ids: Collection[int],
) -> Vocabulary:
    def encode(text: str) -> Sequence[int]:
        return encoder.encode(_without_surrogates(text, None), UNLIMITED).ids

    return Vocabulary(bytes_of, num_ids, not_text, eos_ids, encode)


def _template_text(wrapper: TokenizerWrapper) -> str:
    return "\n".join(_templates(wrapper))


def _templates(wrapper: TokenizerWrapper) -> list[str]:
    template = getattr(wrapper, "chat_template", None)
    templates = template.values() if isinstance(template, Mapping) else [template]
    return [each for each in templates if isinstance(each, str)]


def _thinking_variables(wrapper: TokenizerWrapper) -> ThinkingVariables:
    # mlx-lm maps `enable_thinking` to the variable of a template that is Python code.
    if wrapper.has_chat_template and renders_by_code(wrapper):
        return ThinkingVariables(("enable_thinking",))
    return find_variables(_template_text(wrapper))


def _find_format(wrapper: TokenizerWrapper, added: Mapping[int, Any], eos_ids: Collection[int]) -> ReplyFormat:
    text = _template_text(wrapper)
    tokens = {token.content: (i, token.special or i in eos_ids) for i, token in added.items()}
    written = [] if "tool_calls" not in text or renders_by_code(wrapper) else _write_replies(wrapper)
    return find_format(text, tokens, tool_format(wrapper), written)


def _write_replies(wrapper: TokenizerWrapper) -> list[WrittenReply]:
    specials = tuple(sorted((name, str(token)) for name, token in wrapper.special_tokens_map.items()))
    return [reply for template in _templates(wrapper) for reply in write_replies(template, specials)]


def _runs(token_ids: Sequence[int], control_ids: frozenset[int]) -> Iterator[tuple[bool, Sequence[int]]]:
    """Yield single control tokens (True) and the runs between them."""
    first = 0
    for index, token_id in enumerate(token_ids):
        if token_id in control_ids:
            if first < index:
                yield False, token_ids[first:index]
            yield True, token_ids[index : index + 1]
            first = index + 1
    if first < len(token_ids):
        yield False, token_ids[first:]


def _without_surrogates(text: str, param: str | None) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("The text holds a lone surrogate, which is no character.", param=param) from error
    return text
