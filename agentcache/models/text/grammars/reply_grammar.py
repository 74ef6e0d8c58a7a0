"""From the form that an answer must have to a grammar of all that the model writes: thoughts, markers, text, calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llguidance import LLMatcher

from agentcache.answer_form import AnswerForm, CallableTool, Calls, Notation, TextForm
from agentcache.errors import InvalidRequest
from agentcache.models.text.grammars.call_syntax import CallSyntax, call_syntax
from agentcache.models.text.grammars.json_schema import json_rule
from agentcache.models.text.marks import any_of
from agentcache.models.text.replies.calls import SPACE
from agentcache.models.text.replies.format import HARMONY, ReplyFormat

# What the readers of all dialects take for a name.
_CALLABLE_NAME = re.compile(r"[\w./\-]{1,256}")
# Masks are computed token by token: what is forced needs no exception, and no tokenizer.
_HEADER = '%llguidance {"no_forcing": true}\n'
_CALLS_FOLLOW = "<|python_tag|>"  # Llama's marker for what it seldom marks
_WHITE_SPACE = "/[ \\n\\r\\t]{0,4}/"
_ANY_TEXT = "/(?s:.*)/"


@dataclass(frozen=True)
class Part:
    """A part of a grammar that comes from the request: the right side of a rule, or a grammar of its own.

    Args:
        param: of the request, for errors about it.
    """

    source: str
    param: str
    is_grammar: bool = False

    @property
    def whole(self) -> str:
        """As a Lark grammar of its own."""
        return self.source if self.is_grammar else f"{_HEADER}start: {self.source}\n"


@dataclass(frozen=True)
class ReplyGrammar:
    """A grammar, and the parts of it that come from the request."""

    text: str
    parts: tuple[Part, ...]


def reply_grammar(form: AnswerForm, reply: ReplyFormat, prompt_end: str | None) -> ReplyGrammar:
    """The grammar of a whole reply.

    Args:
        reply: how the model writes.
        prompt_end: the end of a chat's marked prompt, in which a thought may have been opened; None for raw text.

    Raises:
        InvalidRequest: a schema is none, or a tool has a name that no call can have.
    """
    return _Writer(reply).write(form, prompt_end)


class _Writer:
    """Puts a grammar together, rule by rule."""

    def __init__(self, reply: ReplyFormat) -> None:
        self._reply = reply
        self._ids = {token.name: token.id for token in reply.tokens}
        self._names = any_of(self._ids)
        self._rules: list[str] = []
        self._parts: list[Part] = []

    def write(self, form: AnswerForm, prompt_end: str | None) -> ReplyGrammar:
        if prompt_end is None:
            start = self._body(form)
        elif self._reply.dialect == HARMONY:
            start = self._harmony(form, prompt_end)
        else:
            start = self._marked(form, prompt_end)
        text = _HEADER + f"start: {start}\n" + "".join(f"{rule}\n" for rule in self._rules)
        grammars = [{"name": "reply", "lark_grammar": text}]
        grammars += [{"name": "text", "lark_grammar": part.source} for part in self._parts if part.is_grammar]
        return ReplyGrammar(json.dumps({"grammars": grammars}), tuple(self._parts))

    # -- thoughts -----------------------------------------------------------------------------------------------------

    def _marked(self, form: AnswerForm, prompt_end: str) -> str:
        """A body, behind thoughts where the model has any (see `MarkedReader.begin`)."""
        body, pairs = self._body(form), self._reply.thoughts
        end = prompt_end.rstrip(SPACE)
        opened = next((close for start, close in pairs if end.endswith(start)), None)
        if opened is not None:
            return f"{self._thought_until(opened)} {_WHITE_SPACE} ({body})"
        if not pairs or any(end.endswith(close) for _, close in pairs):
            return body
        thoughts = [f"{self._spelled(start)} {self._thought_until(close)}" for start, close in pairs]
        if self._reply.thinks_first:
            start, close = pairs[0]
            return f"({self._spelled(start)})? {self._thought_until(close)} {_WHITE_SPACE} ({body})"
        return f"(({' | '.join(thoughts)}) {_WHITE_SPACE})? ({body})"

    def _thought_until(self, close: str) -> str:
        """Any text up to the marker that ends it."""
        pieces = list(self._pieces(close))
        first = pieces[0]
        if isinstance(first, int):
            return f"{_ANY_TEXT} {self._spelled(close)}"
        # No token: the text ends where it is first spelled.
        rest = "".join(" " + _element(piece) for piece in pieces[1:])
        return self._rule(f"/(?s:.*){_escaped(first)}/", "[lazy]") + rest

    # -- what is said -------------------------------------------------------------------------------------------------

    def _body(self, form: AnswerForm) -> str:
        ways = [self._text(form.text)] if form.text is not None else []
        if form.calls is not None and (syntax := self._syntax(form)) is not None:
            ways.append(self._calls(form.calls, syntax))
        return " | ".join(ways)

    def _syntax(self, form: AnswerForm) -> CallSyntax | None:
        """How calls are written; None where they could not be told from the text, which then is all there may be."""
        syntax = call_syntax(self._reply)
        if form.text is None or not syntax.is_bare:
            return syntax
        return syntax.behind(_CALLS_FOLLOW) if _CALLS_FOLLOW in self._ids else None

    def _text(self, text: TextForm) -> str:
        if text.notation is Notation.JSON_SCHEMA:
            return self._json(text.definition, text.param)
        source = text.definition
        try:
            source.encode()
        except UnicodeEncodeError:
            message = f"{text.param} cannot be used: it holds a lone surrogate, which is no character."
            raise InvalidRequest(message, param=text.param) from None
        if text.notation is Notation.REGEX:
            source = json.loads(LLMatcher.grammar_from_regex(source))["grammars"][0]["lark_grammar"]
        self._parts.append(Part(source, text.param, is_grammar=True))
        return "@text"

    def _json(self, definition: str, param: str, *, must_be_object: bool = False) -> str:
        try:
            source = json_rule(definition, must_be_object=must_be_object)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{param} cannot be used as a JSON schema: {error!s:.200}.", param=param) from None
        self._parts.append(Part(source, param))
        return self._rule(source)

    # -- calls --------------------------------------------------------------------------------------------------------

    def _calls(self, calls: Calls, syntax: CallSyntax) -> str:
        opened = [
            f"{self._spelled(syntax.opened(tool.name))} {self._arguments(tool)}" for tool in _callable(calls.tools)
        ]
        call = self._rule(f"({' | '.join(opened)}) {self._spelled(syntax.close)}")
        further = "" if calls.just_one else f"({self._spelled(syntax.between)} {call})*"
        return self._rule(f"{self._spelled(syntax.begin)} {call} {further} {self._spelled(syntax.end)}")

    def _arguments(self, tool: CallableTool) -> str:
        return self._json(tool.schema, tool.param, must_be_object=True)

    # -- Harmony ------------------------------------------------------------------------------------------------------

    def _harmony(self, form: AnswerForm, prompt_end: str) -> str:
        channel, message = self._spelled("<|channel|>"), self._spelled("<|message|>")
        between = f"{self._spelled('<|end|><|start|>assistant')}"
        # What is said in between counts as text.
        kinds = '"analysis"' if form.calls is None or form.text is not None else '("analysis" | "commentary")'
        thought = f"{channel} {kinds} {message} {_ANY_TEXT} {between}"
        ways = []
        if form.text is not None:
            kind = f'(" "? {self._spelled("<|constrain|>json")})?'
            ways.append(f'{channel} "final" {kind} {message} ({self._text(form.text)})')
        if form.calls is not None:
            ways += [self._message_to(tool) for tool in _callable(form.calls.tools)]
        if "<|channel|>" not in prompt_end.rpartition("<|start|>")[2]:
            return f"({thought})* ({' | '.join(ways)})"
        if form.text is not None:  # the prompt has begun the message itself
            return self._text(form.text)
        return f"{_ANY_TEXT} {between} ({thought})* ({' | '.join(ways)})"

    def _message_to(self, tool: CallableTool) -> str:
        to, channel, message = f" to=functions.{tool.name}", self._spelled("<|channel|>"), self._spelled("<|message|>")
        kind = f'(" json" | " "? {self._spelled("<|constrain|>json")})?'
        headers = f'({channel} {_literal("commentary" + to)} | {_literal(to)} {channel} "commentary")'
        return self._rule(f"{headers} {kind} {message} {self._arguments(tool)}")

    # -- spelling -----------------------------------------------------------------------------------------------------

    def _rule(self, source: str, attributes: str = "") -> str:
        """A rule of its own; its name."""
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {source}")
        return name

    def _spelled(self, text: str) -> str:
        """A text in which markers that are tokens are those tokens, and nothing else is."""
        return " ".join(map(_element, self._pieces(text)))

    def _pieces(self, text: str) -> Iterator[str | int]:
        done = 0
        for found in self._names.finditer(text):
            if found.start() > done:
                yield text[done : found.start()]
            yield self._ids[found[0]]
            done = found.end()
        if done < len(text):
            yield text[done:]


def _callable(tools: Sequence[CallableTool]) -> Sequence[CallableTool]:
    for tool in tools:
        if _CALLABLE_NAME.fullmatch(tool.name) is None:
            message = (
                f"A call of {tool.name!r:.80} cannot be demanded: only letters, digits and ._/- may be in the name."
            )
            raise InvalidRequest(message, param=tool.name_param)
    return tools


def _element(piece: str | int) -> str:
    return f"<[{piece}]>" if isinstance(piece, int) else _literal(piece)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", "\\/")
