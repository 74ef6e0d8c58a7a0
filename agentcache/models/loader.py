"""Load an mlx-lm model and put it on the paged cache."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from agentcache.api.start_progress import StartProgress
from agentcache.blocks.keys import Namespace
from agentcache.compat import download, load_model
from agentcache.errors import InvalidRequest, UnsupportedModel
from agentcache.kv.packing import AUTO, BITS, Precision
from agentcache.kv.spec import CacheSpec
from agentcache.models.attachment import ChoosePrecision, Everywhere, host
from agentcache.models.fingerprint import ModelFingerprints, model_fingerprints, source_digest
from agentcache.models.hidden_states import ModelHiddenStates
from agentcache.models.inspection import Inspection, text_config
from agentcache.models.layers import distrust_sorted_rows
from agentcache.models.lora import ModelAdapters
from agentcache.models.precision import Measured, Numbers, PrecisionSearch
from agentcache.models.precision_runs import SAMPLE, gains_by_float32, in_float32
from agentcache.models.step import CurrentStep
from agentcache.store.cache_files import whose
from agentcache.store.model_files import ModelNames
from agentcache.system.files import Memo, make_private_folder, read_memo, write_memo
from agentcache.text.tokenizer import Tokenizer

_CONTEXT_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "model_max_length",
)
_DEFAULT_CONTEXT = 8192
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_VOCABULARY_SIZES = ("vocab_size", "num_vocab")
_TEXT_SUFFIXES = (".json", ".jinja", ".txt")
_MAX_TEXT_BYTES = 1 << 28
_MOST_SAMPLE_TOKENS = 896  # most tokenizers need 650 for all of the sample
_PROVING = "comparing the model on the cache with mlx-lm"
_T = TypeVar("_T")


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run on the paged cache; `search` is None if its `precision` is final."""

    model: nn.Module
    current: CurrentStep
    adapters: ModelAdapters
    hidden_states: ModelHiddenStates
    tokenizer: Tokenizer
    inspection: Inspection
    spec: CacheSpec
    names: ModelNames
    path: Path
    config: dict[str, Any]
    max_context: int
    ranks: int = 1
    search: PrecisionSearch | None = None

    def namespace(self, salt: str) -> Namespace:
        return Namespace(self.fingerprint, self.spec.digest, salt)

    @property
    def fingerprint(self) -> str:
        """Part of every block key."""
        return self.names.current

    @property
    def precision(self) -> Precision:
        return self.inspection.precision

    @cached_property
    def num_embeddings(self) -> int | None:
        """Token ids beyond it read out of bounds."""
        sizes = self.config | text_config(self.config)
        return next((size for name in _VOCABULARY_SIZES if isinstance(size := sizes.get(name), int)), None)

    @property
    def num_token_ids(self) -> int | None:
        rows = self.num_embeddings
        return None if rows is None else max(rows, self.tokenizer.vocab_size)

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(self.model)

    @property
    def is_half(self) -> bool:
        floats = [x for _, x in tree_flatten(self.model.parameters()) if mx.issubdtype(x.dtype, mx.floating)]
        return max(floats, key=lambda x: x.size).dtype.size == 2


class WantedPositions(nn.Module):
    """Final norm, of wanted positions only."""

    def __init__(self, norm: nn.Module, current: CurrentStep) -> None:
        super().__init__()
        self.norm = norm
        self._current = current

    def __call__(self, x: mx.array) -> mx.array:
        step = self._current.step
        return self.norm(x if step is not None and step.all_logits else x[:, -1:])


@dataclass(frozen=True)
class ReadModel:
    """A model as mlx-lm builds it, lazy until `evaluate`."""

    path: Path
    model: nn.Module
    config: dict[str, Any]
    tokenizer: Tokenizer

    def evaluate(self) -> None:
        """Read the weights. Raises UnsupportedModel."""
        # Also lazy arrays beside the parameters: only this thread can compute them.
        others = [array for module in self.model.modules() for array in module.values() if isinstance(array, mx.array)]
        _or_unsupported(self.path, "model", lambda: mx.eval(self.model.parameters(), others))


def _new_names(fingerprints: ModelFingerprints) -> ModelNames:
    return ModelNames(fingerprints.identity, identity=fingerprints.identity)


