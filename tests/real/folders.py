"""Model folders with published tokenizers, chat templates and config values; the weights are scripted.

The config values are those that the models' authors publish, as far as a server reads them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from tests.real.first_merges import renumbered, with_first_merges
from tests.real.packages import TEMPLATES, TOKENIZERS, unpacked
from tests.real.scripted_model import STRIDE, write_scripted_model
from tests.tokenizers_factory import byte_bpe

_SPECIAL = re.compile(
    r"<[|｜][^<>|｜\s]{1,40}[|｜]>|\[/?[A-Z_]{3,25}\]|</?(?:start|beginning|end)_of_[a-z]+>|◁[^▷\s]{1,20}▷"
    r"|<SPECIAL_\d+>|<seed:[be]os>|<sep>|</?assistant>|\]~!?b\[?\]?|\[e~\[|<\|(?:turn|channel)>|<(?:turn|channel)\|>"
)


# As text, or as token ids.
Script = str | Sequence[int]


@dataclass(frozen=True)
class Family:
    """What the authors of a model publish beside its weights.

    Args:
        tokenizer: a name in `TOKENIZERS`.
        template: file of the package of templates; None for the one in tokenizer_config.json.
        config: entries of config.json.
        generation: generation_config.json.
        names: entries of tokenizer_config.json that the package has otherwise than the authors.
    """

    tokenizer: str
    template: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)
    names: dict[str, Any] = field(default_factory=dict)


FAMILIES: dict[str, Family] = {
    "qwen3": Family(
        "qwen3",
        config={"bos_token_id": 151643, "eos_token_id": 151645},
        generation={
            "bos_token_id": 151643,
            "do_sample": True,
            "eos_token_id": [151645, 151643],
            "pad_token_id": 151643,
            "temperature": 0.6,
            "top_k": 20,
            "top_p": 0.95,
        },
    ),
    "gemma3": Family(
        "gemma3",
        config={"bos_token_id": 2, "eos_token_id": [1, 106], "pad_token_id": 0},
        generation={
            "bos_token_id": 2,
            "cache_implementation": "hybrid",
            "do_sample": True,
            "eos_token_id": [1, 106],
            "pad_token_id": 0,
            "top_k": 64,
            "top_p": 0.95,
        },
        names={"eos_token": "<eos>"},
    ),
    "llama3_1": Family(
        "llama3_1",
        template="meta-llama-Llama-3.1-8B-Instruct.jinja",
        config={"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009]},
        generation={
            "bos_token_id": 128000,
            "do_sample": True,
            "eos_token_id": [128001, 128008, 128009],
            "temperature": 0.6,
            "top_p": 0.9,
        },
    ),
    "deepseek_v3": Family(
        "deepseek_v3",
        config={"bos_token_id": 0, "eos_token_id": 1},
        generation={"bos_token_id": 0, "do_sample": True, "eos_token_id": 1, "temperature": 0.6, "top_p": 0.95},
    ),
    "gptoss": Family(
        "gptoss",
        template="openai-gpt-oss-120b.jinja",
        config={"eos_token_id": 200002, "pad_token_id": 199999},
        generation={
            "bos_token_id": 199998,
            "do_sample": True,
            "eos_token_id": [200002, 199999, 200012],
            "pad_token_id": 199999,
        },
    ),
}


def family_folder(folder: Path, name: str, scripts: Sequence[Script], *, small: bool = False) -> Path:
    """A folder of one of `FAMILIES`; its model answers with `scripts`, whose special tokens end them.

    Args:
        small: see `family_tokenizer`.

    Raises:
        Unavailable: a package cannot be had.
    """
    rescript(family_tokenizer(folder, name, small=small), scripts)
    return folder


def family_tokenizer(folder: Path, name: str, *, small: bool = False) -> Path:
    """The tokenizer of `family_folder` with the published end tokens.

    Args:
        small: whether it has the first merges only, which loads ten times as fast.

    Raises:
        Unavailable: a package cannot be had.
    """
    family = FAMILIES[name]
    source = unpacked(TOKENIZERS[family.tokenizer]) / "models"
    folder.mkdir(parents=True, exist_ok=True)
    names = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8")) | family.names
    config, generation = family.config, family.generation
    if small:
        smaller, new_ids = with_first_merges(json.loads((source / "tokenizer.json").read_text(encoding="utf-8")))
        _write_json(folder / "tokenizer.json", smaller)
        config, generation = renumbered(config, new_ids), renumbered(generation, new_ids)
        names.pop("added_tokens_decoder", None)  # by number; tokenizer.json has them, too
    else:
        shutil.copy(source / "tokenizer.json", folder)
    if family.template is not None:
        names["chat_template"] = template_text(family.template)
    _write_json(folder / "tokenizer_config.json", names)
    _write_json(folder / "generation_config.json", generation)
    _write_json(folder / "config.json", config)
    return folder


def template_names() -> list[str]:
    """The files of all published templates that the package carries. Raises Unavailable."""
    return sorted(path.name for path in _template_folder().glob("*.jinja"))


def template_text(name: str) -> str:
    """A published template. Raises Unavailable."""
    return (_template_folder() / name).read_text(encoding="utf-8")


def template_folder(folder: Path, name: str, scripts: Sequence[str] = ("",)) -> Path:
    """A folder with a published template and a small tokenizer of which the template's special tokens are tokens.

    Raises:
        Unavailable: a package cannot be had.
    """
    template_tokenizer(folder, name)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    end = tokenizer.token_to_id(names["eos_token"])
    _write_model(folder, tokenizer, scripts, {"eos_token_id": end})
    return folder


def template_tokenizer(folder: Path, name: str) -> Path:
    """The tokenizer of `template_folder` alone; it has Qwen3's added tokens, too.

    Raises:
        Unavailable: a package cannot be had.
    """
    text = template_text(name)
    tokenizer = Tokenizer.from_file(str(byte_bpe(folder) / "tokenizer.json"))
    special, plain = _added_by_qwen3()
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)
    specials = sorted(set(_SPECIAL.findall(text)))
    tokenizer.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in specials])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": next((each for each in specials if "begin" in each or "startof" in each), "<|endoftext|>"),
        "eos_token": next((each for each in specials if "end" in each or "eot" in each), "<|im_end|>"),
        "chat_template": text,
    }
    _write_json(folder / "tokenizer_config.json", names)
    return folder


@cache
def _added_by_qwen3() -> tuple[list[AddedToken], list[AddedToken]]:
    """Special ones and others."""
    published = json.loads((unpacked(TOKENIZERS["qwen3"]) / "models/tokenizer.json").read_text(encoding="utf-8"))
    tokens = sorted(published["added_tokens"], key=lambda token: token["id"])
    added = [AddedToken(**{name: value for name, value in token.items() if name != "id"}) for token in tokens]
    return [token for token in added if token.special], [token for token in added if not token.special]


def _template_folder() -> Path:
    return unpacked(TEMPLATES) / "vendor/llama.cpp/models/templates"


def rescript(folder: Path, scripts: Sequence[Script], stride: int = STRIDE) -> None:
    """Other scripts for the model of a folder; see `write_scripted_model`."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    named = {name: value for name, value in config.items() if name.endswith("_token_id")}
    _write_model(folder, Tokenizer.from_file(str(folder / "tokenizer.json")), scripts, named, stride)


def _write_model(
    folder: Path, tokenizer: Tokenizer, scripts: Sequence[Script], config: dict[str, Any], stride: int = STRIDE
) -> None:
    ids = [
        (tokenizer.encode(script, add_special_tokens=False).ids or [0]) if isinstance(script, str) else script
        for script in scripts
    ]
    size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
    write_scripted_model(folder, ids, vocab_size=size, stride=stride, **config)


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
