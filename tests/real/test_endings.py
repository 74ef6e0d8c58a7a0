"""Each family stops at each end token that its authors publish, and its replies are told apart, over HTTP.

Thoughts, text and calls are the same in every dialect of the wire, streamed and not, also where each token is one byte.
SmolLM2 has its whole vocabulary, the other tokenizers their first merges; `test_scripted_model.py` takes them whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentcache.text.tokenizer import Tokenizer
from tests.live.servers import http_of, serving
from tests.real.folders import FAMILIES, Script, family_tokenizer, rescript
from tests.real.scripted_model import STRIDE
from tests.real.smollm2 import smollm2_folder
from tests.reply_formats import TOOLS
from tests.serving.wire import Said, say_in
from tests.text.test_replies import in_bytes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DIALECTS = ("chat", "messages", "responses")
_SKY = {"at": "日 </x> 🙂"}
_JSON = json.dumps(_SKY, ensure_ascii=False)
_CALL = f'<tool_call>\n{{"name": "look", "arguments": {_JSON}}}\n</tool_call>'
_PLAIN = ("Fünf, 日本, 🙂.", Said("", "Fünf, 日本, 🙂."))

# Replies without their end, and what they say.
REPLIES: dict[str, tuple[tuple[str, Said], ...]] = {
    "qwen3": (
        _PLAIN,
        ("<think>\nhm 日\n</think>\n\nFünf.", Said("hm 日", "Fünf.")),
        (f"<think>\nhm\n</think>\n\nSo:\n{_CALL}", Said("hm", "So:", (("look", _SKY),))),
        ("<think>\na\n</think>private 日</think>Fünf.", Said("a\nprivate 日", "Fünf.")),
    ),
    "gemma3": (_PLAIN,),
    "llama3_1": (
        _PLAIN,
        (f'{{"name": "look", "parameters": {_JSON}}}', Said("", "", (("look", _SKY),))),
        (f'<|python_tag|>{{"name": "look", "parameters": {_JSON}}}', Said("", "", (("look", _SKY),))),
    ),
    "deepseek_v3": (
        _PLAIN,
        (
            "So:<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n"
            f"```json\n{_JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            Said("", "So:", (("look", _SKY),)),
        ),
    ),
    "gptoss": (
        ("<|channel|>final<|message|>Fünf, 日.", Said("", "Fünf, 日.")),
        (
            "<|channel|>analysis<|message|>hm 日<|end|><|start|>assistant<|channel|>final<|message|>Fünf.",
            Said("hm 日", "Fünf."),
        ),
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.look "
            f"<|constrain|>json<|message|>{_JSON}",
            Said("hm", "", (("look", _SKY),)),
        ),
    ),
    "smollm2": (_PLAIN,),
}


def folder_of(name: str, folder: Path) -> Path:
    if name != "smollm2":
        return family_tokenizer(folder, name, small=True)
    folder.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"):
        if (smollm2_folder() / file).exists():
            shutil.copy(smollm2_folder() / file, folder)
    return folder


def published_ends(folder: Path, tokenizer: Tokenizer) -> list[int]:
    """The end tokens that any file of the folder names."""
    ends: set[int] = set()
    for file in ("config.json", "generation_config.json"):
        if (folder / file).exists():
            named = json.loads((folder / file).read_text(encoding="utf-8")).get("eos_token_id", [])
            ends.update([named] if isinstance(named, int) else named)
    return sorted(ends | tokenizer.eos_ids)


class Server:
    """A server as `say_in` asks it. Attributes: length: tokens of the newest prompt that was asked with `post`."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self.length = 0
        self._around: dict[tuple[str, bool], int] = {}

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        response = self._http.post(path, json=body)
        assert response.status_code == 200, response.text
        if not body.get("stream"):
            usage = response.json()["usage"]
            kinds = ("prompt_tokens", "input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
            self.length = sum(usage.get(kind, 0) for kind in kinds)
        return response

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        lines = self.post(path, body | {"stream": True}).text.split("\n")
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

    def content(self, dialect: str, script: int, num_scripts: int, tools: Sequence[dict[str, Any]]) -> str:
        """A user's words with which the prompt asks for a script."""
        kind = dialect, bool(tools)
        if kind not in self._around:
            self._around[kind] = self._tokens_around(dialect, tools)
        around = self._around[kind]
        strides = next(n for n in range(1 + around // STRIDE, 64) if n % num_scripts == script)
        return _words(strides * STRIDE - around)

    def _tokens_around(self, dialect: str, tools: Sequence[dict[str, Any]]) -> int:
        """How many tokens a prompt has beside its user's words."""
        limit = {"max_output_tokens" if dialect == "responses" else "max_tokens": 1}
        lengths = set()
        for words in (40, 90):
            say_in(self, dialect, _words(words), streams=False, tools=tools, **limit)
            lengths.add(self.length - words)
        [around] = lengths
        return around


def _words(count: int) -> str:
    """Words of as many tokens."""
    return "a" + " a" * (count - 1)


@pytest.mark.parametrize("name", [*FAMILIES, "smollm2"])
def test_replies_of_a_family(name: str, tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path / "model")
    tokenizer = Tokenizer.load(folder)
    ends = published_ends(folder, tokenizer)
    assert set(ends) == tokenizer.eos_ids
    replies = REPLIES[name]
    scripts: list[Script] = []
    expected: list[Said] = []
    for end in ends:
        scripts.append([*tokenizer.encode(replies[0][0]).ids, end])
        expected.append(replies[0][1])
    for reply, said in replies:
        for ids in (tokenizer.encode(reply).ids, in_bytes(tokenizer, tokenizer.encode(reply).ids)):
            scripts.append([*ids, ends[-1]])
            expected.append(said)
    rescript(folder, scripts)
    with serving(folder, tmp_path / "cache") as process, http_of(process) as http:
        server = Server(http)
        for number, said in enumerate(expected):
            tools = TOOLS if said.calls else ()
            for dialect in DIALECTS:
                content = server.content(dialect, number, len(scripts), tools)
                for streams in (False, True):
                    found = say_in(server, dialect, content, streams=streams, tools=tools, temperature=0)
                    assert server.length % STRIDE == 0
                    assert found == said, (dialect, streams, number)
