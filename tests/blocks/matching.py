"""Matching prompts by a real tokenizer, and what must hold of every match."""

from __future__ import annotations

from agentcache.blocks.prefix_match import PromptMatch, len_common_prefix, match_text
from agentcache.blocks.transcript import Transcript
from agentcache.text.tokenizer import Tokenizer


def match(tokenizer: Tokenizer, transcript: Transcript, text: str) -> PromptMatch:
    return match_text(transcript, text, tokenizer.encode, tokenizer.control_ids)


def read(tokenizer: Tokenizer, text: str) -> Transcript:
    return match(tokenizer, Transcript.empty(), text).transcript


def generate(tokenizer: Tokenizer, transcript: Transcript, token_ids: list[int]) -> tuple[Transcript, str]:
    """The transcript after the model wrote `token_ids`, and what the client saw of them."""
    detokenizer = tokenizer.detokenizer(after=transcript.ids[-1] if transcript.ids else None)
    for token_id in token_ids:
        detokenizer.add(token_id)
    detokenizer.finish()
    marked = tokenizer.marks.marked_ends(detokenizer.text, detokenizer.ends)
    return transcript.extended(marked.text, token_ids, marked.ends, "generated"), detokenizer.text


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def check_transcript(transcript: Transcript) -> None:
    assert len(transcript.ids) == len(transcript.ends) == sum(count for _, count in transcript.spans)
    assert list(transcript.ends) == sorted(transcript.ends)
    assert (transcript.ends[-1] if transcript.ids else 0) == len(transcript.text)
    assert all(count > 0 for _, count in transcript.spans)
    assert all(left[0] != right[0] for left, right in zip(transcript.spans, transcript.spans[1:], strict=False))


def spaceless(text: str) -> str:
    """Text without spaces: SentencePiece-like tokenizers add some of their own."""
    return text.replace(" ", "").replace("▁", "")


def check_match(tokenizer: Tokenizer, old: Transcript, text: str, found: PromptMatch) -> None:
    """The invariant, checked against a tokenisation of the whole text and independently of how it was reached."""
    new, kept = found.transcript, found.kept
    check_transcript(new)
    assert new.text == text
    assert new.ids[:kept] == old.ids[:kept]
    assert new.ends[:kept] == old.ends[:kept]
    assert kept == 0 or old.ends[kept - 1] <= len_common_prefix(old.text, text)
    boundary = new.ends[kept - 1] if kept else 0
    assert spaceless(tokenizer.spell(new.ids[kept:]).text) == spaceless(text[boundary:])
    fresh = tokenizer.encode(text)
    generated = [kind == "generated" for kind, count in new.spans for _ in range(count)]
    assert not any(generated[kept:])
    common = sorted(set(new.ends) & set(fresh.ends) | {0})
    old_at = fresh_at = 0
    for position in common:
        old_next = old_at + sum(end <= position for end in new.ends[old_at:])
        fresh_next = fresh_at + sum(end <= position for end in fresh.ends[fresh_at:])
        if list(new.ids[old_at:old_next]) != list(fresh.ids[fresh_at:fresh_next]):
            assert any(generated[old_at:old_next])
        old_at, fresh_at = old_next, fresh_next
    assert (old_at, fresh_at) == (len(new.ids), len(fresh.ids))
