"""Tiny real tokenizers, trained on the spot and saved as model folders would hold them.

byte_bpe      byte-level BPE, no BOS, ChatML (as Qwen)
byte_bpe_bos  byte-level BPE whose post-processor adds a BOS and whose template writes it (as Llama 3)
metaspace     SentencePiece-like BPE with byte fallback and BOS, a plain template (as Llama 2, Mistral, Gemma)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The cat sat on the mat. The dog did not sit on the mat; it ran to the door and back.",
    "You are a helpful assistant. Answer the question of the user as well as you can.",
    "What is the capital of France? The capital of France is Paris. And of Italy? Rome, of course.",
    "def add(first, second):\n    return first + second\n",
    "class Counter:\n    def __init__(self):\n        self.count = 0\n\n\n",
    "for index in range(10):\n    if index % 2 == 0:\n        print(index)\n    else:\n\t\tcontinue\n",
    'import json\nprint(json.dumps({"name": "value", "list": [1, 2, 3]}))\n',
    "Hello, world! Hello there. How are you today? I am fine, thank you. And you?",
    "Write a story about a robot who learns to paint. The robot had never seen a colour before.",
    "user: tell me more\nassistant: here is more\nsystem: be brief\ntool: result\n",
    "It's what they're saying: don't, can't, won't; we've seen 1 2 3 10 100 1000 times.",
    "Grüße aus Köln, café crème, naïve façade — “quoted” text… and 東京 日本 emoji 🙂🙂.",
]

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
HEADERS = (
    "{{ bos_token }}{% for message in messages %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n{{ message['content'] | trim }}<|eot_id|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
PLAIN = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] }}{{ eos_token }}"
    "{% elif message['role'] in ('user', 'system', 'tool') %}### {{ message['role'] }}: {{ message['content'] }}\n"
    "{% else %}{{ raise_exception('Unknown role ' + message['role']) }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}### assistant: {% endif %}"
)
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

SpaceStyle = Literal["first", "always", "never", "normalizer", "gemma"]


def byte_bpe(folder: Path, vocab_size: int = 500, chat_template: str | None = CHATML) -> Path:
    """ChatML-like: no BOS; `<think>` and `</think>` are added tokens that are not special."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = _byte_level(vocab_size, specials)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return _save(tokenizer, folder, chat_template, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def with_markers(
    folder: Path, chat_template: str, special: Sequence[str], plain: Sequence[str] = (), eos: str = "<|im_end|>"
) -> Path:
    """Byte-level BPE without BOS in which these are added tokens: special ones, which text hides, and plain ones."""
    tokenizer = _byte_level(500, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken(marker, normalized=False, special=True) for marker in special])
    tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in plain])
    return _save(tokenizer, folder, chat_template, eos_token=eos, pad_token="<|endoftext|>")


def byte_bpe_bos(folder: Path, vocab_size: int = 500, chat_template: str | None = HEADERS) -> Path:
    """Llama-3-like: `<|begin_of_text|>` is added in front of raw text, and written by the template."""
    specials = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer = _byte_level(vocab_size, specials)
    tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=True), _adds_bos(tokenizer, "<|begin_of_text|>")]
    )
    return _save(tokenizer, folder, chat_template, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")


def metaspace(
    folder: Path, vocab_size: int = 600, chat_template: str | None = PLAIN, style: SpaceStyle = "first"
) -> Path:
    """SentencePiece-like. `style` says where a space is put in front of text that has none.

    "first": at the start of the text; "always": after special tokens too; "never": nowhere; "normalizer": as Llama 2's
    Prepend and Replace; "gemma": Replace only.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    _set_space_style(tokenizer, style)
    specials = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=specials + byte_tokens, show_progress=False)
    tokenizer.train_from_iterator(_latin_words() if style in ("normalizer", "gemma") else _latin_lines(), trainer)
    tokenizer = _without_added(tokenizer, set(byte_tokens))
    tokenizer.post_processor = _adds_bos(tokenizer, "<s>")
    return _save(tokenizer, folder, chat_template, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


# Every kind, by the name under which tests ask for it.
STYLES: dict[str, Callable[[Path], Path]] = {
    "byte_bpe": byte_bpe,
    "byte_bpe_bos": byte_bpe_bos,
    "metaspace": metaspace,
    "metaspace_always": partial(metaspace, style="always"),
    "metaspace_never": partial(metaspace, style="never"),
    "normalizer": partial(metaspace, style="normalizer"),
    "gemma": partial(metaspace, style="gemma"),
}
STYLES_WITHOUT_TEMPLATE: dict[str, Callable[[Path], Path]] = {
    "byte_bpe_no_template": partial(byte_bpe, chat_template=None),
    "metaspace_no_template": partial(metaspace, chat_template=None),
    "normalizer_no_template": partial(metaspace, chat_template=None, style="normalizer"),
}


def _latin_lines() -> list[str]:
    """The corpus without what the byte fallback is for."""
    return [line for line in CORPUS if line.isascii()]


def _latin_words() -> list[str]:
    """The corpus cut into words, so that a tokenizer without a pre-tokenizer does not learn whole sentences."""
    return re.findall(r" ?[^ \n]+|\s", "\n".join(_latin_lines()))


def _byte_level(vocab_size: int, specials: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_QWEN_SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _set_space_style(tokenizer: Tokenizer, style: SpaceStyle) -> None:
    replace, fallback, fuse = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
    if style == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif style == "gemma":
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=style, split=True)
    strip = [] if style in ("never", "gemma") else [decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence([replace, fallback, fuse, *strip])


def _adds_bos(tokenizer: Tokenizer, bos: str) -> processors.TemplateProcessing:
    bos_id = tokenizer.token_to_id(bos)
    return processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)])


def _without_added(tokenizer: Tokenizer, contents: set[str]) -> Tokenizer:
    """The tokenizer with `contents` as ordinary vocabulary only."""
    saved = json.loads(tokenizer.to_str())
    saved["added_tokens"] = [token for token in saved["added_tokens"] if token["content"] not in contents]
    return Tokenizer.from_str(json.dumps(saved))


def _save(tokenizer: Tokenizer, folder: Path, chat_template: str | None, **special_tokens: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 131072, **special_tokens}
    config["clean_up_tokenization_spaces"] = False
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    return folder
