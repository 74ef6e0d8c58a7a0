"""A frozen base model and a LoRA decoder on its cache, in mlx-lm's modules, which support gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from agentcache.errors import UnsupportedModel
from agentcache.kv.packing import Quantisation
from agentcache.kv.spec import CacheSpec
from agentcache.models.adapters import AdapterWeights, RowAdapter
from agentcache.models.attachment import host
from agentcache.models.fingerprint import first_fingerprint
from agentcache.models.inspection import Paged
from agentcache.models.loader import read_model
from agentcache.models.lora import ModelAdapters
from agentcache.models.mla import is_expanded
from agentcache.models.step import CurrentStep, StepInputs
from agentcache.text.tokenizer import Tokenizer
from agentcache.training.decoder_cache import DecoderCache, PromptCache, RoundedNorm, Rounding


@dataclass(frozen=True)
class FrozenBase:
    """A frozen model for training decoders; `current`: the step in computation."""

    model: Any
    current: CurrentStep
    adapters: ModelAdapters
    roundings: tuple[Rounding, ...]
    tokenizer: Tokenizer
    fingerprint: str

    def prefill(self, prompts: mx.array) -> list[PromptCache]:
        """Return base's KV of prompts [B, P], without gradients."""
        caches = [PromptCache(rounding) for rounding in self.roundings]
        self.model(prompts, cache=caches)  # lazy: no logits
        return caches

    def decode(
        self, inputs: mx.array, prompt: Sequence[PromptCache], lengths: mx.array, decoder: AdapterWeights
    ) -> mx.array:
        """Run a decoder behind prompts; return logits, float32 [B, A, vocabulary].

        `inputs`, `lengths`: int32, as in `DecoderBatch`. `prompt`: from `prefill`.
        """
        caches = [DecoderCache(layer, lengths) for layer in prompt]
        rows = inputs.shape[0]
        with self.current.of(StepInputs(inputs, [0] * rows, adapters=[RowAdapter(decoder)] * rows)):
            logits: mx.array = self.model(inputs, cache=caches)
        return logits.astype(mx.float32)


def load_base(path_or_hub_id: str) -> FrozenBase:
    """Load a base. Raises UnsupportedModel if layers lack KV of their own, or it cannot be served."""
    read = read_model(path_or_hub_id)
    read.evaluate()
    hosted = host(read.model, read.config["model_type"], read.config)
    if hosted.inspection.refs != tuple(map(Paged, range(len(read.model.layers)))):
        raise UnsupportedModel("decoders are trained for models whose layers each keep their own keys and values only")
    current = CurrentStep()
    adapters = ModelAdapters(read.model, hosted.inspection, current)
    return FrozenBase(
        model=read.model,
        current=current,
        adapters=adapters,
        roundings=tuple(_round(layer, hosted.spec) for layer in read.model.layers),
        tokenizer=read.tokenizer,
        fingerprint=first_fingerprint(read.path),
    )


def _round(layer: Any, spec: CacheSpec) -> Rounding:
    quantisation = spec.groups[0].quantisation
    assert isinstance(quantisation, Quantisation)
    for module in layer.modules():
        if is_expanded(module):
            module.kv_a_layernorm = RoundedNorm(module.kv_a_layernorm.original, Rounding(quantisation))
            return Rounding(quantisation, module.qk_nope_head_dim)
    return Rounding(quantisation)
