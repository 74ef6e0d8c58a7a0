"""Digests of the files in a model folder that determine tokenisation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from agentcache.system.file_identity import file_identity
from agentcache.system.memo import Memo

_RULES = "tokenizer.json"
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_OTHERS = ("tokenizer.model", "vocab.json", "vocab.txt", "merges.txt")
_SCHEME = "tokens 1"  # part of the memo's key
_FIRST_FILES = (  # the order matters
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)

# Unused by `encoder.py`; a prompt's text includes BOS.
_HARMLESS_RULES = {"version", "truncation", "padding", "post_processor"}
_HARMLESS_SETTINGS = {
    "add_bos_token",
    "add_eos_token",
    "auto_map",
    "backend",
    "chat_template",
    "clean_up_tokenization_spaces",  # `detokenizer.py` ignores it
    "is_local",
    "local_files_only",
    "model_max_length",
    "name_or_path",
    "padding_side",
    "processor_class",
    "response_schema",
    "tool_parser_type",
    "truncation_side",
}
# A role adds a token unless tokenizer.json has it.
_ROLES = {"bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"}


def token_rules(folder: Path, memo: Memo) -> str:
    """Return a digest of the tokenisation rules, 32 hex digits.

    It ignores chat templates, roles of known tokens and unused settings.
    """
    files = [file for name in (_RULES, *_SETTINGS, *_OTHERS) if (file := folder / name).is_file()]
    return memo.get(_key(_SCHEME, files), lambda: _digest_rules(files))


def tokenizer_files(folder: Path, memo: Memo) -> str:
    """Return a digest of tokenizer and template files, 40 hex digits. Never change it: `first_fingerprint` uses it."""
    files = [file for name in _FIRST_FILES if (file := folder / name).is_file()]
    files += sorted((folder / "additional_chat_templates").glob("*.jinja"))
    return memo.get(_key("files", files), lambda: _digest_files(folder, files))


def _key(scheme: str, files: Collection[Path]) -> str:
    # With names: two links may lead to one file.
    return "|".join([scheme, *(f"{file.name} {file_identity(file)}" for file in files)])


def _digest_files(folder: Path, files: Collection[Path]) -> str:
    state = hashlib.blake2b(digest_size=20, person=b"agentcache.token")
    for file in files:
        for part in (file.relative_to(folder).as_posix().encode(), file.read_bytes()):
            state.update(len(part).to_bytes(8, "little"))
            state.update(part)
    return state.hexdigest()


def _digest_rules(files: Collection[Path]) -> str:
    state = hashlib.blake2b(digest_size=16, person=b"agentcache.rules")
    added = frozenset[str]()
    for file in files:
        content: Any = file.read_bytes()
        if file.suffix == ".json":
            content = _parsed(content)
        if file.name == _RULES and isinstance(content, dict):
            added = frozenset(map(_text_of, content.get("added_tokens") or ()))
            content = {name: value for name, value in content.items() if name not in _HARMLESS_RULES}
        elif file.name in _SETTINGS and isinstance(content, dict):
            content = _counting(content, added)
        if not content:  # same digest as without the file
            continue
        data = content if isinstance(content, bytes) else json.dumps(content, sort_keys=True).encode()
        for part in (file.name.encode(), data):
            state.update(len(part).to_bytes(8, "little"))
            state.update(part)
    return state.hexdigest()


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return data


def _counting(settings: dict[str, Any], added: Collection[str]) -> dict[str, Any]:
    return {
        name: value
        for name, value in settings.items()
        if name not in _HARMLESS_SETTINGS and not (name in _ROLES and (value is None or _text_of(value) in added))
    }


def _text_of(token: Any) -> str:
    return str(token.get("content") if isinstance(token, dict) else token)
