"""Adapters come, are replaced and go while requests run; their weights keep to the RAM budget."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from agentcache.api.report import Update
from agentcache.api.request import Request, TokenPrompt
from agentcache.errors import Conflict, InvalidRequest, NotFound, Overloaded, UnreadableAdapter, UnsupportedAdapter
from agentcache.llm import LLM
from agentcache.settings.tables import parse_adapters
from tests.adapters_factory import make_adapter, random_matrices, write_mlx_lm, write_peft
from tests.conftest import ModelFolder
from tests.serving import inside
from tests.serving.adapter_cases import ask, at_once, check_differs, check_equal, cold, make_folders, open_adapters
from tests.serving.conversation import check_idle, greedy, make_ids

PROMPT = make_ids(300)


@pytest.fixture(scope="module")
def base(model_folder: ModelFolder) -> Path:
    return model_folder("qwen3")


@pytest.fixture
def folders(base: Path, tmp_path: Path) -> dict[str, Path]:
    return make_folders(tmp_path / "adapters", base, ("plain", "upper"))


def device_bytes(llm: LLM) -> int:
    return llm.stats().adapter_ram_bytes


@pytest.mark.slow
def test_same_name_other_weights(base: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    with open_adapters(base, tmp_path / "cache", {"poet": folders["plain"]}) as llm:
        before = ask(llm, PROMPT, "poet")
        [old] = llm.adapters()
        new = llm.load_adapter("poet", folders["upper"])
        assert new.digest != old.digest and new.created >= old.created
        after = ask(llm, PROMPT, "poet")
        assert after.report.computed_tokens == len(PROMPT), "no stale hit"
        check_differs(after, before)
        assert [adapter.digest for adapter in llm.adapters()] == [new.digest]
        assert device_bytes(llm) == new.ram_bytes, "the old weights are gone"


@pytest.mark.slow
def test_same_weights_other_name_or_format(base: Path, tmp_path: Path) -> None:
    pairs = random_matrices(base, rank=3, seed=1)
    one, two = write_mlx_lm(tmp_path / "one", pairs), write_peft(tmp_path / "two", pairs)
    other = write_mlx_lm(tmp_path / "other", pairs, scale=1.0)
    with open_adapters(base, tmp_path / "cache", {"one": one, "two": two, "other": other}) as llm:
        first = ask(llm, PROMPT, "one")
        second = ask(llm, PROMPT, "two")
        assert (second.report.computed_tokens, second.report.cached_tokens.shared) == (1, len(PROMPT) - 1)
        check_equal(second, first)
        scaled = ask(llm, PROMPT, "other")
        assert scaled.report.computed_tokens == len(PROMPT), "another scale is another adapter"
        check_differs(scaled, first)
        assert len({adapter.digest for adapter in llm.adapters()}) == 2
        llm.unload_adapter("one")
        check_equal(ask(llm, PROMPT, "two"), first)


@pytest.mark.slow
def test_weights_are_dropped_and_read_again(base: Path, tmp_path: Path) -> None:
    """The least recently used ones, within half of what the cache can spare; and never those in use."""
    folders = {name: make_adapter(tmp_path / name, base, rank=64, seed=seed) for seed, name in enumerate("abc")}
    with open_adapters(base, tmp_path / "probe", folders) as llm:
        size, least = llm.adapters()[0].ram_bytes, inside.min_ram_budget(inside.engine_of(llm))
        expected = {name: ask(llm, PROMPT, name) for name in folders}
    with open_adapters(base, tmp_path / "cache", folders, ram_budget=least + 5 * size) as llm:
        assert [adapter.resident for adapter in llm.adapters()] == [False, True, True], "two fit"
        for name in ("a", "b", "c", "c", "a"):
            check_equal(ask(llm, PROMPT, name, salt=name * 2), expected[name])
            check_idle(llm)
            stats = llm.stats()
            assert stats.adapter_ram_bytes <= 2 * size
            assert stats.ram_bytes + stats.adapter_ram_bytes <= stats.ram_budget == least + 5 * size
        assert [adapter.resident for adapter in llm.adapters()] == [True, False, True]

        # What three requests need at a time is not there: the third one waits for the first to end.
        requests = [Request(name, TokenPrompt(PROMPT), greedy(4), salt="x", adapter=name) for name in folders]
        for name, completion in zip(folders, at_once(llm, requests), strict=True):
            check_equal(completion, expected[name])
        assert all(adapter.running == 0 for adapter in llm.adapters())


@pytest.mark.slow
def test_an_adapter_gets_its_room_under_an_endless_stream_of_requests_for_another(base: Path, tmp_path: Path) -> None:
    folders = {name: make_adapter(tmp_path / name, base, rank=64, seed=seed) for seed, name in enumerate("ab")}
    with open_adapters(base, tmp_path / "probe", {}) as llm:
        least = inside.min_ram_budget(inside.engine_of(llm))
    with open_adapters(base, tmp_path / "cache", folders, ram_budget=least + 11 * 10**6) as llm:
        assert [adapter.resident for adapter in llm.adapters()] == [False, True], "one fits"

        def begin(adapter: str) -> asyncio.Task[None]:
            request = Request(adapter, TokenPrompt(PROMPT[:20]), greedy(4), adapter=adapter)
            return asyncio.ensure_future(inside.async_engine(llm).generate(request, lambda update: None))

        async def run() -> None:
            stream, num_done = {begin("b") for _ in range(4)}, 0
            waiting = begin("a")
            while not waiting.done():
                assert num_done < 60, "it waits for ever"
                done, _ = await asyncio.wait({*stream, waiting}, return_when=asyncio.FIRST_COMPLETED)
                num_done += len(done & stream)
                stream = (stream - done) | {begin("b") for _ in done & stream}
            await waiting
            await asyncio.gather(*stream)

        inside.on_loop(llm, run())


@pytest.mark.slow
def test_a_dropped_adapter_whose_folder_has_changed(base: Path, tmp_path: Path) -> None:
    folders = {name: make_adapter(tmp_path / name, base, rank=64, seed=seed) for seed, name in enumerate("abc")}
    with open_adapters(base, tmp_path / "probe", {}) as llm:
        least = inside.min_ram_budget(inside.engine_of(llm))
    with open_adapters(base, tmp_path / "cache", folders, ram_budget=least + 11 * 10**6) as llm:
        assert [adapter.resident for adapter in llm.adapters()] == [False, False, True], "one fits"
        make_adapter(folders["a"], base, rank=64, seed=9)
        with pytest.raises(UnsupportedAdapter, match="has changed since it was loaded; load it anew"):
            ask(llm, PROMPT, "a")
        shutil.rmtree(folders["a"])
        with pytest.raises(UnsupportedAdapter, match="no such folder"):
            ask(llm, PROMPT, "a")
        make_adapter(folders["a"], base, rank=64, seed=9)
        llm.load_adapter("a", folders["a"])
        check_equal(again := ask(llm, PROMPT, "a"), cold(llm, again))


@pytest.mark.slow
def test_too_large_for_the_budget(base: Path, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "large", base, rank=64)
    with open_adapters(base, tmp_path / "probe", {}) as llm:
        least = inside.min_ram_budget(inside.engine_of(llm))
    with open_adapters(base, tmp_path / "cache", {}, ram_budget=least + 10**5) as llm:
        with pytest.raises(InvalidRequest, match="of the RAM budget, adapters may take") as caught:
            llm.load_adapter("large", folder)
        assert caught.value.code == "insufficient_memory"
        assert llm.adapters() == () and device_bytes(llm) == 0


@pytest.mark.slow
def test_no_room_beside_a_running_request(base: Path, tmp_path: Path) -> None:
    """Nobody loses blocks that he reads: the adapter's request is told to come again."""
    folder = make_adapter(tmp_path / "large", base, rank=8)
    with open_adapters(base, tmp_path / "probe", {"large": folder}) as llm:
        size, least = llm.adapters()[0].ram_bytes, inside.min_ram_budget(inside.engine_of(llm))
    with open_adapters(base, tmp_path / "cache", {}, ram_budget=least + 3 * size) as llm:
        ids = make_ids(inside.max_cached_tokens(inside.engine_of(llm)) - 200)

        async def run() -> None:
            updates: list[Update] = []
            running = asyncio.ensure_future(
                inside.async_engine(llm).generate(Request("base", TokenPrompt(ids), greedy(150)), updates.append)
            )
            while not updates:
                await asyncio.sleep(0.01)
            loaded = await inside.async_engine(llm).load_adapter(parse_adapters({"large": folder})[0])
            assert not loaded.resident, "it will be, once there is room"
            with pytest.raises(Overloaded) as caught:
                await inside.async_engine(llm).generate(
                    Request("large", TokenPrompt(PROMPT), greedy(1), adapter="large"), print
                )
            assert caught.value.code == "insufficient_memory"
            assert not running.done()
            await running

        inside.on_loop(llm, run())
        check_equal(said := ask(llm, PROMPT, "large"), cold(llm, said))
        assert llm.adapters()[0].resident


