"""Builds a reply's grammar from an answer form."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from llguidance import LLMatcher

from agentcache.api.answer_form import AnswerForm, CallableTool, Calls, Notation, TextForm
from agentcache.api.model import HARMONY, ReplyFormat
from agentcache.errors import InvalidRequest
from agentcache.text.grammars.arguments import (
    AnyText,
    FieldWriter,
    Json,
    OneOf,
    TaggedArgument,
    Text,
    TextOfLength,
    tagged_arguments,
)
from agentcache.text.grammars.rules import Rules, element, escaped, has_surrogate, json_rule, literal
from agentcache.text.replies.call_syntax import ArgumentSyntax, CallSyntax
from agentcache.text.replies.calls import SPACE
from agentcache.text.replies.dialects import call_syntax

# Accepted by the parsers of all dialects.
_CALLABLE_NAME = re.compile(r"[\w./\-]{1,256}")
_HEADER = '%llguidance {"no_forcing": true}\n'
_CALLS_FOLLOW = "<|python_tag|>"  # Llama's call marker, which Llama seldom writes
_WHITE_SPACE = "/[ \\n\\r\\t]{0,4}/"
_ANY_TEXT = "/(?s:.*)/"
_ANY_NAME = r"/[A-Za-z_][A-Za-z0-9_.\-]{0,63}/"
_BREAK = "\n"
_MAYBE_BREAK = "/\\n?/"
_ANY_SPACE = r"[ \t\n\r]"
_CDATA = "<![CDATA["


@dataclass(frozen=True)
class Part:
    """A request's rule or whole grammar. Errors name `param`."""

    source: str
    param: str
    is_grammar: bool = False

    @property
    def whole(self) -> str:
        return self.source if self.is_grammar else f"{_HEADER}start: {self.source}\n"


@dataclass(frozen=True)
class ReplyGrammar:
    """llguidance's grammars as JSON, and their parts from the request."""

    text: str
    parts: tuple[Part, ...]


def reply_grammar(form: AnswerForm, reply: ReplyFormat, prompt_end: str | None) -> ReplyGrammar:
    """Build a reply's grammar. Raises InvalidRequest for an invalid schema or tool name.

    `prompt_end`: the marked prompt's end, which may open reasoning or calls; None for raw text.
    """
    return _Writer(reply).write(form, prompt_end)


