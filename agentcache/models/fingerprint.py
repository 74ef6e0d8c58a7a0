"""Identity of models, from content (table in docs/memory.md).

The identity names a model in a new cache folder and roots every chain of blocks. Unknown fields of `config.json` count,
as they may decide bytes, and token rules, which give a text its ids.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any

import mlx.nn as nn
import mlx_lm
import xxhash

from agentcache.system.files import Memo, file_identity
from agentcache.text.model_folder import token_rules, tokenizer_files

_CHUNK_BYTES = 4 << 20
_CONFIGS = ("config.json", "hf_quant_config.json")
# mlx-lm does not read these (tested). A change renames models that have the field.
HARMLESS = frozenset(
    {
        "_name_or_path",
        "auto_map",
        "bos_token_id",
        "dtype",  # weights have their own
        "eos_token_id",
        "torch_dtype",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)
_PARTS = ("text_config", "vision_config", "audio_config")  # of config.json, with the same fields
_PACKAGE = "mlx_lm"
# Definitions that decide bytes: recurrent layers' cache classes (KV caches are ours), and reading the weights.
_COUNTED = {
    "mlx_lm.models.cache": {"_BaseCache", "ArraysCache"},
    "mlx_lm.utils": {
        "_compressed_tensors_quantization",
        "_decode_tagged_floats",
        "_transform_awq_weights",
        "_unpack_awq_weights",
        "infer_quant_config",
        "load_model",
    },
}
_READS_WEIGHTS = "mlx_lm.utils"
_LEFT_OUT = {
    "mlx_lm.models",  # its imported members are modules
    "mlx_lm",
    "mlx_lm.models.pipeline",  # unused here
}
_SCHEME = "source 1"  # of the digests and the memo's keys


@dataclass(frozen=True)
class ModelFingerprints:
    """Names of a model, 32 hex digits; `first` are used in cache folders of format version 2."""

    identity: str
    first: tuple[str, ...]


def model_fingerprints(folder: Path, memo: Path | None = None) -> ModelFingerprints:
    """Names of the model in a folder; `memo` keeps files' digests."""
    known = Memo(memo)
    identity, first = _both_names(folder, known)
    names = [first]
    for revision in _other_revisions(folder):
        with suppress(OSError, ValueError):
            of_revision, name = _both_names(revision, known)
            if of_revision == identity and name not in names:
                names.append(name)
    known.keep()
    return ModelFingerprints(identity, tuple(names))


def _both_names(folder: Path, known: Memo) -> tuple[str, str]:
    weights = _weight_digests(folder, known)
    identity = _digest(["identity 1", *_counting_configs(folder), token_rules(folder, known), *weights])
    return identity, _digest([*_configs(folder), tokenizer_files(folder, known), *weights])


def _other_revisions(folder: Path) -> list[Path]:
    if folder.parent.name != "snapshots":
        return []
    weights = [file.resolve() for file in _weight_files(folder)]
    others = (other for other in sorted(folder.parent.iterdir()) if other.name != folder.name)
    return [other for other in others if [file.resolve() for file in _weight_files(other)] == weights]


def first_fingerprint(folder: Path, memo: Path | None = None, *, tokenizer: bool = True) -> str:
    """Older name of a model, from all fields and the chat template; still a decoder's. Must never change."""
    known = Memo(memo)
    name = _digest(
        [*_configs(folder), tokenizer_files(folder, known) if tokenizer else "", *_weight_digests(folder, known)]
    )
    known.keep()
    return name


def _configs(folder: Path) -> list[str]:
    return [json.dumps(config, sort_keys=True) for _, config in _read_configs(folder)]


def _counting_configs(folder: Path) -> list[str]:
    configs = ((name, _without_harmless(config)) for name, config in _read_configs(folder))
    return [f"{name} {json.dumps(config, sort_keys=True)}" for name, config in configs]


def _read_configs(folder: Path) -> list[tuple[str, Any]]:
    return [(name, json.loads((folder / name).read_bytes())) for name in _CONFIGS if (folder / name).is_file()]


def _without_harmless(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    kept = {name: value for name, value in config.items() if name not in HARMLESS}
    return {name: _without_harmless(value) if name in _PARTS else value for name, value in kept.items()}


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("model*.safetensors"))


def _weight_digests(folder: Path, known: Memo) -> list[str]:
    files = _weight_files(folder)
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda file: known.get(file_identity(file), lambda: _digest_file(file)), files))


def _digest(parts: Sequence[str]) -> str:
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode()
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def _digest_file(file: Path) -> str:
    state = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            state.update(chunk)
    return state.hexdigest()


