"""How a request wants its tokens chosen."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens.

    Args:
        max_tokens: tokens to generate; 0 only caches the prompt; None for as many as the context holds.
        temperature: 0 is greedy and deterministic.
        top_p, top_k, min_p: the usual truncations; 1.0, 0 and 0.0 switch them off.
        repetition_penalty: divides positive and multiplies negative logits of the last 64 tokens; 1.0 is off.
        frequency_penalty: subtracted from a token's logit for each time it was generated (as OpenAI's); 0.0 is off.
        presence_penalty: subtracted once from the logits of all tokens that were generated (as OpenAI's); 0.0 is off.
        logit_bias: added to the logits, by token id; ids that the model has no logit for are passed over.
        seed: with the same seed and the same logits, the same tokens are drawn. Any integer.
        min_tokens: tokens to generate before the model may end, and before `stop` is looked for (as vLLM's).
        stop: strings that end the generation; they are not part of the text.
        logprobs: number of alternatives to report per token; None for no logprobs at all, 0 for the chosen one only.
        prompt_logprobs: report logprobs of the prompt's tokens too (computes the whole prompt).
        ignore_eos: run to max_tokens.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: bool = False
    ignore_eos: bool = False
