"""What a model's folder says about text."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agentcache.api.sampling import SamplingDefaults
from agentcache.compat import TokenizerWrapper, load_tokenizer, set_template, template_data
from agentcache.errors import InvalidRequest, UnsupportedModel
from agentcache.system.files import Memo, file_identity

_FILE, _MODEL_FILE = "generation_config.json", "config.json"
_MAX_BYTES = 16 << 20

log = logging.getLogger("agentcache.models")
# Vision models use these.
_FILES = ("chat_template.json", "processor_config.json")
_DEFAULT = "default"
_FAST_CLASS = "PreTrainedTokenizerFast"
_TOKENIZER_SUFFIXES = (".json", ".jinja", ".txt", ".model")
_UNREADABLE = (ValueError, OSError, ImportError, LookupError, TypeError, AttributeError)
_RULES = "tokenizer.json"
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_OTHERS = ("tokenizer.model", "vocab.json", "vocab.txt", "merges.txt")
_SCHEME = "tokens 1"
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
# Roles add tokens that tokenizer.json lacks.
_ROLES = {"bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"}


def end_tokens(folder: Path) -> frozenset[int]:
    """Return each `eos_token_id` of config.json and generation_config.json."""
    config = read_object(folder / _MODEL_FILE)
    holders = (config, config.get("text_config"), read_object(folder / _FILE))
    return frozenset(token for holder in holders if isinstance(holder, Mapping) for token in _ids(holder))


def sampling_defaults(folder: Path) -> SamplingDefaults:
    """Return the sampling values of generation_config.json, except invalid ones."""
    found = read_object(folder / _FILE)
    values: dict[str, Any] = {}
    for name in SamplingDefaults.NAMES:
        if (value := found.get(name)) is not None:
            try:
                SamplingDefaults(**{name: value})
            except InvalidRequest as error:
                log.warning("%s is not used: %s", folder / _FILE, error)
            else:
                values[name] = value
    if found.get("do_sample") is False:
        values = {"temperature": 0.0}
    return SamplingDefaults(**values)


def read_object(file: Path) -> dict[str, Any]:
    """Read a JSON object; empty if the file is missing or invalid."""
    try:
        if file.stat().st_size > _MAX_BYTES:
            return {}
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _ids(holder: Mapping[str, Any]) -> Iterator[int]:
    named = holder.get("eos_token_id")
    for token in named if isinstance(named, list) else [named]:
        if type(token) is int and token >= 0:
            yield token


def load_wrapper(folder: Path) -> TokenizerWrapper:
    """Load tokenizer and chat template without running the folder's code. Raises UnsupportedModel."""
    try:
        wrapper = load_tokenizer(folder, {"trust_remote_code": False})
    except _UNREADABLE as error:
        if not (folder / "tokenizer.json").is_file():
            raise UnsupportedModel(f"The tokenizer in {folder} cannot be loaded: {error}") from error
        wrapper = _load_without_class(folder, error)
    _complete_template(wrapper, folder)
    return wrapper


def _load_without_class(path: Path, error: Exception) -> TokenizerWrapper:
    # The folder's class needs another package or is code.
    with TemporaryDirectory() as name:
        folder = Path(name)
        for file in path.iterdir():
            if file.suffix in _TOKENIZER_SUFFIXES and not file.name.startswith("."):
                (folder / file.name).symlink_to(file.resolve())
        config = folder / "tokenizer_config.json"
        try:
            # A truncated file would lack its chat template.
            names = json.loads(config.read_bytes().strip() or b"{}") if config.exists() else {}
            config.unlink(missing_ok=True)
            names = {key: value for key, value in names.items() if key != "auto_map"} | {"tokenizer_class": _FAST_CLASS}
            config.write_text(json.dumps(names), encoding="utf-8")
            return load_tokenizer(folder, {"trust_remote_code": False})
        except _UNREADABLE:
            raise UnsupportedModel(f"The tokenizer in {path} cannot be loaded: {error}") from error


def _complete_template(wrapper: TokenizerWrapper, folder: Path) -> None:
    template = template_data(wrapper)
    if not wrapper.has_chat_template:
        template = next(filter(None, (_named(read_object(folder / name)) for name in _FILES)), None)
    if isinstance(template, Mapping) and template and _DEFAULT not in template:
        template = {_DEFAULT: next(iter(template.values())), **template}
    if template:
        set_template(wrapper, template)


def _named(holder: Mapping[str, Any]) -> str | dict[str, str] | None:
    given = holder.get("chat_template")
    if isinstance(given, list):
        named = {each.get("name"): each.get("template") for each in given if isinstance(each, dict)}
        given = {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}
    return given if isinstance(given, str | dict) else None


def token_rules(folder: Path, memo: Memo) -> str:
    """Return a digest of the tokenisation rules, 32 hex digits, without templates and unused settings."""
    files = [file for name in (_RULES, *_SETTINGS, *_OTHERS) if (file := folder / name).is_file()]
    return memo.get(_key(_SCHEME, files), lambda: _digest_rules(files))


def tokenizer_files(folder: Path, memo: Memo) -> str:
    """Return a digest of tokenizer and template files, 40 hex digits. It must never change (`first_fingerprint`)."""
    files = [file for name in _FIRST_FILES if (file := folder / name).is_file()]
    files += sorted((folder / "additional_chat_templates").glob("*.jinja"))
    return memo.get(_key("files", files), lambda: _digest_files(folder, files))


def _key(scheme: str, files: Collection[Path]) -> str:
    # Two links may lead to one file.
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
        if not content:  # as without the file
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