def source_digest(model: nn.Module, memo: Memo) -> str:
    """Digest of mlx-lm's code for `model`'s keys and values, part of the cache spec; empty for `FIRST_SOURCES`.

    Comments, docstrings, layout and error texts do not count.
    """
    names = {type(module).__module__ for module in (model, *model.modules())}
    sources = _with_imports({name for name in names if _is_theirs(name)} | {_READS_WEIGHTS}, memo)
    if all(FIRST_SOURCES.get(name) == digest for name, digest in sources.items()):
        return ""
    return _short_digest(f"{sorted(sources.items())}")


def _with_imports(names: set[str], memo: Memo) -> dict[str, str]:
    found: dict[str, str] = {}
    while names:
        name = names.pop()
        digest, *imports = _read(name, memo)
        found[name] = digest
        names.update(set(imports) - found.keys())
    return found


def _is_theirs(name: str) -> bool:
    return name.startswith(f"{_PACKAGE}.") and name not in _LEFT_OUT


def _read(name: str, memo: Memo) -> list[str]:
    file = _file_of(name)
    if file is None:  # installed without sources
        return [_short_digest(f"{name} {mlx_lm.__version__}")]
    return memo.get(f"{_SCHEME}|{name}|{file_identity(file)}", lambda: " ".join(_examine(name, file))).split()


def _file_of(name: str) -> Path | None:
    spec = getattr(sys.modules.get(name), "__spec__", None) or find_spec(name)
    file = None if spec is None or spec.origin is None else Path(spec.origin)
    return file if file is not None and file.suffix == ".py" and file.is_file() else None


def _examine(name: str, file: Path) -> list[str]:
    tree, parts = ast.parse(file.read_bytes()), _COUNTED.get(name)
    if parts is not None:
        tree.body = [node for node in tree.body if getattr(node, "name", None) in parts]
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    imports = () if parts is not None else sorted(set(_imports(tree, package)))
    return [_short_digest("".join(_spell(tree, []))), *imports]


def _imports(tree: ast.AST, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module or ""
            within = [f"{base}.{alias.name}" for alias in node.names]
            yield from (name for name in (base, *within) if _is_theirs(name) and _is_module(name))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _is_theirs(alias.name))


def _is_module(name: str) -> bool:
    try:
        return name in sys.modules or find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is no package
        return False


def _spell(node: object, text: list[str]) -> list[str]:
    if isinstance(node, ast.Raise):
        text.append("Raise;")
    elif isinstance(node, ast.AST):
        text.append(f"{type(node).__name__}(")
        for field, value in ast.iter_fields(node):
            # Python's versions differ in empty fields. None may be a constant.
            is_empty = value is None or value == []
            if field not in ("ctx", "kind", "type_comment") and (not is_empty or isinstance(node, ast.Constant)):
                text.append(f"{field}=")
                _spell(value, text)
        text.append(")")
    elif isinstance(node, list):
        for each in node:
            if not _is_docstring(each):
                _spell(each, text)
        text.append(";")
    else:
        text.append(f"{node!r};")
    return text


