"""Grammars of whole replies: what may come next, in every dialect and of every vocabulary, and what is refused."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st

from agentcache.api.answer_form import AnswerForm, CallableTool, Calls, Notation, TextForm
from agentcache.api.model import MarkerToken, ReplyFormat
from agentcache.engine.output import Output
from agentcache.errors import InvalidRequest
from agentcache.text.grammars import compiler
from agentcache.text.grammars.arguments import Json, tagged_arguments
from agentcache.text.grammars.compiler import GrammarMatcher
from agentcache.text.grammars.reply_grammar import reply_grammar
from agentcache.text.replies.calls import Tools
from agentcache.text.replies.dialects import DIALECTS, call_syntax, calling_format
from agentcache.text.replies.events import Block, Call, Reasoning, Text, blocks_of
from agentcache.text.replies.reader import open_reader
from agentcache.text.tokenizer import Tokenizer
from tests.conftest import StyledTokenizer
from tests.examples import examples
from tests.growth import MOST, growth
from tests.marks import slow
from tests.reply_formats import FAMILIES, WRITERS
from tests.schemas import SHORT_TOOLS, calling, object_schemas, of_schema, schemas, tagged_schemas
from tests.tokenizers_factory import byte_bpe

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 4}, "é": {"enum": [1, "<think>"]}},
    "required": ["a", "é"],
    "additionalProperties": False,
}
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in SHORT_TOOLS}


def start(tokenizer: Tokenizer, form: AnswerForm, prompt_end: str | None = None) -> GrammarMatcher:
    reply = calling_format(tokenizer.reply_format)
    return tokenizer.grammars.compile(reply_grammar(form, reply, prompt_end)).follow()


class Unfinished(AssertionError):
    """A walk that has not come to an end. Of walks at random one in thousands goes in circles."""


def walk(
    tokenizer: Tokenizer, following: GrammarMatcher, seed: int, most: int = 2000, closers: tuple[str, ...] = ()
) -> Iterator[int]:
    """Tokens at random of those that may follow, to the end; thoughts and lists are made likely to end.

    Args:
        closers: end what is open if they are spelled, which is made likely.
    """
    chosen = random.Random(seed)
    names = ("</think>", "[/THINK]", "<|end|>", "<channel|>")
    closing = {token for token, marker in tokenizer.markers.items() if marker.name in names}
    said = b""
    for _ in range(most):
        allowed = np.flatnonzero(np.unpackbits(following.mask().view(np.uint8), bitorder="little")).tolist()
        assert following.failure is None
        if following.is_over:
            return
        ends = [token for token in allowed if token in closing or token in tokenizer.eos_ids]
        ends = ends or (_going_on(tokenizer, said, closers, allowed, chosen) if closers else [])
        token = chosen.choice(ends if ends and chosen.random() < (0.9 if closers else 0.3) else allowed)
        said += tokenizer.token_bytes(token)
        if token in tokenizer.eos_ids:
            return
        yield token
        following.take(token)
        if following.is_over:
            return
    raise Unfinished("a short form should be complete by now")


def _going_on(
    tokenizer: Tokenizer, said: bytes, closers: tuple[str, ...], allowed: list[int], chosen: random.Random
) -> list[int]:
    """Tokens that spell more of the closer of which most is there; now and then one begins."""
    begun, closer = max((_begun(said, each.encode()), chosen.random(), each.encode()) for each in closers)[::2]
    if not begun and chosen.random() < 0.7:
        return []
    return [token for token in allowed if closer[begun:].startswith(tokenizer.token_bytes(token))]


def _begun(said: bytes, closer: bytes) -> int:
    return max(k for k in range(len(closer)) if said.endswith(closer[:k]))


def read(tokenizer: Tokenizer, prompt_end: str, token_ids: Iterator[int]) -> list[Block]:
    """What a reply says, as clients are told."""
    reply = calling_format(tokenizer.reply_format)
    output, reader = (
        Output(tokenizer.detokenizer(), markers=tokenizer.markers),
        open_reader(reply, Tools(SHORT_TOOLS), thoughts=True),
    )
    reader.begin(prompt_end)
    shown = [*(output.add(token) for token in token_ids), output.finish()]
    events = [event for each in shown for event in reader.add(each.text, each.markers)]
    return blocks_of([*events, *reader.finish(cut_off=False)])


def is_valid(text: str, schema: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))


@pytest.fixture(scope="module")
def family_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda family: Tokenizer.load(WRITERS[family](tmp_path_factory.mktemp("family"))))


@pytest.mark.parametrize("family", [slow(family) if index % 3 else family for index, family in enumerate(FAMILIES)])
def test_every_family_calls_in_its_own_dialect_and_says_what_it_must(family: str, family_tokenizer: Any) -> None:
    tokenizer: Tokenizer = family_tokenizer(family)
    prompt_end = tokenizer.chats.text([{"role": "user", "content": "hi"}], SHORT_TOOLS)[-256:]
    both = AnswerForm(of_schema(SCHEMA).text, calling(SHORT_TOOLS).calls)
    num_calls = 0
    for form in (calling(SHORT_TOOLS), calling(SHORT_TOOLS, just_one=True), of_schema(SCHEMA), both):
        for seed in range(6):
            token_ids = walk(tokenizer, start(tokenizer, form, prompt_end), seed)
            blocks = read(tokenizer, prompt_end, token_ids)
            calls = [block for block in blocks if isinstance(block, Call)]
            said = "".join(block.text for block in blocks if isinstance(block, Text))
            assert {type(block) for block in blocks} <= {Reasoning, Text, Call}
            assert all(is_valid(call.arguments, SCHEMAS[call.name]) for call in calls)
            if form.must_call:
                assert len(calls) == 1 if form.calls.just_one else calls
                assert not said or family == "harmony"
            elif not calls:
                assert is_valid(said, SCHEMA), said
            num_calls += len(calls)
    assert num_calls > 12
    tokenizer.close()


@pytest.mark.parametrize("dialect", DIALECTS)
@settings(max_examples=examples(40))
@given(schema=tagged_schemas() | object_schemas, seed=st.integers(0, 1000))
def test_what_is_demanded_is_called_in_every_dialect(
    dialect: str, schema: dict[str, Any], seed: int, chatml: Tokenizer
) -> None:
    form, reply = calling([_tool(schema)]), ReplyFormat(dialect)
    syntax = call_syntax(reply)
    argument = syntax.argument
    following = chatml.grammars.compile(reply_grammar(form, reply, "")).follow()
    tag = () if argument is None else ("\n" * argument.on_lines + argument.close,)
    if syntax.fields is not None and syntax.fields.quote:
        tag = (syntax.fields.quote,)
    try:
        text = decoded(chatml, list(walk(chatml, following, seed, closers=(*tag * 3, '"', "]", "}"))))
    except Unfinished:
        reject()  # hypothesis fails by itself where many are
    assume(_BEYOND_FLOATS.search(text) is None)  # no grammar rules such numbers out, and no reader takes them
    blocks = read_text(reply, [_tool(schema)], text, seed)
    assert blocks and all(isinstance(block, Call) for block in blocks), text
    for call in blocks:
        assert isinstance(call, Call) and is_valid(call.arguments, schema), (text, call.arguments)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(("least", "most"), [(0, 0), (0, 1), (1, 1), (0, 2), (2, 2)])
def test_lists_of_few_items(dialect: str, least: int, most: int, chatml: Tokenizer) -> None:
    numbers = {"type": "array", "items": {"type": "number"}, "minItems": least, "maxItems": most}
    schema = {"type": "object", "properties": {"a": numbers}, "required": ["a"], "additionalProperties": False}
    form, reply = calling([_tool(schema)]), ReplyFormat(dialect)
    chatml.grammars.compile(reply_grammar(form, reply, "")).follow()


@pytest.mark.parametrize("seed", range(12))
def test_where_an_argument_says_its_type_null_is_no_string(seed: int, chatml: Tokenizer) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"anyOf": [{"type": "string", "enum": ["", "b"]}, {"type": "null"}]}},
        "required": ["a"],
    }
    form, reply = calling([_tool(schema)]), ReplyFormat("kimi_k3")
    following = chatml.grammars.compile(reply_grammar(form, reply, "")).follow()
    text = decoded(chatml, list(walk(chatml, following, seed)))
    for call in read_text(reply, [_tool(schema)], text, seed):
        assert isinstance(call, Call) and is_valid(call.arguments, schema), (text, call.arguments)


_BEYOND_FLOATS = re.compile(r"\d[eE]\+?\d{3,}|\d{309,}")

FAMILIAR = {
    "type": "object",
    "properties": {
        "kind": {"type": "string", "enum": ["big one", "if a < b:\n    c"]},
        "n": {"type": "integer", "minimum": 10, "maximum": 99, "default": 20},
        "where": {"type": "array", "items": {"enum": ["<a>", "sky"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["kind", "n"],
}


def _is_own(dialect: str) -> bool:
    """Whether arguments are written in another way than as JSON, and mlx-lm has a parser for that."""
    if find_spec(f"mlx_lm.tool_parsers.{dialect}") is None:
        return False
    syntax = call_syntax(ReplyFormat(dialect))
    return syntax.argument is not None or syntax.fields is not None


@pytest.mark.parametrize("dialect", [name for name in DIALECTS if _is_own(name)])
def test_arguments_are_written_as_the_family_writes_them(dialect: str, chatml: Tokenizer) -> None:
    """mlx-lm's parser, which knows nothing else, reads the same."""
    schema = FAMILIAR
    if dialect == "function_gemma":  # of which mlx-lm's parser reads no lists
        schema = FAMILIAR | {"properties": {name: FAMILIAR["properties"][name] for name in ("kind", "n")}}
    form, reply = calling([_tool(schema)], just_one=True), ReplyFormat(dialect)
    parser = import_module(f"mlx_lm.tool_parsers.{dialect}")
    for seed in range(8):
        following = chatml.grammars.compile(reply_grammar(form, reply, "")).follow()
        text = decoded(chatml, list(walk(chatml, following, seed, closers=("]",))))
        assert '{"name"' not in text
        [call] = read_text(reply, [_tool(schema)], text, seed)
        assert isinstance(call, Call) and is_valid(call.arguments, schema)
        inside = text.removeprefix(parser.tool_call_start).removesuffix(parser.tool_call_end)
        theirs = parser.parse_tool_call(inside, [_tool(schema)])
        [theirs] = theirs if isinstance(theirs, list) else [theirs]
        assert (theirs["name"], theirs["arguments"]) == ("look", json.loads(call.arguments))