class _Writer:
    def __init__(self, reply: ReplyFormat) -> None:
        self._reply = reply
        self._rules = Rules({token.name: token.id for token in reply.tokens})
        self._parts: list[Part] = []
        self._prompt_end = ""

    def write(self, form: AnswerForm, prompt_end: str | None) -> ReplyGrammar:
        self._prompt_end = prompt_end or ""
        if prompt_end is None:
            start = self._body(form)
        elif self._reply.dialect == HARMONY:
            start = self._harmony(form, prompt_end)
        else:
            start = self._marked(form, prompt_end)
        text = _HEADER + f"start: {start}\n" + "".join(f"{rule}\n" for rule in self._rules.lines)
        grammars = [{"name": "reply", "lark_grammar": text}]
        grammars += [{"name": "text", "lark_grammar": part.source} for part in self._parts if part.is_grammar]
        return ReplyGrammar(json.dumps({"grammars": grammars}), tuple(self._parts))

    def _marked(self, form: AnswerForm, prompt_end: str) -> str:
        body, pairs = self._body(form), self._reply.thoughts
        end = prompt_end.rstrip(SPACE)
        opened = next((close for start, close in pairs if end.endswith(start)), None)
        if opened is not None:
            return f"{self._text_until(opened)} {_WHITE_SPACE} ({body})"
        if not pairs or any(end.endswith(close) for _, close in pairs):
            return body
        thoughts = [f"{self._rules.spelled(start)} {self._text_until(close)}" for start, close in pairs]
        if self._reply.thinks_first:
            start, close = pairs[0]
            return f"({self._rules.spelled(start)})? {self._text_until(close)} {_WHITE_SPACE} ({body})"
        return f"(({' | '.join(thoughts)}) {_WHITE_SPACE})? ({body})"

    def _text_until(self, close: str) -> str:
        pieces = list(self._rules.pieces(close))
        first = pieces[0]
        if isinstance(first, int):
            return f"{_ANY_TEXT} {self._rules.spelled(close)}"
        # Not a token: its first occurrence ends the text.
        rest = "".join(" " + element(piece) for piece in pieces[1:])
        return self._rules.rule(f"/(?s:.*){escaped(first)}/", "[lazy]") + rest

    def _body(self, form: AnswerForm) -> str:
        ways = [self._text(form.text)] if form.text is not None else []
        if form.calls is not None and (syntax := self._syntax(form)) is not None:
            ways.append(self._calls(form.calls, syntax))
        return " | ".join(ways)

    def _syntax(self, form: AnswerForm) -> CallSyntax | None:
        # None if calls would be ambiguous with text.
        syntax = call_syntax(self._reply)
        if form.text is None or not syntax.is_bare:
            return syntax
        return syntax.behind(_CALLS_FOLLOW) if _CALLS_FOLLOW in self._rules.ids else None

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
        return self._rules.rule(source)

    def _calls(self, calls: Calls, syntax: CallSyntax) -> str:
        call = self._rules.rule(" | ".join(self._call(tool, syntax) for tool in _callable(calls.tools)))
        further = "" if calls.just_one else f"({self._rules.spelled(syntax.between)} {call})*"
        # The prompt may open the calls, as Functionary's does.
        begin = "" if self._prompt_end.endswith(syntax.begin) else self._rules.spelled(syntax.begin)
        return self._rules.rule(f"{begin} {call} {further} {self._rules.spelled(syntax.end)}")

    def _call(self, tool: CallableTool, syntax: CallSyntax) -> str:
        whole = self._arguments(tool)  # also rejects invalid schemas
        written = self._fields(tool, syntax) if syntax.fields is not None else None
        if written is None and syntax.as_json is not None:
            syntax = syntax.as_json
        opened, close = syntax.opened(tool.name), self._rules.spelled(syntax.close)
        tagged = None if syntax.argument is None else self._tagged(tool, syntax.argument)
        if tagged is not None:
            return f"{self._rules.spelled(opened.removesuffix(_BREAK))} {_MAYBE_BREAK} {tagged} {close}"
        return f"{self._rules.spelled(opened)} {whole if written is None else written} {close}"

    def _fields(self, tool: CallableTool, syntax: CallSyntax) -> str | None:
        assert syntax.fields is not None
        arguments = tagged_arguments(tool.schema) if syntax.fields.can_call(tool.name) else None
        return None if arguments is None else FieldWriter(self._rules, syntax.fields).fields(arguments)

    def _arguments(self, tool: CallableTool) -> str:
        return self._json(tool.schema, tool.param, must_be_object=True)

    def _tagged(self, tool: CallableTool, syntax: ArgumentSyntax) -> str | None:
        arguments = tagged_arguments(tool.schema)
        if arguments is None:
            return None
        rules = [self._tagged_argument(argument, syntax) for argument in arguments.known]
        if any(rule is None for rule in rules):
            return None
        asked = zip(arguments.known, rules, strict=True)
        written = " ".join(f"{rule}" if argument.is_required else f"({rule})?" for argument, rule in asked)
        if not arguments.any_other:
            return written
        return f"{self._named(_ANY_NAME, syntax, 'string', self._value(AnyText(), syntax, may_be_null=False))}*"

    def _tagged_argument(self, argument: TaggedArgument, syntax: ArgumentSyntax) -> str | None:
        # None if the parser might read another value.
        value, type_ = argument.value, "string"
        if isinstance(value, OneOf) and not all(_survives(text, syntax) for text in value.texts):
            return None
        if isinstance(value, Json):
            types = sorted(value.types - {"null"}) or ["null"]
            if syntax.says_type and len(types) > 1:
                return None
            type_ = types[0]
        spelled = self._value(value, syntax, may_be_null=argument.may_be_null and not syntax.says_type)
        rule = self._named(literal(argument.name), syntax, type_, spelled)
        if not (argument.may_be_null and syntax.says_type):
            return rule
        # The parser reads `null` of type string as text.
        null = f"{literal('null')} {self._rules.spelled(syntax.close)}"
        return self._rules.rule(f"{rule} | {self._named(literal(argument.name), syntax, 'null', null)}")

    def _named(self, name: str, syntax: ArgumentSyntax, type_: str, value: str) -> str:
        before, behind = self._rules.spelled(syntax.name_open), self._rules.spelled(syntax.name_closed(type_))
        opened = f"{_MAYBE_BREAK} {self._rules.spelled(syntax.value_open)}" if syntax.value_open else ""
        return self._rules.rule(f"{before} {name} {behind} {opened} {value} {_MAYBE_BREAK}")

    def _value(self, value: Text | Json, syntax: ArgumentSyntax, *, may_be_null: bool) -> str:
        around = literal(_BREAK) if syntax.on_lines else ""
        closed = self._rules.spelled(syntax.close)
        if isinstance(value, AnyText):
            return f"{around} {self._text_until(syntax.close)}"
        if isinstance(value, Json):
            return f"{around} {self._rules.rule(value.rule)} {around} {closed}"
        # One terminal: the boundary between two would be ambiguous.
        first, *rest = self._rules.pieces(syntax.close)
        end = escaped((_BREAK if syntax.on_lines else "") + first) if isinstance(first, str) else ""
        if not end and syntax.on_lines:
            end = escaped(_BREAK)
        kinds = [_characters(value, end, first if isinstance(first, str) else "", syntax)]
        if may_be_null:
            kinds.append(f"/null{end}/")
        name = self._rules.terminal(" | ".join(kinds))
        behind = [*([first] if isinstance(first, int) else []), *rest]
        return " ".join([around, name, *map(element, behind)])

    def _harmony(self, form: AnswerForm, prompt_end: str) -> str:
        channel, message = self._rules.spelled("<|channel|>"), self._rules.spelled("<|message|>")
        between = f"{self._rules.spelled('<|end|><|start|>assistant')}"
        # Commentary without a recipient counts as text.
        kinds = '"analysis"' if form.calls is None or form.text is not None else '("analysis" | "commentary")'
        thought = f"{channel} {kinds} {message} {_ANY_TEXT} {between}"
        ways = []
        if form.text is not None:
            kind = f'(" "? {self._rules.spelled("<|constrain|>json")})?'
            ways.append(f'{channel} "final" {kind} {message} ({self._text(form.text)})')
        if form.calls is not None:
            ways += [self._message_to(tool) for tool in _callable(form.calls.tools)]
        if "<|channel|>" not in prompt_end.rpartition("<|start|>")[2]:
            return f"({thought})* ({' | '.join(ways)})"
        if form.text is not None:  # the prompt has opened the message
            return self._text(form.text)
        return f"{_ANY_TEXT} {between} ({thought})* ({' | '.join(ways)})"

    def _message_to(self, tool: CallableTool) -> str:
        to = f" to=functions.{tool.name}"
        channel, message = self._rules.spelled("<|channel|>"), self._rules.spelled("<|message|>")
        kind = f'(" json" | " "? {self._rules.spelled("<|constrain|>json")})?'
        headers = f'({channel} {literal("commentary" + to)} | {literal(to)} {channel} "commentary")'
        return self._rules.rule(f"{headers} {kind} {message} {self._arguments(tool)}")


