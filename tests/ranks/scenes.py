"""What a test has one process do, or rank 0 of two: run as `python -m tests.ranks.scenes SCENE MODEL CACHE ADAPTER`.

Rank 1 follows. What rank 0 has seen goes to stdout as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from agentcache.api.sampling import SamplingParams
from agentcache.cli.serve import LOST_CODE
from agentcache.errors import RankLost
from agentcache.kv import packed, packing
from agentcache.llm import LLM, Completion
from agentcache.models.inspection import Inspection
from agentcache.models.runner import ModelRunner
from agentcache.models.step import StepInputs, StepOutputs
from agentcache.ranks.commands import Block, DropAdapter, PutBytes, WriteBlocks
from agentcache.ranks.folders import own_rank
from agentcache.settings.config import Config
from agentcache.store.archive import ArchiveRejected
from agentcache.store.block_file import make_header
from agentcache.store.store import Store
from tests.serving import inside

SETTINGS: dict[str, Any] = {"ram_budget": 64 << 20, "disk_budget": 256 << 20, "rank_timeout": 60.0}
TURNS = 6


def _said(completion: Completion) -> dict[str, Any]:
    return {
        "token_ids": completion.token_ids,
        "logprobs": [each.logprob for each in completion.logprobs],
        "cache_state": completion.report.cache_state,
        "cached": completion.report.cached_tokens.own + completion.report.cached_tokens.shared,
    }


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, logprobs=0, ignore_eos=True)


def _turn(llm: LLM, agents: Sequence[tuple[str, list[int], str | None]], tokens: int = 5) -> list[Completion]:
    """A turn of each agent, all at once: rows of different lengths. What one finds of another's does not depend on who
    comes a little later."""
    inside.hold_until(llm, len(agents))
    with ThreadPoolExecutor(len(agents)) as pool:
        turns = [
            pool.submit(llm.generate, ids, _greedy(tokens + place), agent=agent, adapter=adapter)
            for place, (agent, ids, adapter) in enumerate(agents)
        ]
        return [turn.result() for turn in turns]


def some_turns(model: Path, cache: Path, adapter: Path) -> dict[str, Any]:
    """Three agents, one of them with an adapter, a fork, evictions, and what it takes."""
    rng, said = random.Random(3), list[dict[str, Any]]()

    def new(count: int) -> list[int]:
        return [rng.randrange(10, 400) for _ in range(count)]

    with LLM(model, cache_dir=cache, adapters={"poet": adapter}, **SETTINGS) as llm:
        ids = {"anna": new(270), "bea": new(40), "carl": new(9)}
        adapters = {"carl": "poet"}
        for number in range(TURNS):
            if number == 3:
                llm.fork("anna", "dora")
                ids["dora"] = list(ids["anna"])
            if number in (2, 4, 5):
                llm.evict("anna")
            turns = _turn(llm, [(agent, ids[agent], adapters.get(agent)) for agent in ids])
            for agent, turn in zip(list(ids), turns, strict=True):
                said.append(_said(turn) | {"agent": agent})
                ids[agent] += [*turn.token_ids, *new(3 + number)]
        llm.check_integrity()
        stats = llm.stats()
        return {
            "said": said,
            "ram_bytes": stats.ram_used["base"],
            "messages": stats.rank_messages,
        }


def steps(model: Path, cache: Path, adapter: Path) -> dict[str, Any]:
    """Decode steps, one by one: messages of each, and calls of Python functions."""
    from tests.serving.by_hand import by_hand

    calls, messages = list[int](), list[int]()
    with by_hand(model, cache, **SETTINGS) as hand:
        receiver = hand.submit(list(range(10, 60)), _greedy(40))
        for _ in range(20):
            hand.step()
        for _ in range(15):
            before, counted = hand.engine.stats().rank_messages, 0

            def count(frame: Any, event: str, arg: Any) -> None:
                nonlocal counted
                counted += event == "call"

            sys.setprofile(count)
            hand.step()
            sys.setprofile(None)
            calls.append(counted)
            messages.append(hand.engine.stats().rank_messages - before)
        hand.run(receiver)
        sent, tokens = hand.engine.stats().rank_sent_bytes, len(receiver.token_ids)
    return {"calls": sorted(calls)[len(calls) // 2], "messages": messages, "bytes_a_token": sent / tokens}


def a_turn(model: Path, cache: Path, adapter: Path) -> dict[str, Any]:
    """One more turn of an agent, whose first ones are whole; what it was before stands in the answer."""
    with LLM(model, cache_dir=cache, **SETTINGS) as llm:
        return _two_turns(llm)


def _two_turns(llm: LLM) -> dict[str, Any]:
    before = [info.tokens for info in llm.agents()]
    ids = list(range(10, 290))
    first = llm.generate(ids, _greedy(5), agent="anna")
    _acknowledge(first, len(ids) + 5)
    second = llm.generate([*ids, *first.token_ids, *range(20, 280)], _greedy(5), agent="anna")
    _acknowledge(second, len(ids) + 10 + 260)
    return {"before": before, "said": [_said(first), _said(second)]}


def bring_in(model: Path, cache: Path, files: Path) -> dict[str, Any]:
    """An agent that is not there yet, of each file in a folder, as far as it is not refused; then the same turns."""
    with LLM(model, cache_dir=cache, **SETTINGS) as llm:
        refused, known = {}, [info.id for info in llm.agents()]
        before = llm.stats().disk_bytes
        for file in sorted(files.iterdir()) if "anna" not in known else ():
            try:
                llm.import_agent("anna", file)
            except ArchiveRejected as error:
                refused[file.name] = [error.code, llm.stats().disk_bytes - before]
        return {"refused": refused, "known": known} | _two_turns(llm)


def chosen_bits(model: Path, cache: Path, adapter: Path) -> dict[str, Any]:
    """In how many bits rank 0 has keys and values kept by `auto`; the other rank's own setting is another one."""
    with LLM(model, cache_dir=cache, **SETTINGS | {"kv": "auto"}) as llm:
        said = _said(llm.generate(list(range(10, 290)), _greedy(3), agent="anna"))
        info = llm.model
        return {"fingerprint": info.fingerprint, "bits": info.kv_precision, "divergence": info.kv_divergence, **said}


