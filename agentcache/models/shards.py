"""One rank's part of a model split by mlx-lm's `shard`; between layers each rank has all activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn

from agentcache.compat import MultiLinear, QuantizedMultiLinear
from agentcache.errors import UnsupportedModel
from agentcache.kv.spec import CacheSpec
from agentcache.models.adapter_files import LowRank, ModuleName
from agentcache.models.adapters import AdapterRows, LinearShape, TargetModules
from agentcache.models.inspection import Inspection
from agentcache.models.layers import in_dim
from agentcache.models.lora import ModelAdapters
from agentcache.models.step import CurrentStep

_KV_HEADS = ("n_kv_heads", "num_key_value_heads", "num_kv_heads")
_HEADS = ("n_heads", "num_attention_heads", "num_heads")
_FUSED = ("qkv_proj", "gate_up_proj")
_ADDS_UP = (nn.ShardedToAllLinear, nn.QuantizedShardedToAllLinear)


@dataclass(frozen=True)
class _Shape:
    in_dim: int
    out_dim: int

    @classmethod
    def of(cls, linear: nn.Module) -> _Shape:
        return cls(in_dim(linear), int(linear.weight.shape[0]))


class Shards:
    """Split of a model over ranks."""

    def __init__(self, group: mx.distributed.Group) -> None:
        self.group = group
        self.rank = int(group.rank())
        self.size = int(group.size())
        self._whole: dict[ModuleName, _Shape] = {}

    def spread(self, model: nn.Module) -> None:
        """Keep this rank's part of a model, weights unread. Raises UnsupportedModel."""
        kind = type(model).__module__.rpartition(".")[2]
        if not hasattr(model, "shard"):
            raise UnsupportedModel(f"{kind} cannot be spread over {self.size} ranks: mlx-lm has no `shard` for it")
        self._whole = {
            ModuleName(index, path): _Shape.of(module)
            for index, layer in enumerate(model.layers)
            for path, module in layer.named_modules()
            if isinstance(module, (nn.Linear, nn.QuantizedLinear))
        }
        self._check_heads(model)
        try:
            model.shard(self.group)
        except Exception as error:  # an indivisible matrix size fails anywhere in MLX
            raise UnsupportedModel(f"{kind} cannot be spread over {self.size} ranks: {error!s:.300}") from error

    def _check_heads(self, model: nn.Module) -> None:
        for index, layer in enumerate(model.layers):
            for module in layer.modules():
                has_latents = any(isinstance(each, (MultiLinear, QuantizedMultiLinear)) for each in module.values())
                for name in _HEADS if has_latents else (*_HEADS, *_KV_HEADS):
                    heads = getattr(module, name, None)
                    if isinstance(heads, int) and heads % self.size:
                        raise UnsupportedModel(
                            f"layer {index} has {heads} heads ({name}), which {self.size} ranks cannot share equally"
                        )

    def spec(self, spec: CacheSpec) -> CacheSpec:
        """Spec of this rank and number of ranks. Raises UnsupportedModel: recurrent state."""
        if spec.recurrent:
            raise UnsupportedModel(f"{spec.model_type} keeps recurrent state, which is not spread over ranks")
        return replace(spec, rank=f"{self.rank} of {self.size}")

    def whole(self, modules: TargetModules) -> TargetModules:
        """Targets in the whole model's sizes, without fused modules."""
        kept = [name for name in modules.linears if name in self._whole and name.path.rpartition(".")[2] not in _FUSED]
        linears = {
            name: LinearShape(self._whole[name].in_dim, self._whole[name].out_dim, modules.linears[name].item_bytes)
            for name in kept
        }
        targets = {
            name: replace(target, stop=linears[name].out_dim)
            for name, target in modules.targets.items()
            if name == target.module and name in linears
        }
        return replace(modules, linears=linears, targets=targets)

    def cut(self, name: ModuleName, pair: LowRank, linear: nn.Module) -> LowRank:
        """This rank's part of an adapter's matrices; `linear` is its part of the module."""
        own = _Shape.of(linear)
        a, b = pair.a, pair.b
        if own.in_dim < a.shape[0]:
            a = a[self.rank * own.in_dim : (self.rank + 1) * own.in_dim]
        if own.out_dim < b.shape[1]:
            b = b[:, self.rank * own.out_dim : (self.rank + 1) * own.out_dim]
        return LowRank(a, b)


class ShardedAdapters(ModelAdapters):
    """Adapters with matrices cut like the modules."""

    def __init__(self, model: nn.Module, inspection: Inspection, current: CurrentStep, shards: Shards) -> None:
        super().__init__(model, inspection, current)
        self.modules = shards.whole(self.modules)
        self._shards = shards

    def _put(self, name: ModuleName, pair: LowRank) -> LowRank:
        return super()._put(name, self._shards.cut(name, pair, self._wrap(name).original))

    def _delta(self, rows: AdapterRows, name: ModuleName, x: mx.array, pairs: Sequence[LowRank | None]) -> mx.array:
        delta = super()._delta(rows, name, x, pairs)
        if isinstance(self._wrap(name).original, _ADDS_UP):
            return mx.distributed.all_sum(delta, group=self._shards.group)
        return delta