@pytest.mark.parametrize(
    "more",
    [
        {"minProperties": 1},
        {"properties": {"a": {"type": "string", "pattern": "^x"}}},
        {"properties": {"a": {"type": "string", "format": "date"}}},
        {"properties": {"a": {"type": ["string", "integer"]}}},
        {"properties": {"a b": {"type": "string"}}},
        {"properties": {"a": {"type": "object", "properties": {"b": {"$ref": "#"}}}}},
        {"properties": {"a": {"enum": [" x"]}}, "required": ["a"]},
        {"required": ["b"]},
        {"additionalProperties": {"type": "integer"}},
    ],
)
def test_what_tags_cannot_say_is_written_as_json(more: dict[str, Any], chatml: Tokenizer) -> None:
    form = calling([_tool({"type": "object"} | more)])
    following = chatml.grammars.compile(reply_grammar(form, ReplyFormat("glm47"), "")).follow()
    for token in chatml.encode("<tool_call>look\n{").ids:
        assert following.mask()[token // 32] >> (token % 32) & 1
        following.take(token)


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        ("gemma4", '<|tool_call>call:look{a:<|"|> x} y<|"|>,l:[<|"|>p,q<|"|>,<|"|><|"|>],o:{k:[1,2]}}<tool_call|>'),
        ("gemma4", "<|tool_call>call:look{n:-2,b:null}<tool_call|>"),
        ("function_gemma", "<start_function_call>call:look{a:<escape>{}<escape>,o:{},b:true}<end_function_call>"),
        ("function_gemma", "<start_function_call>call:look{l:[<escape>a, b:<escape>]}<end_function_call>"),
        ("function_gemma", "<start_function_call>call:look{}<end_function_call>"),
        ("pythonic", '<|tool_call_start|>[look(a="x)]\\n\\"", n=7, o={"k":[1]}, b=null)]<|tool_call_end|>'),
        ("pythonic", '<|tool_call_start|>[look(l=["a","b"], b=true)]<|tool_call_end|>'),
        ("pythonic", "<|tool_call_start|>[look()]<|tool_call_end|>"),
    ],
)
def test_arguments_that_are_fields(dialect: str, text: str, chatml: Tokenizer) -> None:
    """What a family writes may be written, and is read."""
    strings = {"type": "array", "items": {"type": "string"}, "maxItems": 2}
    numbers = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "string"},
            "n": {"type": "integer"},
            "l": strings,
            "o": {"anyOf": [{"type": "object", "properties": {"k": numbers}}, {"type": "null"}]},
            "b": {"type": ["boolean", "null"]},
        },
    }
    form, reply = calling([_tool(schema)], just_one=True), ReplyFormat(dialect)
    following = chatml.grammars.compile(reply_grammar(form, reply, "")).follow()
    for token in chatml.encode(text).ids:
        assert following.mask()[token // 32] >> (token % 32) & 1
        following.take(token)
    following.mask()
    assert following.is_over
    [call] = read_text(reply, [_tool(schema)], text, 0)
    assert isinstance(call, Call) and is_valid(call.arguments, schema)


def _tool(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look", "parameters": schema}}


def read_text(reply: ReplyFormat, tools: list[dict[str, Any]], text: str, seed: int) -> list[Block]:
    """What a text says that comes in pieces of random sizes."""
    reader, pieces = open_reader(reply, Tools(tools), thoughts=True), random.Random(seed)
    reader.begin("")
    events, at = [], 0
    while at < len(text):
        size = pieces.choice((1, 3, 50))
        events += reader.add(text[at : at + size])
        at += size
    return blocks_of([*events, *reader.finish(cut_off=False)])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_calls_are_read_in_pieces_of_any_size(dialect: str) -> None:
    """Also of dialects whose markers no tokenizer here has."""
    for tokens in ((), (MarkerToken("[ARGS]", 7, False),)):
        form = ReplyFormat(dialect, tokens=tokens)
        syntax, arguments = call_syntax(form), '{"at": "</x> {", "n": 2}'
        syntax = syntax.as_json or syntax
        calls = [syntax.opened(name) + arguments + syntax.close for name in ("look", "a-b.c")]
        text = syntax.begin + syntax.between.join(calls) + syntax.end
        tools = [{"type": "function", "function": {"name": name}} for name in ("look", "a-b.c")]
        for size in (1, 3, len(text)):
            reader = open_reader(ReplyFormat(dialect), Tools(tools), thoughts=True)
            reader.begin("")
            pieces = [text[at : at + size] for at in range(0, len(text), size)]
            events = [event for piece in pieces for event in reader.add(piece)]
            blocks = blocks_of([*events, *reader.finish(cut_off=False)])
            assert [(block.name, json.loads(block.arguments)) for block in blocks if isinstance(block, Call)] == [
                ("look", json.loads(arguments)),
                ("a-b.c", json.loads(arguments)),
            ]
            assert len(blocks) == 2


@pytest.mark.parametrize("style", ["byte_bpe", "byte_bpe_bos", "metaspace", "metaspace_never", "gemma"])
def test_every_kind_of_vocabulary(style: str, styled_tokenizer: StyledTokenizer) -> None:
    tokenizer = styled_tokenizer(style)
    for seed in range(4):
        detokenizer = tokenizer.detokenizer(after=None)
        for token in walk(tokenizer, start(tokenizer, of_schema(SCHEMA)), seed):
            detokenizer.add(token)
        detokenizer.finish()
        assert is_valid(detokenizer.text, SCHEMA)


def test_a_vocabulary_whose_last_word_is_full(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_bpe(tmp_path, vocab_size=478))
    assert tokenizer.vocab_size % 32 == 0
    token_ids = list(walk(tokenizer, start(tokenizer, of_schema(SCHEMA)), 1))
    assert is_valid(decoded(tokenizer, token_ids), SCHEMA)
    tokenizer.close()


@settings(max_examples=examples(100))
@given(schema=schemas, seed=st.integers(0, 1000))
def test_random_schemas_are_kept_to(schema: Any, seed: int, chatml: Tokenizer) -> None:
    token_ids = list(walk(chatml, start(chatml, of_schema(schema)), seed))
    assert is_valid(decoded(chatml, token_ids), schema)


def decoded(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, token_ids)).decode()


KEYWORDS = st.sampled_from(
    [
        "type",
        "properties",
        "items",
        "required",
        "enum",
        "const",
        "anyOf",
        "allOf",
        "oneOf",
        "not",
        "$ref",
        "$defs",
        "pattern",
        "format",
        "minLength",
        "maxItems",
        "minimum",
        "multipleOf",
        "additionalProperties",
        "prefixItems",
        "patternProperties",
        "if",
        "then",
        "uniqueItems",
        "x-guidance",
    ]
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYWORDS | st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=examples(150))
@given(schema=st.dictionaries(KEYWORDS, anything | st.sampled_from(["object", "#", "^(", "string"]), max_size=5))
def test_any_schema_is_used_or_refused(schema: dict[str, Any], chatml: Tokenizer) -> None:
    for form in (of_schema(schema), AnswerForm(calls=Calls((CallableTool("f", json.dumps(schema), "tools[0]"),)))):
        try:
            start(chatml, form, "")
        except InvalidRequest as error:
            assert error.param in ("response_format", "tools[0]")


REFUSED = [
    (Notation.REGEX, "(", "guided"),
    (Notation.REGEX, "(?=a)b", "guided"),
    (Notation.REGEX, "(((a{1000}){1000}){1000})", "guided"),
    (Notation.REGEX, "(" * 20_000 + ")" * 20_000, "guided"),
    (Notation.REGEX, "\ud800", "guided"),
    (Notation.LARK, "start: nothing", "guided"),
    (Notation.LARK, "", "guided"),
    (Notation.LARK, 'start: @reply "a"', "guided"),
    (Notation.LARK, "start: " + "(" * 20_000, "guided"),
    (Notation.LARK, "start: " + " | ".join(f'"x{i}" r' for i in range(9_000)) + '\nr: "a" r', "guided"),
    (Notation.JSON_SCHEMA, "[]", "guided"),
    (Notation.JSON_SCHEMA, '{"type": "strnig"}', "guided"),
    (Notation.JSON_SCHEMA, '{"not": {}}', "guided"),
    (Notation.JSON_SCHEMA, '{"enum": []}', "guided"),
    (Notation.JSON_SCHEMA, '{"$ref": "http://127.0.0.1/x"}', "guided"),
    (Notation.JSON_SCHEMA, '{"a": 1e999}', None),
    (Notation.JSON_SCHEMA, '{"$ref": "#"}', "guided"),
    (Notation.JSON_SCHEMA, '{"items": ' * 60 + "{}" + "}" * 60, None),
    (Notation.JSON_SCHEMA, '{"items": ' * 5_000 + "{}" + "}" * 5_000, "guided"),
    slow(Notation.JSON_SCHEMA, json.dumps({"properties": {f"p{i}": {} for i in range(9_000)}}), "guided"),  # 2 s there
    (Notation.JSON_SCHEMA, json.dumps({"enum": ["x" * 40 + str(i) for i in range(40_000)]}), "guided"),
]


@pytest.mark.parametrize(("notation", "definition", "param"), REFUSED)
def test_what_cannot_be_used_is_refused_soon(
    notation: Notation, definition: str, param: str | None, chatml: Tokenizer
) -> None:
    """Tried in a process of its own, whose time the kernel limits: next to nothing is computed here."""
    began = time.thread_time()
    try:
        start(chatml, AnswerForm(TextForm(notation, definition, "guided")))
    except InvalidRequest as error:
        assert error.param == param and len(error.message) < 500
    else:
        assert param is None
    assert time.thread_time() - began < 3


@pytest.mark.slow
def test_many_tools_are_tried_together(chatml: Tokenizer) -> None:
    texts = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(8)}}
    tools = tuple(CallableTool(f"tool_{i}", json.dumps(texts | {"title": f"{i}"})) for i in range(60))
    start(chatml, AnswerForm(calls=Calls(tools)), "")


