"""Trains a byte-level BPE tokenizer, and measures how well vocabularies of several sizes compress text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Qwen2's pre-tokenization pattern: single digits, runs of Chinese as words; llama.cpp calls it `qwen2`. With digits in
# threes it is Llama 3's, which llama.cpp calls `llama-bpe`.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ONE_DIGIT, THREE_DIGITS = r"\p{N}", r"\p{N}{1,3}"
_LONG_WORD = re.compile(r"\S{1000}")


def train_bpe(
    texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str], split_digits: bool = True
) -> Tokenizer:
    """Byte-level BPE: lossless up to Unicode NFC. With little text the vocabulary is smaller than `vocab_size`."""
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

    pattern = PATTERN.replace("DIGITS", ONE_DIGIT if split_digits else THREE_DIGITS)
    # Under `llama-bpe`, llama.cpp encodes a whole word that is a token as that token, whatever the merges say.
    tokenizer = Tokenizer(models.BPE(ignore_merges=not split_digits))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
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
    tokenizer.train_from_iterator((part for text in texts for part in _split_long_words(text)), trainer)
    return tokenizer


def _split_long_words(text: str) -> list[str]:
    """The text, split after 1,000 characters without a space: training time is quadratic in the length of a word."""
    ends = [match.end() for match in _LONG_WORD.finditer(text)]
    return [text[start:end] for start, end in pairwise([0, *ends, len(text)])]


def compression(tokenizer: Tokenizer, samples: Mapping[str, Sequence[str]]) -> list[dict[str, float]]:
    """UTF-8 bytes per token at a quarter, half and all of the vocabulary, one row each.

    A size too small for the tokenizer's characters has no row; a tokenizer that is not BPE has only the last.
    """
    whole: dict[str, Any] = {**json.loads(tokenizer.to_str()), "truncation": None, "padding": None}
    return [
        {"vocab_size": size, **_bytes_per_token(smaller, samples)}
        for size, smaller in _with_smaller_vocabularies(whole)
    ]


def _with_smaller_vocabularies(whole: dict[str, Any]) -> Iterator[tuple[int, Tokenizer]]:
    from tokenizers import Tokenizer

    full = Tokenizer.from_str(json.dumps(whole))
    size = full.get_vocab_size()
    if whole["model"]["type"] == "BPE":
        for smaller in (size // 4, size // 2):
            model = _first_merges(whole["model"], smaller - (size - len(whole["model"]["vocab"])))
            if model is not None:
                yield smaller, Tokenizer.from_str(json.dumps({**whole, "model": model}))
    yield size, full


def _first_merges(model: dict[str, Any], size: int) -> dict[str, Any] | None:
    """The BPE model at an earlier point of its training: merges are in the order in which they were learned."""
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
