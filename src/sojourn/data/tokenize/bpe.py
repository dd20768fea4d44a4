"""Learns a byte-level vocabulary from text, and measures how well a vocabulary of each size would compress it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# The split that Qwen2 uses: digits one by one, Chinese runs as words; llama.cpp knows it as `qwen2`. With digits in
# threes it is Llama 3's, which llama.cpp knows as `llama-bpe`.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDLESS = re.compile(r"\S{1000}")


def train_bpe(
    texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str], split_digits: bool = True
) -> Tokenizer:
    """Byte-level BPE: any text survives it, up to Unicode's composed form. Little text gives a smaller vocabulary."""
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

    split = _SPLIT.replace("DIGITS", r"\p{N}" if split_digits else r"\p{N}{1,3}")
    # llama.cpp takes a whole word that is a token as that token under `llama-bpe`, whatever the merges say.
    tokenizer = Tokenizer(models.BPE(ignore_merges=not split_digits))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((part for text in texts for part in _breathing(text)), trainer)
    return tokenizer


def _breathing(text: str) -> list[str]:
    """The text, cut where it goes on for very long without a space: learning takes time by the square of a word."""
    cuts = [found.end() for found in _ENDLESS.finditer(text)]
    return [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]


def compression(tokenizer: Tokenizer, samples: Mapping[str, Sequence[str]]) -> list[dict[str, float]]:
    """UTF-8 bytes per token, a row for each vocabulary size: a quarter, a half and the whole of the tokenizer's.

    A size too small for the tokenizer's characters has no row, nor has one below the whole for a tokenizer that is
    not BPE.
    """
    whole: dict[str, Any] = {**json.loads(tokenizer.to_str()), "truncation": None, "padding": None}
    return [{"vocab_size": size, **_bytes_per_token(cut, samples)} for size, cut in _nested(whole)]


def _nested(whole: dict[str, Any]) -> Iterator[tuple[int, Tokenizer]]:
    from tokenizers import Tokenizer

    full = Tokenizer.from_str(json.dumps(whole))
    size = full.get_vocab_size()
    if whole["model"]["type"] == "BPE":
        for smaller in (size // 4, size // 2):
            cut = _first_merges(whole["model"], smaller - (size - len(whole["model"]["vocab"])))
            if cut is not None:
                yield smaller, Tokenizer.from_str(json.dumps({**whole, "model": cut}))
    yield size, full


def _first_merges(model: dict[str, Any], size: int) -> dict[str, Any] | None:
    """The BPE that training would have stopped at: merges are in the order in which their tokens were learned."""
    learned = dict.fromkeys(left + right for left, right in model["merges"])
    base = [token for token in model["vocab"] if token not in learned]
    if len(base) >= size:
        return None
    kept = {*base, *islice(learned, size - len(base))}
    vocab = {token: number for token, number in model["vocab"].items() if token in kept}
    merges = [(left, right) for left, right in model["merges"] if {left, right, left + right} <= kept]
    return {**model, "vocab": vocab, "merges": merges}


def _bytes_per_token(tokenizer: Tokenizer, samples: Mapping[str, Sequence[str]]) -> dict[str, float]:
    sizes = {name: sum(len(text.encode()) for text in texts) for name, texts in samples.items()}
    tokens = {
        name: sum(len(encoding) for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False))
        for name, texts in samples.items()
    }
    ratios = {name: sizes[name] / max(tokens[name], 1) for name in samples}
    return {**ratios, "all": sum(sizes.values()) / max(sum(tokens.values()), 1)}