@pytest.mark.parametrize("value", [{"$ref": "#/$defs/d0"}, {"type": "array", "items": {"$ref": "#/$defs/d0"}}])
def test_definitions_are_repeated_within_bounds(value: dict[str, Any]) -> None:
    """Each argument's rule has all definitions: time goes by the product of the two, up to what a grammar may have."""

    def source(n: int) -> str:
        properties = {f"p{i}": value for i in range(n)}
        return json.dumps({"properties": properties, "$defs": {f"d{i}": {"type": "integer"} for i in range(n)}})

    assert growth(source, tagged_arguments, 1_000) < MOST
    few = tagged_arguments(source(10))
    assert few is not None and len(few.known) == 10


def test_only_arguments_that_refer_have_definitions() -> None:
    properties = {"a": {"type": "integer"}, "b": {"type": "array", "items": {"$ref": "#/$defs/c"}}}
    made = tagged_arguments(json.dumps({"properties": properties, "$defs": {"c": {"type": "boolean"}}}))
    assert made is not None
    assert ["$defs" in each.value.rule for each in made.known if isinstance(each.value, Json)] == [False, True]


def test_remarks_are_no_demands(chatml: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"format": {"type": "string", "format": "binary"}}, "format": "odd"}
    start(chatml, of_schema(schema))
    with pytest.raises(InvalidRequest, match="minimum"):
        start(chatml, of_schema({"type": "integer", "minimum": 3, "maximum": 2}))