def load(
    path_or_hub_id: str,
    *,
    memo: Path | None = None,
    max_context: int | None = None,
    check_weights: Callable[[int], None] = lambda num_bytes: None,
    kv: str,
    kept: Callable[[str], Precision | None] = lambda fingerprint: None,
    find_names: Callable[[ModelFingerprints], ModelNames] = _new_names,
    measured: Path | None = None,
    measure_seconds: float = math.inf,
    progress: StartProgress | None = None,
) -> LoadedModel:
    """Load a model on the calling thread, which must also run it. Raises UnsupportedModel.

    `check_weights` gets the weights' bytes before they are read, and may raise. `kv` is one of `BITS`, or `auto`: then
    `kept` finds an earlier choice, and `measured` is a file of measurements.
    """
    progress = progress or StartProgress()
    progress.begin("reading the model")
    return put_on_cache(
        read_model(path_or_hub_id),
        memo=memo,
        max_context=max_context,
        check_weights=check_weights,
        kv=kv,
        kept=kept,
        find_names=find_names,
        measured=measured,
        measure_seconds=measure_seconds,
        progress=progress,
    )


def put_on_cache(
    read: ReadModel,
    *,
    memo: Path | None = None,
    max_context: int | None = None,
    check_weights: Callable[[int], None] = lambda num_bytes: None,
    kv: str,
    kept: Callable[[str], Precision | None] = lambda fingerprint: None,
    find_names: Callable[[ModelFingerprints], ModelNames] = _new_names,
    agree: Callable[[float], float] = lambda divergence: divergence,
    measured: Path | None = None,
    measure_seconds: float = math.inf,
    progress: StartProgress | None = None,
) -> LoadedModel:
    """Second half of `load`; `agree` as in `PrecisionSearch`."""
    progress = progress or StartProgress()
    model, config, tokenizer = read.model, read.config, read.tokenizer
    check_weights(weight_bytes(model))
    read.evaluate()
    current = CurrentStep()
    names = find_names(_or_unsupported(read.path, "model", lambda: model_fingerprints(read.path, memo)))
    known = Memo(memo)
    sources = source_digest(model, known)
    known.keep()
    choose: Everywhere | Measured
    if kv == AUTO:
        text = sample_ids(tokenizer)
        choose = Measured(
            text,
            kept(names.current),
            seconds=measure_seconds,
            progress=progress,
            current=current,
            agree=agree,
            **_numbers_in(measured, names.current, text),
        )
    else:
        choose = Everywhere(BITS[kv])
    progress.begin(_PROVING)
    within = in_float32 if agree(float(gains_by_float32(model))) else nullcontext
    hosted = host(model, config["model_type"], config, choose=choose, within=within)
    install_wanted_positions(hosted.inspection, current)
    return LoadedModel(
        model=model,
        current=current,
        adapters=ModelAdapters(model, hosted.inspection, current),
        hidden_states=ModelHiddenStates(model, hosted.inspection, current),
        tokenizer=tokenizer,
        inspection=hosted.inspection,
        spec=replace(hosted.spec, sources=sources),
        names=names,
        path=read.path,
        config=config,
        max_context=min(_context_length(config), max_context or 2**62),
        search=choose.unfinished if isinstance(choose, Measured) else None,
    )


def in_chosen_precision(loaded: LoadedModel, progress: StartProgress) -> LoadedModel:
    """Return the model in the bits that its search chose, proved again; `loaded` must not run any more."""
    assert loaded.search is not None and loaded.search.precision is not None
    model, config, precision = loaded.model, loaded.config, loaded.search.precision
    progress.begin(_PROVING)
    within = in_float32 if gains_by_float32(model) else nullcontext
    choose: ChoosePrecision = lambda model, inspection: precision  # noqa: E731
    hosted = host(model, config["model_type"], config, choose=choose, within=within, adapted=loaded.inspection)
    loaded.adapters.stacks.clear()
    loaded.hidden_states.forget()
    return replace(
        loaded, inspection=hosted.inspection, spec=replace(hosted.spec, sources=loaded.spec.sources), search=None
    )


