"""Where an answer ends, and that it is all that the model said: by OpenAI's own client, against the real server."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from agentcache.text.tokenizer import Tokenizer
from tests.live.openai_bodies import MESSAGES, decode, extras


def test_eos_ends_and_ignore_eos_does_not(client: openai.OpenAI, model_id: str, tokenizer: Tokenizer) -> None:
    bias = {str(min(tokenizer.eos_ids)): 100}
    body: dict[str, Any] = {"model": model_id, "messages": MESSAGES, "max_tokens": 5, "logit_bias": bias}
    ended = client.chat.completions.create(**body)
    assert ended.choices[0].finish_reason == "stop" and ended.choices[0].message.content == ""
    went_on = client.chat.completions.create(**body, extra_body={"ignore_eos": True})
    assert went_on.choices[0].finish_reason == "length"
    assert went_on.usage is not None and went_on.usage.completion_tokens == 5


@pytest.fixture(scope="module")
def ordinary(tokenizer: Tokenizer) -> dict[str, int]:
    """A logit bias that lets only a few readable tokens through, none of which ends the text."""
    texts = {
        i: tokenizer.token_bytes(i).decode(errors="replace")
        for i in range(tokenizer.vocab_size)
        if i not in tokenizer.control_ids
    }
    wanted = [i for i, text in texts.items() if text.isascii() and text.strip().isalpha() and len(text) > 1]
    return {str(i): 100 for i in wanted[:60]}


@pytest.mark.parametrize("as_list", [False, True])
def test_a_stop_string_across_tokens_ends_the_text(
    client: openai.OpenAI, model_id: str, ordinary: dict[str, int], as_list: bool
) -> None:
    body: dict[str, Any] = {"model": model_id, "prompt": "x", "max_tokens": 24, "temperature": 1, "seed": 3}
    body |= {"logit_bias": ordinary, "extra_body": extras()}
    free = client.completions.create(**body, logprobs=0).choices[0]
    assert free.logprobs is not None and free.text == "".join(free.logprobs.tokens)
    border = free.logprobs.text_offset[12]
    ending = free.text[border - 1 : border + 1]
    stop = ["never there", ending] if as_list else ending
    stopped = client.completions.create(**body, stop=stop).choices[0]
    assert stopped.text == free.text[: free.text.index(ending)]
    assert stopped.finish_reason == "stop"
    streamed = list(client.completions.create(**body, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == stopped.text
    assert streamed[-1].choices[0].finish_reason == "stop"


@pytest.mark.slow
def test_indentation_is_what_the_model_said(client: openai.OpenAI, model_id: str, tokenizer: Tokenizer) -> None:
    spaces = [
        i
        for i in range(tokenizer.vocab_size)
        if (text := tokenizer.token_bytes(i).decode(errors="replace")) and not text.strip()
    ]
    words = [
        i
        for i in range(tokenizer.vocab_size)
        if tokenizer.token_bytes(i).decode(errors="replace") in ("def", "print", " return", "x", ":")
    ]
    assert {"\n", " ", "\t"} <= {tokenizer.token_bytes(i).decode(errors="replace") for i in spaces} and len(spaces) > 3
    bias = {str(i): 100 for i in spaces + words}
    body: dict[str, Any] = {"model": model_id, "messages": MESSAGES, "max_tokens": 60, "temperature": 1}
    body |= {"logit_bias": bias, "extra_body": extras()}
    for seed in range(3):
        done = client.chat.completions.create(**body, seed=seed)
        text = done.choices[0].message.content
        assert text == decode(tokenizer, done.choices[0].token_ids)  # type: ignore[attr-defined]
        assert "\n" in text and "  " in text
        streamed = client.chat.completions.create(**body, seed=seed, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == text


@pytest.mark.parametrize("space", ["\n", " ", "\t", "    "])
def test_an_answer_of_nothing_but_white_space(
    client: openai.OpenAI, model_id: str, tokenizer: Tokenizer, space: str
) -> None:
    token = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i).decode(errors="replace") == space)
    body: dict[str, Any] = {"model": model_id, "messages": MESSAGES, "max_tokens": 4, "logit_bias": {str(token): 100}}
    done = client.chat.completions.create(**body, temperature=0)
    assert done.choices[0].message.content == 4 * space