def test_a_name_that_no_call_can_have(chatml: Tokenizer) -> None:
    tool = CallableTool('a"b', "{}", "tools[0].function.parameters", "tools[0].function.name")
    with pytest.raises(InvalidRequest) as caught:
        start(chatml, AnswerForm(calls=Calls((tool,))), "")
    assert caught.value.param == "tools[0].function.name"


def test_the_same_grammar_is_made_once(chatml: Tokenizer) -> None:
    written = reply_grammar(of_schema(SCHEMA), chatml.reply_format, "")
    assert chatml.grammars.compile(written) is chatml.grammars.compile(written)


def test_no_mask_holds_up_the_end_of_the_process(chatml: Tokenizer) -> None:
    assert chatml.grammars._finders.submit(threading.current_thread).result(60).daemon


def test_two_who_follow_one_grammar_know_nothing_of_each_other(chatml: Tokenizer) -> None:
    form = AnswerForm(TextForm(Notation.LARK, 'start: "a" "b" | "c"'))
    one, other = start(chatml, form), start(chatml, form)
    [token] = chatml.encode("c").ids
    one.take(token)
    assert one.is_over and not other.is_over
    assert other.mask()[token // 32] >> (token % 32) & 1 == 1


class CountedMatcher:
    """Stands for llguidance's: each mask takes the next of `seconds` by its clock; `threads` computed them."""

    def __init__(self, seconds: list[float]) -> None:
        self._seconds = iter(seconds)
        self.now = 0.0
        self.threads: list[str] = []

    def compute_bitmask(self) -> bytes:
        self.threads.append(threading.current_thread().name.partition("_")[0])
        self.now += next(self._seconds)
        return b"\xff\xff\xff\xff"

    def consume_token(self, token_id: int) -> bool:
        return True

    def is_error(self) -> bool:
        return False

    def is_stopped(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("seconds", "quick", "grace", "elsewhere"),
    [
        ([0.0] * 10, 10.0, 1.0, 1),  # the first one's time is not known
        ([0.0] * 10, 0.0, 1.0, 10),
        ([0.0] * 10, 10.0, 0.0, 10),
        ([0.04] * 10, 0.02, 1.0, 10),
        ([0.0, 0.04] * 8, 0.02, 0.1, 3 + 10),  # one in front of each of three that were slow, then all
    ],
)
def test_masks_that_are_quick_are_found_at_once(
    seconds: list[float], quick: float, grace: float, elsewhere: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "QUICK", quick)
    monkeypatch.setattr(compiler, "GRACE", grace)
    matcher = CountedMatcher(seconds)
    monkeypatch.setattr(time, "thread_time", lambda: matcher.now)
    with ThreadPoolExecutor(1, thread_name_prefix="finder") as finders:
        following = GrammarMatcher(matcher, np.zeros(1, np.uint32), finders)  # type: ignore[arg-type]
        for _ in seconds[1:]:
            assert following.mask().tolist() == [2**32 - 1]
            following.take(1)
        following.mask()
    assert matcher.threads.count("finder") == elsewhere