def _numbers_in(file: Path | None, fingerprint: str, text: Sequence[int]) -> dict[str, Any]:
    key = hashlib.blake2b(f"{fingerprint} {text}".encode(), digest_size=16).hexdigest()
    try:
        entries = json.loads(read_memo(file).get(key, "{}")).items()
        known = {what: [float(number) for number in numbers] for what, numbers in entries}
    except (ValueError, TypeError, AttributeError):
        known = {}

    def keep(numbers: Numbers) -> None:
        if file is not None:
            with suppress(OSError):  # such a folder fails the start later
                make_private_folder(file.parent)
            write_memo(file, read_memo(file) | {key: json.dumps(dict(numbers))})

    return {"known": known, "keep": keep}


def sample_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Token ids of a text for measuring precision."""
    try:
        chat = tokenizer.chats.text(SAMPLE, add_generation_prompt=False)
    except InvalidRequest:
        chat = tokenizer.raw_prompt("".join(f"{each['role']}: {each['content']}\n" for each in SAMPLE))
    return tuple(tokenizer.encode(chat).ids[:_MOST_SAMPLE_TOKENS])


def read_model(path_or_hub_id: str) -> ReadModel:
    """First half of `load`."""
    folder = _folder(path_or_hub_id)
    # Without trust_remote_code: nothing in a model folder is executed.
    model, config = _or_unsupported(folder, "model", lambda: load_model(folder, lazy=True))
    distrust_sorted_rows(model)
    tokenizer = _or_unsupported(folder, "tokenizer", lambda: Tokenizer.load(folder))
    return ReadModel(folder, model, config, tokenizer)


def weight_bytes(model: nn.Module) -> int:
    return sum(int(array.nbytes) for _, array in tree_flatten(model.parameters()))


def _folder(path_or_hub_id: str) -> Path:
    try:
        folder = Path(path_or_hub_id).expanduser()
        if folder.is_dir():
            _check_folder(folder)
            return folder.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: an unknown user's home
        whose_it_is = whose(error) if isinstance(error, OSError) else ""
        raise UnsupportedModel(f"the model {path_or_hub_id:.200} cannot be read: {error}{whose_it_is}") from error
    if folder.is_absolute() or path_or_hub_id.startswith((".", "~")) or path_or_hub_id.count("/") != 1:
        raise UnsupportedModel(f"there is no model folder {path_or_hub_id!r} (a hub id looks like owner/name)")
    try:
        return download(path_or_hub_id)
    except Exception as error:  # the hub client raises many types
        raise UnsupportedModel(f"model {path_or_hub_id!r} could not be fetched: {error}") from error


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise UnsupportedModel(f"{folder} has no config.json; it is not a model folder")
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        # transformers would make an empty tokenizer for some model types.
        raise UnsupportedModel(f"{folder} has no tokenizer.json")
    check_files(folder)


def check_files(folder: Path) -> None:
    """Refuse large text files, and pipes, at which mlx-lm would block. Raises UnsupportedModel."""
    for file in folder.iterdir():
        if file.is_symlink() and not file.exists() and file.suffix in (*_TEXT_SUFFIXES, ".safetensors"):
            raise UnsupportedModel(f"{file} is a link to a file that is missing")
        if not file.exists() or file.is_dir():
            continue
        if not file.is_file():
            raise UnsupportedModel(f"{file} is not a file")
        if file.suffix in _TEXT_SUFFIXES and file.stat().st_size > _MAX_TEXT_BYTES:
            raise UnsupportedModel(f"{file} is larger than {_MAX_TEXT_BYTES} bytes")


def _or_unsupported(folder: Path, what: str, load: Callable[[], _T]) -> _T:
    try:
        return load()
    except UnsupportedModel:
        raise
    # A wrong config entry can raise anything; mlx-lm may even exit.
    except (Exception, SystemExit) as error:
        raise UnsupportedModel(f"the {what} in {folder} cannot be loaded: {error}") from error


def install_wanted_positions(inspection: Inspection, current: CurrentStep) -> None:
    if inspection.final_norm is not None:
        owner, name = inspection.final_norm
        setattr(owner, name, WantedPositions(owner[name], current))


def _context_length(config: dict[str, Any]) -> int:
    for name in _CONTEXT_FIELDS:
        for holder in (config, text_config(config)):
            if type(length := holder.get(name)) is int and length > 0:
                return length
    return _DEFAULT_CONTEXT
