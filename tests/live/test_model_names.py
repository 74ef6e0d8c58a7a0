"""A model's chat template is corrected while its server is down: agents and their caches stay."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.live.servers import agent_info, all_ids, chat, check_against_cold, make_text, serving

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("old", "new", "is_extended"),
    [
        ("<|im_start|>assistant\n", "<|im_start|>assistant\n\n", True),
        ("{% for message in messages %}", "Today.\n{% for message in messages %}", False),
    ],
    ids=["its end", "its beginning"],
)
def test_a_corrected_chat_template_keeps_agents(
    live_model: Path, tmp_path: Path, agent: str, old: str, new: str, is_extended: bool
) -> None:
    model, cache_dir = Path(shutil.copytree(live_model, tmp_path / "model")), tmp_path / "cache"
    messages = [{"role": "system", "content": make_text(300)}, {"role": "user", "content": make_text(100, seed=1)}]
    with serving(model, cache_dir) as server:
        first = chat(server, messages, 4, agent=agent)
        messages += [{"role": "assistant", "content": first["choices"][0]["message"]["content"]}]
        messages += [{"role": "user", "content": "And?"}]
    path = model / "tokenizer_config.json"
    config = json.loads(path.read_text())
    assert old in config["chat_template"]
    path.write_text(json.dumps(config | {"chat_template": config["chat_template"].replace(old, new)}))
    with serving(model, cache_dir) as server:
        assert agent_info(server, agent)["tokens"] == len(all_ids(first))
        assert agent_info(server, agent)["cache_state"] == "warm"
        second = chat(server, messages, 4, agent=agent)
        cached = second["agentcache"]["cached_tokens"]["own"]
        assert (cached > 400) == is_extended
        assert cached + second["agentcache"]["computed_tokens"] == second["usage"]["prompt_tokens"]
        check_against_cold(server, second)