def _is_docstring(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _short_digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


FIRST_SOURCES: dict[str, str] = {
    "mlx_lm.kernels": "c587d9ea59608ded",
    "mlx_lm.kernels._common": "469e4a015c34a0e2",
    "mlx_lm.kernels.expert_routing": "cf8ee16f2067e598",
    "mlx_lm.kernels.norm_add_norm": "6a102c96dc403e25",
    "mlx_lm.kernels.post_expert_norm_combine": "74fdb2dbb547c9f0",
    "mlx_lm.kernels.qk_norm": "db6406e344d1ed2a",
    "mlx_lm.kernels.qk_norm_rope": "28258283b82155eb",
    "mlx_lm.kernels.rms_norm_sigmoid_gate": "f54c2b3084e61313",
    "mlx_lm.models.Klear": "83c3d522f31994a2",
    "mlx_lm.models.activations": "68ab311f219b613c",
    "mlx_lm.models.afm7": "22f0b9ef6ea2ebd2",
    "mlx_lm.models.afmoe": "c747095badc91224",
    "mlx_lm.models.apertus": "2fec588201a750a9",
    "mlx_lm.models.baichuan_m1": "a2cdaa4de4b8f415",
    "mlx_lm.models.bailing_hybrid": "9ea74c0a8dfd78aa",
    "mlx_lm.models.bailing_moe": "7ec6614d33798f5e",
    "mlx_lm.models.bailing_moe_linear": "99a372efbab492ec",
    "mlx_lm.models.bailing_moe_v3": "834b511e5ad76bdd",
    "mlx_lm.models.base": "6ec995d1442df605",
    "mlx_lm.models.bitlinear_layers": "62ec5c3444feec27",
    "mlx_lm.models.bitnet": "62c806e7679402db",
    "mlx_lm.models.cache": "b19a0bb4488f7e28",
    "mlx_lm.models.cohere": "b29d119d021b3930",
    "mlx_lm.models.cohere2": "0132813a1573a729",
    "mlx_lm.models.dbrx": "c990dc72143c9cfd",
    "mlx_lm.models.deepseek": "14b17991869a4d0b",
    "mlx_lm.models.deepseek_v2": "802af6fbfda80860",
    "mlx_lm.models.deepseek_v3": "4d544f9b3bb7dcd1",
    "mlx_lm.models.deepseek_v32": "64e136d69fe3ae50",
    "mlx_lm.models.deepseek_v41": "9ad98708a99a0a35",
    "mlx_lm.models.dots1": "2df34483f22266f1",
    "mlx_lm.models.ernie4_5": "bcb2f0b08f183d5b",
    "mlx_lm.models.ernie4_5_moe": "7e6c523d44a58c40",
    "mlx_lm.models.exaone": "5a35e6649aa174ce",
    "mlx_lm.models.exaone4": "710fa5b9a2d785f4",
    "mlx_lm.models.exaone_moe": "afd2d09bfaa571aa",
    "mlx_lm.models.falcon_h1": "e03a13fe574ee46c",
    "mlx_lm.models.gated_delta": "9dd633cdfc5ec3d8",
    "mlx_lm.models.gear": "1a413489ac39cd0c",
    "mlx_lm.models.gemma": "bbef66bbd39f97cf",
    "mlx_lm.models.gemma2": "52dcde158fc7d721",
    "mlx_lm.models.gemma3": "24dbb6c1ac9d3ed7",
    "mlx_lm.models.gemma3_text": "0f139ec9ea1cc290",
    "mlx_lm.models.gemma3n": "00c165fad5cb2bc2",
    "mlx_lm.models.gemma4": "302dba76dc761a87",
    "mlx_lm.models.gemma4_text": "343c3948f19d1f29",
    "mlx_lm.models.glm": "7e4f9c7fa918fc4f",
    "mlx_lm.models.glm4": "c1906c65e31334ae",
    "mlx_lm.models.glm4_moe": "67eb1a49f747ea7a",
    "mlx_lm.models.glm4_moe_lite": "8d24a757158a9289",
    "mlx_lm.models.glm_moe_dsa": "e818f51b57833025",
    "mlx_lm.models.gpt2": "17db85c1bfe0d488",
    "mlx_lm.models.gpt_bigcode": "6d5273e3624fcf56",
    "mlx_lm.models.gpt_neox": "0a4175a2f8792ec5",
    "mlx_lm.models.gpt_oss": "89c040b56f65ab06",
    "mlx_lm.models.gptj": "0e9b4324738208ff",
    "mlx_lm.models.granite": "b354b7ea81d3554b",
    "mlx_lm.models.granitemoe": "8ea78fd4dd208d44",
    "mlx_lm.models.granitemoehybrid": "14bb8af981cf64c2",
    "mlx_lm.models.helium": "7b25a88802fd8130",
    "mlx_lm.models.hunyuan": "ba815a3a0837126f",
    "mlx_lm.models.hunyuan_v1_dense": "4627d9cda3590b5c",
    "mlx_lm.models.internlm2": "1f4e71f00aecc200",
    "mlx_lm.models.internlm3": "6471dfd61776e35d",
    "mlx_lm.models.iquestloopcoder": "65d01803f06c0ae3",
    "mlx_lm.models.jamba": "e4dbc9a72d82a2d9",
    "mlx_lm.models.kimi_k25": "342f890a660f03a4",
    "mlx_lm.models.kimi_k3": "eead52d5ead44ba1",
    "mlx_lm.models.kimi_linear": "266e0d5eb98b23d5",
    "mlx_lm.models.kimi_vl": "25b326c8db7f3ab9",
    "mlx_lm.models.laguna": "f715247b2e65ec44",
    "mlx_lm.models.lfm2": "78245e63651ea6f6",
    "mlx_lm.models.lfm2-vl": "8a9047f63b588354",
    "mlx_lm.models.lfm2_moe": "1bb8206cf6eb630f",
    "mlx_lm.models.lille-130m": "125059e2f9789d0f",
    "mlx_lm.models.llama": "341bc3091bc712e6",
    "mlx_lm.models.llama4": "b0038d92d5273968",
    "mlx_lm.models.llama4_text": "51a0dfb37d14cfd3",
    "mlx_lm.models.longcat_flash": "39f48f9413e3fe23",
    "mlx_lm.models.longcat_flash_ngram": "018df088ea154011",
    "mlx_lm.models.mamba": "e37f8de14a9fb8d6",
    "mlx_lm.models.mamba2": "861cd35185978efd",
    "mlx_lm.models.mellum": "e413c630003c80a7",
    "mlx_lm.models.mimo": "88064900bda5370c",
    "mlx_lm.models.mimo_v2_flash": "b3ee4727d1a68d04",
    "mlx_lm.models.minicpm": "36e3882e5c76b3a8",
    "mlx_lm.models.minicpm3": "55292a42a8a84f09",
    "mlx_lm.models.minimax": "f8503e2a87c837e8",
    "mlx_lm.models.minimax_m3_vl": "2bcb452c787bfe1c",
    "mlx_lm.models.ministral3": "23aef1c6a656ca2f",
    "mlx_lm.models.mistral3": "07cdfdc3f29b6bd6",
    "mlx_lm.models.mistral4": "4bbb8b90f5b8e3c0",
    "mlx_lm.models.mixtral": "4e894d9077e885cd",
    "mlx_lm.models.mla": "af9c100f69ab8b62",
    "mlx_lm.models.muse_glimmer": "62b9cb9eeb0d3a3d",
    "mlx_lm.models.muse_spark": "f8c592399c2a3171",
    "mlx_lm.models.nanbeige": "9ecad569be3bc216",
    "mlx_lm.models.nanochat": "793f482894e0bb2e",
    "mlx_lm.models.nemotron": "e980567584894765",
    "mlx_lm.models.nemotron-nas": "976f05767a52f042",
    "mlx_lm.models.nemotron_h": "44bc90db0d8bb323",
    "mlx_lm.models.olmo": "25c4d9984eaa1a9c",
    "mlx_lm.models.olmo2": "ac261e7d3489c27e",
    "mlx_lm.models.olmo3": "14050b1c15b5edd6",
    "mlx_lm.models.olmo_hybrid": "cfd1b567fab4fbac",
    "mlx_lm.models.olmoe": "1ecad85cb14752ec",
    "mlx_lm.models.openelm": "cd65606e5a658fda",
    "mlx_lm.models.phi": "ea63fdd2c13e25e6",
    "mlx_lm.models.phi3": "48012efa1a46101a",
    "mlx_lm.models.phi3small": "89d7bb777e45c270",
    "mlx_lm.models.phimoe": "4262998582990040",
    "mlx_lm.models.phixtral": "dc925cee8753fb26",
    "mlx_lm.models.pixtral": "fcaaa9f80bc24b43",
    "mlx_lm.models.plamo": "8227d7af8189c7c9",
    "mlx_lm.models.plamo2": "d82983a0ced10bae",
    "mlx_lm.models.plamo3": "b1aed4f860573a93",
    "mlx_lm.models.prism_hadamard_qwen35": "28c6a3b679e99329",
    "mlx_lm.models.qwen": "d5e932e35149360c",
    "mlx_lm.models.qwen2": "2d376cc73f22c9f2",
    "mlx_lm.models.qwen2_moe": "d0648bdfaf285613",
    "mlx_lm.models.qwen2_vl": "f77a32ce709b3402",
    "mlx_lm.models.qwen3": "fe09d41a34ce52a8",
    "mlx_lm.models.qwen3_5": "8b1f1b5c2cf4e4a3",
    "mlx_lm.models.qwen3_5_moe": "b7d4b421bb404925",
    "mlx_lm.models.qwen3_moe": "0762e53ea6794dcc",
    "mlx_lm.models.qwen3_next": "1f0fa0ab02bb2f38",
    "mlx_lm.models.qwen3_vl": "d6c197fba5ed5f6f",
    "mlx_lm.models.qwen3_vl_moe": "b6471e67ad596111",
    "mlx_lm.models.recurrent_gemma": "84de8df8326e9a5b",
    "mlx_lm.models.rope_utils": "1baa48e46e17e153",
    "mlx_lm.models.rwkv7": "3edc74cd5a12abe0",
    "mlx_lm.models.seed_oss": "1ccb7e85a2c3f47f",
    "mlx_lm.models.smollm3": "6d6683c0b4f73dba",
    "mlx_lm.models.solar_open": "3166bf905f93160c",
    "mlx_lm.models.spark2_5": "87ac423776fc9d3e",
    "mlx_lm.models.ssm": "7eb74b11e2e333b9",
    "mlx_lm.models.stablelm": "025c78c69b8d0c86",
    "mlx_lm.models.starcoder2": "c93325b92e707a48",
    "mlx_lm.models.step3p5": "a836a03ae2ba8662",
    "mlx_lm.models.switch_layers": "74d12299e22907fd",
    "mlx_lm.models.talkie": "ba0a089c13146fdf",
    "mlx_lm.models.telechat3": "2e5b406cd3336d1c",
    "mlx_lm.models.youtu_llm": "513c48d97d3e9c0d",
    "mlx_lm.utils": "73540b8d5b1f940b",
}
