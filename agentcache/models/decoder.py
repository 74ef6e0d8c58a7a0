"""Decoders: full fine-tunes of base that continue from its cache after the prompt (PrefillShare, arXiv 2602.12029)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from safetensors import SafetensorError, safe_open

from agentcache.compat import load_model
from agentcache.errors import UnreadableAdapter, UnsupportedAdapter, UnsupportedModel
from agentcache.models.adapter_files import ModuleName
from agentcache.models.attachment import host_in_pieces
from agentcache.models.fingerprint import first_fingerprint
from agentcache.models.loader import LoadedModel, check_files, install_wanted_positions
from agentcache.system.files import file_identity

_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")


@dataclass(frozen=True)
class Decoder:
    """Identity of a decoder, used like an adapter of every layer; `digest` is of config and weights, 32 hex digits."""

    digest: str
    path: Path
    nbytes: int
    files: tuple[str, ...]
    format: str = "model"
    ranks: Mapping[ModuleName, int] = field(default_factory=dict)
    first_layer: int = 0
    invocation_tokens: tuple[int, ...] | None = None
    activation_shift: int = 0
    family: str = ""


@dataclass(frozen=True, eq=False)
class DecoderWeights:
    """A decoder on the device."""

    decoder: Decoder
    model: nn.Module

    @property
    def nbytes(self) -> int:
        return self.decoder.nbytes


def is_decoder_folder(folder: Path) -> bool:
    return (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file()


def read_decoder(folder: Path, base: Path, memo: Path | None = None) -> Decoder:
    """Inspect a decoder's files, on any thread. Raises UnsupportedAdapter: not a fine-tune of the model in `base`."""
    try:
        check_files(folder)
        files = _identities(folder)
        _check_weights(folder, base)
        _check_vocabulary(folder, base)
        # Not `identity`: existing files are named by this.
        digest = first_fingerprint(folder, memo, tokenizer=False)
        nbytes = sum(file.stat().st_size for file in _weight_files(folder))
    except (OSError, ValueError, SafetensorError, UnsupportedModel) as error:
        raise UnreadableAdapter(f"the model in {folder} cannot be read: {error!s:.200}") from None
    return Decoder(digest, folder, nbytes, files)


def read_decoder_again(decoder: Decoder, base: Path, memo: Path | None = None) -> Decoder:
    """Read a dropped decoder again. Raises UnsupportedAdapter if its folder has changed."""
    again = read_decoder(decoder.path, base, memo)
    if again.digest != decoder.digest:
        raise UnsupportedAdapter(f"the model in {decoder.path} has changed since it was loaded; load it anew")
    return again


def _weight_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("model*.safetensors"))
    if not files or not all(file.is_file() for file in files):  # opening a pipe would block
        raise ValueError("it has no model*.safetensors")
    return files


def _identities(folder: Path) -> tuple[str, ...]:
    return tuple(file_identity(file) for file in (folder / "config.json", *_weight_files(folder)))


def _check_weights(folder: Path, base: Path) -> None:
    theirs, ours = _shapes(folder), _shapes(base)
    different = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
    if different:
        first = different[0]
        raise UnsupportedAdapter(
            f"the model in {folder} is not a fine-tune of the base model: {first} has shape {theirs.get(first)}, "
            f"base's has {ours.get(first)}"
        )


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for path in _weight_files(folder):
        with safe_open(path, framework="numpy") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


def _check_vocabulary(folder: Path, base: Path) -> None:
    for name in _VOCABULARY_FILES:
        theirs, ours = folder / name, base / name
        if ours.is_file() and not (theirs.is_file() and theirs.read_bytes() == ours.read_bytes()):
            raise UnsupportedAdapter(f"the model in {folder} has another vocabulary than base: {name} differs")


def load_decoder(decoder: Decoder, base: LoadedModel) -> Iterator[DecoderWeights | None]:
    """Put a decoder on the device, on the thread that loaded `base`; steps may run between pieces.

    Yields None after each piece, then the decoder. Raises UnsupportedAdapter.
    """
    try:
        model, config = load_model(decoder.path, lazy=True)
        for part in (*model.layers, model):
            mx.eval(part.parameters())
            yield None
        pieces = host_in_pieces(
            model, config["model_type"], config, choose=lambda model, inspection: base.inspection.precision
        )
        for hosted in pieces:  # noqa: B007
            yield None
        assert hosted is not None
        install_wanted_positions(hosted.inspection, base.current)
        changed = _identities(decoder.path) != decoder.files
    except Exception as error:  # wrong config entries raise anything
        raise UnsupportedAdapter(f"the model in {decoder.path} cannot be loaded: {error!s:.200}") from None
    if changed:
        raise UnsupportedAdapter(f"the model in {decoder.path} is being changed; load it anew")
    if replace(hosted.spec, sources=base.spec.sources) != base.spec:
        raise UnsupportedAdapter(f"the model in {decoder.path} has other caches than base")
    yield DecoderWeights(decoder, model)