ASTRAY: dict[str, Any] = {
    "block": PutBytes(0, [0], [1 << 20]),
    "snapshot": WriteBlocks(1 << 20, [Block(1 << 20, make_header("ab" * 20, "full.0", 0, range(256)))]),
    "adapter": DropAdapter(1 << 20),
    "message": ("Dance", 1),
}


def astray(model: Path, cache: Path, what: Path) -> dict[str, Any]:
    """A turn, then a command about what the other rank does not have."""
    with LLM(model, cache_dir=cache, **SETTINGS) as llm:
        _acknowledge(llm.generate(list(range(10, 290)), _greedy(5), agent="anna"), 285)
        inside.tell_workers(llm, ASTRAY[what.name])
        return _said(llm.generate(list(range(10, 60)), _greedy(5), agent="bea"))


def _acknowledge(completion: Completion, tokens: int) -> None:
    """Its report says whether the turn is safe; an answer whose turn could not be written says that instead."""
    if completion.report.saved:
        print(json.dumps({"acknowledged": tokens}), flush=True)


def _die_at(step: str, occurrence: int, kill: Callable[[], None]) -> None:
    """Have this process end when it comes so often to a step of the write path of stores opened from now on; or to a
    sum over all ranks that `loading` the model takes, or `computing` with it: the others have begun with it then."""
    seen, is_loaded = 0, False

    def fault(name: str, *computed: mx.array) -> None:
        nonlocal seen
        seen += name == step
        if seen == occurrence and name == step:
            mx.eval(*computed)
            kill()

    defaults = Store.__init__.__kwdefaults__
    assert defaults is not None
    defaults["fault"] = fault
    forward, all_sum = ModelRunner.forward, mx.distributed.all_sum

    def note(self: ModelRunner, inputs: StepInputs) -> StepOutputs:
        nonlocal is_loaded
        is_loaded = True
        return forward(self, inputs)

    def summed(x: mx.array, **options: Any) -> mx.array:
        fault("computing" if is_loaded else "loading", x)
        return all_sum(x, **options)

    ModelRunner.forward = note  # type: ignore[method-assign]
    mx.distributed.all_sum = summed


def _kill(*others: int) -> None:
    for process in (*others, os.getpid()):
        os.kill(process, signal.SIGKILL)


def _keep_float32() -> None:
    """Have keys and values kept as the model makes them, which nobody can ask for: nothing is rounded."""
    SETTINGS["kv"] = "16"
    packed._PLAIN_DTYPES["F32"] = mx.float32
    packing.Plain.__str__ = lambda self: "float32"  # type: ignore[method-assign]
    Inspection._packing = lambda self, bits, dtype: packing.Plain("F32")  # type: ignore[method-assign]


SCENES = {each.__name__: each for each in (some_turns, steps, a_turn, bring_in, chosen_bits, astray)}


def _tell(scene: Callable[[], dict[str, Any]]) -> None:
    print(json.dumps(scene()), flush=True)


def main() -> None:
    scene, model, cache, adapter = sys.argv[1], *map(Path, sys.argv[2:5])
    rank = own_rank()
    SETTINGS["kv"] = os.environ["KV"]
    if SETTINGS["kv"] == "32":
        _keep_float32()
    if wanted := os.environ.get("DIE_AT"):
        ranks, step, occurrence = wanted.split(":")
        of_rank_0 = cache.parent / "rank-0.pid"
        if rank == 0:
            of_rank_0.write_text(str(os.getpid()))
        if str(rank) == ranks[-1]:
            both = "0" in ranks and rank != 0
            _die_at(step, int(occurrence), lambda: _kill(*([int(of_rank_0.read_text())] if both else [])))
    if rank:
        from agentcache.ranks.executors import follow

        run = partial(follow, Config(model=str(model), cache_dir=cache, **SETTINGS), str(model))
    else:
        run = partial(_tell, partial(SCENES[scene], model, cache, adapter))
    try:
        run()
    except RankLost as lost:
        print(lost, file=sys.stderr, flush=True)
        os._exit(LOST_CODE)


if __name__ == "__main__":
    main()