def _callable(tools: Sequence[CallableTool]) -> Sequence[CallableTool]:
    for tool in tools:
        if _CALLABLE_NAME.fullmatch(tool.name) is None:
            message = (
                f"A call of {tool.name!r:.80} cannot be demanded: only letters, digits and ._/- may be in the name."
            )
            raise InvalidRequest(message, param=tool.name_param)
    return tools


def _survives(text: str, syntax: ArgumentSyntax) -> bool:
    if syntax.close in text or text.startswith(_CDATA) or has_surrogate(text):
        return False
    return syntax.on_lines or text == text.strip(SPACE)


def _characters(value: TextOfLength | OneOf, end: str, close: str, syntax: ArgumentSyntax) -> str:
    if isinstance(value, OneOf):
        return f"/({'|'.join(map(escaped, value.texts))}){end}/"
    most = "" if value.most is None else value.most
    kinds = [f"/(?s:.{{{value.least},{most}}}){end}/"]
    if close:
        kinds.append(f"~/(?s:.*){escaped(close)}(?s:.+)/")
    if not syntax.on_lines:
        kinds += [f"~/{_ANY_SPACE}(?s:.*)/", f"~/(?s:.*){_ANY_SPACE}{end}/", f"~/{escaped(_CDATA)}(?s:.*)/"]
    return " & ".join(kinds)