@pytest.mark.slow
def test_replaced_and_unloaded_while_it_runs(base: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    """The running request keeps what its name meant; new ones are refused at once; then the weights go."""
    with open_adapters(base, tmp_path / "cache", {"poet": folders["plain"]}) as llm:
        expected = ask(llm, PROMPT, "poet", tokens=150)

        async def run() -> list[int]:
            request = Request("r", TokenPrompt(PROMPT), greedy(150), salt="again", adapter="poet")
            said: list[int] = []
            running = asyncio.ensure_future(
                inside.async_engine(llm).generate(request, lambda update: said.extend(update.token_ids))
            )
            while not said:
                await asyncio.sleep(0.01)
            await inside.async_engine(llm).load_adapter(parse_adapters({"poet": folders["upper"]})[0])
            await inside.async_engine(llm).unload_adapter("poet")
            with pytest.raises(NotFound):
                await inside.async_engine(llm).generate(request, said.append)
            assert not running.done()
            await running
            return said

        assert tuple(inside.on_loop(llm, run())) == expected.token_ids
        assert llm.adapters() == () and device_bytes(llm) == 0


@pytest.mark.slow
def test_a_cancelled_request_gives_its_adapter_back(base: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    with open_adapters(base, tmp_path / "cache", {"poet": folders["plain"]}) as llm:

        async def leave() -> None:
            updates: list[Update] = []
            request = Request("r", TokenPrompt(PROMPT), greedy(500), adapter="poet")
            running = asyncio.ensure_future(inside.async_engine(llm).generate(request, updates.append))
            while not updates:
                await asyncio.sleep(0.01)
            assert inside.async_engine(llm).model.adapters[0].running == 1
            running.cancel()
            await asyncio.wait({running})

        inside.on_loop(llm, leave())
        assert llm.adapters()[0].running == 0
        llm.unload_adapter("poet")
        assert device_bytes(llm) == 0


def test_refusals(base: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    broken = make_adapter(tmp_path / "dora", base, config={"fine_tune_type": "dora"})
    silent = make_adapter(tmp_path / "silent", base, config={"alora_invocation_tokens": [7, 10**6]})
    with open_adapters(base, tmp_path / "cache", {}) as llm:
        for name in ("../x", "", "a:b"):
            with pytest.raises(InvalidRequest):
                llm.load_adapter(name, folders["plain"])
        for name in ("default", base.name):
            with pytest.raises(Conflict):
                llm.load_adapter(name, folders["plain"])
        for path in (broken, silent, tmp_path / "nothing", base / "config.json", "~nobody-of-that-name/x"):
            with pytest.raises(UnsupportedAdapter) as caught:
                llm.load_adapter("poet", path)
            assert caught.value.param == "path"
        with pytest.raises(InvalidRequest, match="--max-divergence"):
            llm.load_adapter("poet", folders["plain"], "residual")
        assert llm.adapters() == ()


def test_what_is_not_there_is_told_from_what_is_wrong(base: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    """The server answers the former with one sentence, whatever there is."""
    for folder in ("pipe", "empty", "no config"):
        (tmp_path / folder).mkdir()
    os.mkfifo(tmp_path / "pipe" / "adapters.safetensors")
    shutil.copy(folders["plain"] / "adapters.safetensors", tmp_path / "no config")
    (tmp_path / "file").touch()
    with open_adapters(base, tmp_path / "cache", {}) as llm:
        for name in ("nothing", "file", "empty", "pipe", "no config", "x" * 5000):
            with pytest.raises(UnreadableAdapter):
                llm.load_adapter("x", tmp_path / name)
        large = folders["plain"] / "adapters.safetensors"
        os.truncate(large, 2 * llm.stats().ram_budget + (32 << 20))  # it takes no room on the disk
        with pytest.raises(UnsupportedAdapter, match="is larger than") as caught:
            llm.load_adapter("x", folders["plain"])
        assert not isinstance(caught.value, UnreadableAdapter)


def test_a_broken_adapter_keeps_the_engine_from_starting(base: Path, tmp_path: Path) -> None:
    """And the cache folder is free again."""
    for _ in range(2):
        with pytest.raises(UnsupportedAdapter, match="no such folder"):
            LLM(base, cache_dir=tmp_path / "cache", adapters={"poet": tmp_path / "nothing"}, ram_budget="64MB")


def test_values_that_no_block_could_hold_do_not_matter(base: Path, tmp_path: Path) -> None:
    """B = 0 is base in all but its name: its own blocks, the same tokens."""
    pairs = random_matrices(base, rank=2)
    nothing = {name: type(pair)(pair.a, np.zeros_like(pair.b)) for name, pair in pairs.items()}
    with open_adapters(base, tmp_path / "cache", {"none": write_mlx_lm(tmp_path / "none", nothing)}) as llm:
        check_equal(ask(llm, PROMPT, "none"), ask(llm, PROMPT))
        llm.unload_adapter("none")
        [weights] = [use for use in llm.stats().ram_accounts if use.kind == "adapters"]
        assert weights.capacity_bytes == weights.used_bytes == 0, "the cache has the memory again"
