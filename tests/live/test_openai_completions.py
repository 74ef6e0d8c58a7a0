"""Text completions by OpenAI's own client, against the real server."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.live.openai_bodies import GREEDY, extras
from tests.live.servers import make_ids


def test_text_completion_stream_is_the_whole_answer_in_pieces(client: openai.OpenAI, model_id: str) -> None:
    body = {"model": model_id, "prompt": "def add(first, second):\n", "max_tokens": 24, "logprobs": 3, **GREEDY}
    whole = client.completions.create(**body)
    chunks = list(client.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    choices = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        pieces = [getattr(choice.logprobs, name) for choice in choices if choice.logprobs]
        assert [value for piece in pieces for value in piece] == getattr(whole.choices[0].logprobs, name), name
    assert choices[-1].finish_reason == "length"
    assert chunks[-1].usage == whole.usage


def test_a_prompt_of_token_ids_is_the_prompt_it_spells(client: openai.OpenAI, model_id: str) -> None:
    body: dict[str, Any] = {"model": model_id, "max_tokens": 6, "temperature": 0, "extra_body": extras()}
    [text] = client.completions.create(prompt="The capital of France", **body).choices
    [tokens] = client.completions.create(prompt=text.prompt_token_ids, **body).choices  # type: ignore[attr-defined]
    assert tokens.prompt_token_ids == text.prompt_token_ids  # type: ignore[attr-defined]
    assert (tokens.token_ids, tokens.text) == (text.token_ids, text.text)  # type: ignore[attr-defined]


def test_token_ids_come_in_a_stream_too(client: openai.OpenAI, model_id: str) -> None:
    prompt = make_ids(20, seed=5)
    body: dict[str, Any] = {"model": model_id, "prompt": prompt, "max_tokens": 6, "temperature": 0}
    [whole] = client.completions.create(**body, extra_body=extras()).choices
    chunks = list(client.completions.create(**body, extra_body=extras(), stream=True))
    assert chunks[-1].choices[0].prompt_token_ids == prompt  # type: ignore[attr-defined]
    assert chunks[-1].choices[0].token_ids == whole.token_ids  # type: ignore[attr-defined]


def test_max_tokens_0_caches_the_prompt_and_generates_nothing(client: openai.OpenAI, model_id: str, agent: str) -> None:
    prompt = make_ids(300, seed=1)
    body: dict[str, Any] = {"model": model_id, "prompt": prompt, "temperature": 0, "extra_body": {"agent": agent}}
    done = client.completions.create(max_tokens=0, **body)
    assert done.choices[0].text == "" and done.choices[0].finish_reason == "length"
    assert done.usage is not None and done.usage.completion_tokens == 0
    assert done.agentcache["computed_tokens"] == 300  # type: ignore[attr-defined]
    again = client.completions.create(max_tokens=1, **body)
    assert again.agentcache["computed_tokens"] == 1  # type: ignore[attr-defined]
    assert again.agentcache["cache_state"] == "hot"  # type: ignore[attr-defined]


def test_echo_gives_the_logprobs_that_generating_gave(client: openai.OpenAI, model_id: str) -> None:
    body: dict[str, Any] = {"model": model_id, "logprobs": 2, "temperature": 0}
    [said] = client.completions.create(prompt=make_ids(40), max_tokens=8, extra_body=extras(), **body).choices
    whole = [*said.prompt_token_ids, *said.token_ids]  # type: ignore[attr-defined]
    [echo] = client.completions.create(prompt=whole, max_tokens=0, echo=True, **body).choices
    assert echo.logprobs is not None and said.logprobs is not None
    assert len(echo.logprobs.tokens) == len(whole)
    assert echo.logprobs.token_logprobs[0] is None
    assert echo.logprobs.token_logprobs[40:] == pytest.approx(said.logprobs.token_logprobs, abs=2e-3)
    assert echo.logprobs.tokens[40:] == said.logprobs.tokens


def test_echo_of_a_text_puts_it_in_front(client: openai.OpenAI, model_id: str) -> None:
    body: dict[str, Any] = {"model": model_id, "prompt": "  Hello,\n\tworld", "max_tokens": 4, **GREEDY}
    alone = client.completions.create(**body).choices[0]
    echo = client.completions.create(**body, echo=True, logprobs=0).choices[0]
    assert echo.text == "  Hello,\n\tworld" + alone.text
    assert echo.logprobs is not None and len(echo.logprobs.tokens) > 4
    assert "".join(echo.logprobs.tokens[:-4]) == "  Hello,\n\tworld"
