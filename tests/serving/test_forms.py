"""Answers of a given form: what random models write is valid, and nobody else notices."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import assume, given, settings
from llguidance import LLParserLimits

from agentcache.api.answer_form import AnswerForm, Notation, TextForm
from agentcache.api.request import Request, TokenPrompt
from agentcache.errors import InvalidRequest
from agentcache.llm import LLM, Completion
from agentcache.text.grammars import compiler
from agentcache.text.replies.events import Call, Text
from tests.conftest import ModelFolder
from tests.examples import examples
from tests.marks import slow
from tests.schemas import SHORT_TOOLS, calling, of_schema, schemas
from tests.serving import inside
from tests.serving.by_hand import by_hand
from tests.serving.conversation import BLOCK_BYTES, greedy, make_ids, open_llm
from tests.serving.test_lookahead import waiting_for_every_step

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 6}, "b": {"type": "array", "items": {"enum": [1, 2]}}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def any_way(max_tokens: int = 300, **options: Any) -> Any:
    return greedy(max_tokens, **{"temperature": 1.0, "logprobs": None, "ignore_eos": False} | options)


def together(llm: LLM, forms: Sequence[AnswerForm | None], **options: Any) -> list[Completion]:
    """Answers to one prompt at the same time, each with its own seed."""

    def one(number: int) -> Completion:
        return llm.generate(make_ids(20, seed=number), any_way(seed=number, **options), form=forms[number])

    with ThreadPoolExecutor(len(forms)) as pool:
        return list(pool.map(one, range(len(forms))))


def text_form(notation: Notation, definition: str) -> AnswerForm:
    return AnswerForm(TextForm(notation, definition, "guided"))


def is_valid(text: str, schema: Any) -> bool:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    return jsonschema.Draft202012Validator(schema, format_checker=checker).is_valid(json.loads(text))


@pytest.fixture(scope="module", params=["byte_bpe", slow("metaspace")])
def llm(
    request: pytest.FixtureRequest, model_folder: ModelFolder, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LLM]:
    model = model_folder("mistral", tokenizer=request.param, num_hidden_layers=2)
    with open_llm(model, tmp_path_factory.mktemp("forms") / "cache", max_concurrent_requests=8) as llm:
        yield llm


@settings(max_examples=examples(25))  # with each tokenizer
@given(schema=schemas)
@pytest.mark.slow
def test_what_a_random_model_writes_fits_the_schema(schema: Any, llm: LLM) -> None:
    done = together(llm, [of_schema(schema)] * 3)
    complete = [completion for completion in done if completion.finish_reason == "stop"]
    assume(complete)  # a random model may go on with digits; hypothesis fails by itself where many never end
    for completion in complete:
        assert is_valid(completion.text, schema), completion.text


@pytest.mark.slow
def test_those_without_a_form_say_what_they_say_alone(llm: LLM) -> None:
    forms = [None, of_schema(SCHEMA), None, text_form(Notation.REGEX, "[a-f]{30}"), None, of_schema({"type": "object"})]
    mixed = together(llm, forms, max_tokens=60)
    free = together(llm, [None, None, None, None, None], max_tokens=60)
    for place in (0, 2, 4):
        assert mixed[place].token_ids == free[place].token_ids
    assert mixed[1].token_ids != free[1].token_ids
    assert re.fullmatch("[a-f]{30}", mixed[3].text)


@pytest.mark.slow
def test_the_same_bits_beside_a_form_as_without(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches of the same rows, in as many steps: of greedy rows and of those that are drawn."""
    monkeypatch.setattr(compiler, "GRACE", 10.0)  # nobody sits a step out, however busy the machine is

    def run(cache_dir: Path, form: AnswerForm | None) -> list[list[Any]]:
        with by_hand(model, cache_dir) as hand:
            sampling = [greedy(40), greedy(40), greedy(40, temperature=1.0, seed=1), greedy(40, top_p=0.9, seed=2)]
            rows = [
                hand.submit(make_ids(30, seed=place), each, form=form if place == 1 else None)
                for place, each in enumerate(sampling)
            ]
            hand.run(*rows)
            scores = [[score for update in row.updates for score in update.logprobs] for row in rows]
            assert [len(row.token_ids) for row in rows] == [40] * 4
            # Nobody waits a step for anybody.
            assert hand.engine.stats().decode_steps <= 39 + len(rows)
            return scores

    beside = run(tmp_path / "beside", text_form(Notation.REGEX, "[a-f ]{300}"))
    without = run(tmp_path / "without", None)
    assert beside[1] != without[1]
    assert [beside[place] for place in (0, 2, 3)] == [without[place] for place in (0, 2, 3)]


