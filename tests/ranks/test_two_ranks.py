"""Two ranks on this machine are one process: in what they say, keep, and restore."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agentcache.kv.packing import LayerBits, Precision
from agentcache.ranks.folders import rank_folder
from agentcache.store.model_files import read_precision, write_precision
from agentcache.store.verify import verify_folder
from tests.adapters_factory import make_adapter
from tests.ranks.two_ranks import play
from tests.tiny import tiny_model

# Two ranks add in another order, which float32 shows in its last bits. A cache that rounds makes more of that: here and
# there a key or value goes to the next code. So caches are compared that keep float32, and rounding by itself.
BOUND, BOUND_OF_ROUNDED = 1e-4, 2e-3
FORKS = {"anna": ("dora",)}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# Layers are divided, not dealt out: two show it, and one of each kind where there are two kinds.
SMALL: dict[str, Any] = {"num_hidden_layers": 2}
# What tests.tiny has not: variants of what it has.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "gpt_oss": ("gpt_oss", {}),
    "deepseek_v3": (
        "deepseek_v2",
        {
            "model_type": "deepseek_v3",
            "moe_layer_freq": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "rope_scaling": None,
            "q_lora_rank": 48,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
        },
    ),
    "minimax": (
        "qwen3_moe",
        {
            "model_type": "minimax",
            "rotary_dim": 16,
            "num_local_experts": 4,
            "scoring_func": "sigmoid",
            "use_qk_norm": True,
            "shared_intermediate_size": 0,
        },
    ),
}


@dataclass
class Compared:
    """Answers until an agent's first one that differs: how many are the same, and the largest difference."""

    same: int = 0
    worst: float = 0.0


def compare(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> Compared:
    """An answer may differ where two tokens were as likely as one another, within the bound; its agent's conversation
    is another one from then on."""
    compared, others = Compared(), set[str]()
    for number, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        assert our["agent"] == their["agent"]
        if their["agent"] in others:
            continue
        kept, expected = ((said["cache_state"], said["cached"]) for said in (our, their))
        assert kept == expected, f"answer {number} ({our['agent']}): {kept} in place of {expected}"
        pairs = zip(our["token_ids"], their["token_ids"], our["logprobs"], their["logprobs"], strict=True)
        for token, other, logprob, others_logprob in pairs:
            compared.worst = max(compared.worst, abs(logprob - others_logprob))
            if token != other:
                others |= {their["agent"], *FORKS.get(their["agent"], ())}
                break
        else:
            compared.same += 1
    return compared


def make_model(folder: Path, name: str) -> Path:
    architecture, overrides = MODELS[name]
    return tiny_model(folder, architecture, **SMALL | overrides)


@pytest.mark.parametrize("name", MODELS)
def test_turns_with_forks_evictions_adapters_and_ragged_rows_are_one_processs(name: str, tmp_path: Path) -> None:
    most = 0.55 if name != "deepseek_v3" else 1.0  # MLA's latent is every rank's
    assert check_turns(name, tmp_path, "32", BOUND, most) == 1


def test_what_a_cache_of_16_bits_rounds_is_a_code_more_or_less(tmp_path: Path) -> None:
    assert check_turns("llama", tmp_path, "16", BOUND_OF_ROUNDED, 0.55) >= 0.7


@pytest.mark.slow
def test_keys_by_channel_are_codes_more_or_less(tmp_path: Path) -> None:
    assert check_turns("llama", tmp_path, "4", 0.1, 0.55) >= 0.9


def check_turns(name: str, folder: Path, kv: str, bound: float, most: float) -> float:
    """Two ranks say what one process says, logprobs within `bound`; each takes `most` of its RAM and disk. Returns the
    share of answers that are the same."""
    model = make_model(folder / "model", name)
    adapter = make_adapter(folder / "poet", model)
    alone = play("some_turns", model, folder / "one", adapter, ranks=1, kv=kv).last
    together = play("some_turns", model, folder / "two", adapter, kv=kv).last
    compared = compare(together["said"], alone["said"])
    print(name, kv, f"of {len(alone['said'])} answers {compared.same} the same, logprobs within {compared.worst:.1e}")
    assert compared.worst <= bound, f"{name}: logprobs differ by {compared.worst:.1e}, {compared.same} answers the same"
    ram = [each["ram_bytes"] for each in (together, alone)]
    assert ram[0] <= most * ram[1], f"{name}: RAM {ram}"
    folders = [folder / "two" / f"rank-{rank}-of-2" for rank in range(2)]
    shares = [block_bytes(each) / block_bytes(folder / "one") for each in folders]
    print(name, "RAM", together["ram_bytes"] / alone["ram_bytes"], "files", shares)
    assert max(shares) <= (most if most < 1 else 1.01), f"{name}: files {shares}"  # a header names its rank
    for each in folders:
        assert not verify_folder(each).problems
    return compared.same / len(alone["said"])


def block_bytes(folder: Path) -> int:
    """Of all files of blocks in a cache folder that nobody uses."""
    return sum(file.stat().st_size for file in (folder / "blocks").rglob("*.safetensors"))


def test_a_decode_step_is_one_message_and_not_much_more_python(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")
    alone = play("steps", model, tmp_path / "one", ranks=1).last
    together = play("steps", model, tmp_path / "two").last
    print(alone["calls"], together["calls"], together["bytes_a_token"])
    assert set(together["messages"]) == {1}
    assert together["calls"] <= 1.5 * alone["calls"]


def test_all_ranks_keep_what_rank_0_has_chosen(tmp_path: Path) -> None:
    """Measured at first, by both on their own heads; then as it was kept, whatever would be measured now."""
    (tmp_path / "model").mkdir()
    model, cache = tiny_model(tmp_path / "model", "llama", num_hidden_layers=2), tmp_path / "cache"
    first = play("chosen_bits", model, cache).last
    kept = read_precision(rank_folder(cache, 0, 2), first["fingerprint"])
    assert kept is not None and (str(kept), kept.divergence) == (first["bits"], first["divergence"])
    assert play("chosen_bits", model, cache).last["cached"] >= 256
    other = Precision((LayerBits(16, 16), LayerBits(8, 4)), 0.001)
    write_precision(rank_folder(cache, 0, 2), first["fingerprint"], other)
    again = play("chosen_bits", model, cache).last
    assert (again["bits"], again["cached"]) == (str(other), 0)
