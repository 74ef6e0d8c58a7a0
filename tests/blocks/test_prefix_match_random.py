"""Matching in random conversations and raw prompts, with every kind of tokenizer."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcache.blocks.transcript import Transcript
from agentcache.text.tokenizer import Tokenizer
from tests.blocks.matching import check_match, check_transcript, generate, match, user
from tests.examples import examples

WORDS = [
    "hello",
    " hello",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\t",
    ".",
    "'s",
    "1",
    "23",
    "é",
    "e\u0301",
    "東京",
    "🙂",
    "The cat",
]
CONTROL = ["<|im_end|>", "<|im_start|>", "<s>", "</s>", "<|eot_id|>", "<|im_", "end|>", "<think>", "\U0010f801", "▁"]
texts = st.lists(st.sampled_from(WORDS + CONTROL), max_size=8).map("".join)


def any_id(tokenizer: Tokenizer) -> st.SearchStrategy[int]:
    return st.integers(0, tokenizer.vocab_size - 1) | st.sampled_from(sorted(tokenizer.control_ids))


def rewritten(data: st.DataObject, messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """The history as a client might send it back: as it was, or with something changed in it."""
    change = data.draw(st.sampled_from(["none", "none", "none", "content", "cut", "drop", "end"]))
    if change == "none" or not messages:
        return messages
    index = data.draw(st.integers(0, len(messages) - 1))
    content = messages[index]["content"]
    if change == "drop":
        return messages[:index] + messages[index + 1 :]
    if change == "end":
        return messages[:index]
    content = content[: data.draw(st.integers(0, len(content)))] if change == "cut" else data.draw(texts)
    return [*messages[:index], {**messages[index], "content": content}, *messages[index + 1 :]]


@given(st.data())
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_random_conversations(tokenizer: Tokenizer, data: st.DataObject) -> None:
    any_ids = st.lists(any_id(tokenizer), max_size=10)
    replies = st.one_of(any_ids, texts.map(lambda text: list(tokenizer.encode(tokenizer.marks.mark(text)).ids)))
    transcript = Transcript.empty()
    messages: list[dict[str, str]] = []
    for _ in range(data.draw(st.integers(1, 5))):
        messages = [*rewritten(data, messages), user(data.draw(texts))]
        text = tokenizer.chats.text(messages)
        found = match(tokenizer, transcript, text)
        check_match(tokenizer, transcript, text, found)
        transcript, reply = generate(tokenizer, found.transcript, data.draw(replies))
        check_transcript(transcript)
        messages = [*messages, {"role": "assistant", "content": reply}]


@given(st.data())
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_random_continuations(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Raw prompts: no control token parts the prompt from what the model wrote."""
    any_ids = st.lists(any_id(tokenizer), max_size=6)
    transcript = Transcript.empty()
    text = ""
    for _ in range(data.draw(st.integers(1, 5))):
        text = text[: data.draw(st.integers(len(text) // 2, len(text)))] + data.draw(texts)
        prompt = tokenizer.raw_prompt(text)
        found = match(tokenizer, transcript, prompt)
        check_match(tokenizer, transcript, prompt, found)
        transcript, reply = generate(tokenizer, found.transcript, data.draw(any_ids))
        check_transcript(transcript)
        text += reply