class Held(Executor):
    """Finds masks at once, or not before it is let go."""

    def __init__(self) -> None:
        self.holds = False
        self._jobs: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.append((future, partial(fn, *args, **kwargs)))
        if not self.holds:
            self.let_go()
        return future

    def let_go(self) -> None:
        self.holds, jobs = False, self._jobs
        self._jobs = []
        for future, find in jobs:
            future.set_result(find())


@pytest.mark.slow
def test_nobody_waits_for_a_slow_form(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are counted while it is not known what one row may have: all the others go on in each of them."""
    monkeypatch.setattr(compiler, "GRACE", 0.0)
    regex = text_form(Notation.REGEX, "[a-f ]{300}")
    sampling = [greedy(40), greedy(60, logprobs=2), greedy(40, temperature=1.0, seed=1), greedy(40, top_p=0.9, seed=2)]

    def run(cache_dir: Path, *, held_after: int | None) -> list[list[int]]:
        with by_hand(model, cache_dir) as hand:
            held = inside.tokenizer(hand.engine).grammars._finders = Held()
            rows = [
                hand.submit(make_ids(30, seed=place), each, form=regex if place == 1 else None)
                for place, each in enumerate(sampling)
            ]
            formed, free = rows[1], [rows[0], *rows[2:]]
            if held_after is not None:
                while len(formed.token_ids) < held_after:
                    hand.step()
                held.holds = True
                hand.step()  # ends a step that had begun
                shown, steps = [len(row.token_ids) for row in free], hand.engine.stats().decode_steps
                known = len(formed.token_ids)
                hand.run(*free)
                taken = hand.engine.stats().decode_steps - steps
                assert [len(row.token_ids) - before for row, before in zip(free, shown, strict=True)] == [
                    40 - before for before in shown
                ]
                assert taken <= 40 - min(shown) and taken > 20
                assert len(formed.token_ids) <= known + 1
                held.let_go()
            hand.run(*rows)
            hand.engine.check_integrity()
            return [row.token_ids for row in rows]

    assert run(tmp_path / "held", held_after=5) == run(tmp_path / "not", held_after=None)


@pytest.mark.parametrize("ends", ["is cancelled", "loses its place"])
def test_who_is_late_and_leaves(ends: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "GRACE", 0.0)
    regex = text_form(Notation.REGEX, "[a-f ]{300}")
    with by_hand(model, tmp_path / "cache") as hand:
        held = inside.tokenizer(hand.engine).grammars._finders = Held()
        formed = hand.submit(make_ids(30), greedy(30), form=regex)
        other = hand.submit(make_ids(30, seed=1), greedy(60))
        while len(formed.token_ids) < 5:
            hand.step()
        held.holds = True
        while not formed.generation.progress.is_late or formed.generation.progress.in_flight:
            hand.step()
        if ends == "is cancelled":
            hand.engine.cancel(formed.generation)
        else:
            hand.engine.preempt(formed.generation)
            hand.step()
        held.let_go()
        hand.run(other, formed)
        hand.engine.check_integrity()
        assert len(other.token_ids) == 60
        if ends == "loses its place":
            alone = hand.submit(make_ids(30), greedy(30), form=regex)
            hand.run(alone)
            assert formed.token_ids == alone.token_ids


def test_a_row_whose_mask_was_late_once_keeps_pace_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes part in each step, as the row beside it, not in every second one."""
    monkeypatch.setattr(compiler, "GRACE", 0.0)
    with by_hand(model, tmp_path / "cache") as hand:
        held = inside.tokenizer(hand.engine).grammars._finders = Held()
        formed = hand.submit(make_ids(30), greedy(40), form=text_form(Notation.REGEX, "[a-f ]{300}"))
        other = hand.submit(make_ids(30, seed=1), greedy(60))
        while len(formed.token_ids) < 3:
            hand.step()
        held.holds = True
        while not formed.generation.progress.is_late or formed.generation.progress.in_flight:
            hand.step()
        held.let_go()
        hand.step()
        before = len(formed.token_ids), len(other.token_ids)
        for _ in range(12):
            hand.step()
        assert len(formed.token_ids) - before[0] >= len(other.token_ids) - before[1] - 2
        for receiver in (formed, other):
            hand.engine.cancel(receiver.generation)


@pytest.mark.slow
def test_a_grammar_that_takes_longer_than_many_steps(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An alternation of thousands of rules; without the limits that keep such a one out."""
    limits = LLParserLimits(
        initial_lexer_fuel=10**9, step_lexer_fuel=10**9, step_max_items=10**8, max_items_in_row=10**7
    )
    monkeypatch.setattr(compiler, "parser_limits", lambda: limits)
    monkeypatch.setattr(compiler.GrammarCompiler, "_try", lambda self, reply, limit: None)
    rules = "".join(f'r{i}: /[a-z]/ r{i} | "y{i}"\n' for i in range(3000))
    slow = text_form(Notation.LARK, "start: " + " | ".join(f'r{i} "x{i}"' for i in range(3000)) + "\n" + rules)
    with by_hand(model, tmp_path / "cache") as hand:
        formed = hand.submit(make_ids(30), greedy(60), form=slow)
        free = [hand.submit(make_ids(30, seed=seed), greedy(60)) for seed in (1, 2)]
        hand.run(*free)
        assert len(formed.token_ids) < 30, "the others have not waited for each of its tokens"
        hand.engine.cancel(formed.generation)


SAMPLING = [
    {"temperature": 0.0},
    {"seed": 1},
    {"seed": 2, "top_p": 0.9, "repetition_penalty": 1.3},
    {"seed": 3, "top_k": 20, "frequency_penalty": 0.5, "logprobs": 1},
    {"seed": 4, "min_tokens": 200, "ignore_eos": True},
    {"seed": 5, "logit_bias": {20: 5.0}, "min_p": 0.01},
]


@pytest.mark.slow
def test_lookahead_changes_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(cache_dir: Path) -> list[tuple[int, ...]]:
        with open_llm(model, cache_dir) as llm:
            done = [llm.generate(make_ids(250), any_way(**each), form=of_schema(SCHEMA)) for each in SAMPLING]
        assert all(is_valid(each.text, SCHEMA) for each in done if each.finish_reason == "stop")
        return [each.token_ids for each in done]

    ahead = run(tmp_path / "ahead")
    with waiting_for_every_step(monkeypatch):
        assert run(tmp_path / "waiting") == ahead


def test_a_text_ends_where_nothing_can_follow(llm: LLM) -> None:
    for options in ({}, {"ignore_eos": True}, {"min_tokens": 50}):
        done = llm.generate("x", any_way(seed=1, **options), form=text_form(Notation.LARK, 'start: "yes" | "no" "!"+'))
        assert re.fullmatch("yes|no!+", done.text) and done.finish_reason == "stop"
    done = llm.generate("x", any_way(4, seed=1), form=text_form(Notation.REGEX, "a+"))
    assert re.fullmatch("a+", done.text)
    done = llm.generate("x", any_way(60, stop=("cc",), logit_bias={}), form=text_form(Notation.REGEX, "(ab)*c{9}"))
    assert re.fullmatch("(ab)*", done.text) and done.finish_reason == "stop"


@pytest.mark.slow
def test_further_answers_have_the_form_each_by_itself(llm: LLM) -> None:
    updates: list[Any] = []
    request = Request("n", TokenPrompt(make_ids(30)), any_way(seed=7), n=3, form=of_schema(SCHEMA))
    inside.on_loop(llm, inside.async_engine(llm).generate(request, updates.append))
    texts = ["".join(update.text for update in updates if update.choice == index) for index in range(3)]
    assert len(set(texts)) == 3 and all(is_valid(text, SCHEMA) for text in texts)


@pytest.mark.slow
def test_who_loses_its_place_goes_on_in_the_same_form(model: Path, tmp_path: Path) -> None:
    regex = text_form(Notation.REGEX, "[a-f]{80}")  # each takes its second block on the way
    with open_llm(model, tmp_path / "large") as llm:
        wanted = [llm.generate(make_ids(230, seed=n), any_way(100, seed=n), form=regex).text for n in range(3)]
    with open_llm(model, tmp_path / "small", ram_budget=5 * BLOCK_BYTES) as llm:
        inside.hold_until(llm, 3)
        with ThreadPoolExecutor(3) as pool:
            got = pool.map(
                lambda n: llm.generate(make_ids(230, seed=n), any_way(100, seed=n), form=regex).text, range(3)
            )
            assert list(got) == wanted
        assert llm.stats().preemptions > 0


def test_who_cannot_go_on_is_told_and_the_others_are_not(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar that is harmless as far as anybody has tried, and then takes too much."""
    few_states = LLParserLimits(max_lexer_states=30, verbose_errors=False)
    monkeypatch.setattr(compiler, "parser_limits", lambda: few_states)
    with open_llm(model, tmp_path / "cache") as llm, ThreadPoolExecutor(1) as pool:
        beside = pool.submit(lambda: llm.generate(make_ids(9), greedy(40)))
        with pytest.raises(InvalidRequest) as caught:
            llm.generate("x", any_way(), form=text_form(Notation.REGEX, "([ab]{7}c[ab]{9}d){9}"))
        assert len(beside.result().token_ids) == 40
    assert caught.value.code == "grammar_failed"


# -- chats: every family is tried without a model in models/test_grammars.py -------------------------------------------


@pytest.mark.parametrize("family", [slow("qwen3"), "harmony", slow("mistral")])
def test_chats_with_demanded_calls_and_texts_behind_thoughts(
    family: str, model_folder: ModelFolder, tmp_path: Path
) -> None:
    model = model_folder("mistral", tokenizer=family, num_hidden_layers=2)
    forms = [calling(SHORT_TOOLS, just_one=True)] * 3 + [of_schema(SCHEMA)] * 3
    with open_llm(model, tmp_path / "cache", max_concurrent_requests=6) as llm:
        called, said = chats(llm, forms)
    assert called and said
    for calls in called:
        [call] = [block for block in calls if isinstance(block, Call)]
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in SHORT_TOOLS}
        assert is_valid(call.arguments, schemas[call.name])
    for blocks in said:
        assert is_valid("".join(block.text for block in blocks if isinstance(block, Text)), SCHEMA)


def chats(llm: LLM, forms: Sequence[AnswerForm]) -> tuple[list[Any], list[Any]]:
    """What complete answers say: those that must call, and the others. Thoughts are made likely to end."""
    tokenizer = inside.tokenizer(inside.engine_of(llm))
    ends = {"</think>", "[/THINK]", "<|end|>"}
    bias = {token: 20.0 for token, marker in tokenizer.markers.items() if marker.name in ends}

    def one(place: int) -> Completion:
        return llm.chat(HI, any_way(150, seed=place, logit_bias=bias), form=forms[place], tools=SHORT_TOOLS)

    with ThreadPoolExecutor(len(forms)) as pool:
        done = zip(forms, pool.map(one, range(len(forms))), strict=True)
    complete = [(form, each.blocks) for form, each in done if each.finish_reason == "stop"]
    return [blocks for form, blocks in complete if form.must_call], [b for form, b in complete if not form.must_call]
