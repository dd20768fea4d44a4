"""Trains a byte-level BPE tokenizer and keeps it in the form that plain transformers opens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sojourn.data.chat import CHATML, END_OF_TEXT, SPECIAL_TOKENS, TURN_END, render
from sojourn.data.document import Document
from sojourn.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# The split that Qwen2 uses: digits one by one, Chinese runs as words; llama.cpp knows it as `qwen2`.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SAMPLE_CHARACTERS = 30_000_000


def train_tokenizer(documents: Iterable[Document], vocab_size: int) -> Tokenizer:
    """Learns merges from the start of the data (enough of it; more changes nothing)."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_plain(documents), trainer)
    return tokenizer


def _plain(documents: Iterable[Document]) -> Iterator[str]:
    left = _SAMPLE_CHARACTERS
    for document in documents:
        text = render(document.messages)[0] if document.is_chat else document.text
        yield text
        left -= len(text)
        if left <= 0:
            return


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int, chat: bool) -> None:
    """`tokenizer.json` and its settings; a chat model stops at the end of a turn, a text model at the end of a text."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "eos_token": TURN_END if chat else END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": list(SPECIAL_TOKENS),
        "clean_up_tokenization_spaces": False,
        **({"chat_template": CHATML} if chat else {}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def token_id(tokenizer: Tokenizer, token: str) -> int:
    number = tokenizer.token_to_id(token)
    if number is None:
        raise UserError(f"data.tokenizer: it has no {token}, which the ChatML template needs")
    return number


def load_tokenizer(folder: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json" if folder.is_dir() else folder
    if not path.is_file():
        raise UserError(
            f"data.tokenizer: {folder}: no tokenizer.json there; allowed: auto, or the folder of a tokenizer"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exceptions
        raise UserError(f"data.tokenizer: {path}: not a tokenizer: {error}") from None
    for token in SPECIAL_TOKENS:
        token_id(tokenizer, token)
    return tokenizer
