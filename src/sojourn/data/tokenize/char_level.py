"""A character tokenizer: every character of the text is a token, as in nanoGPT's shakespeare_char."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

UNKNOWN_CHARACTER = "<|unk|>"


def train_char(texts: Iterable[str], most_characters: int, special_tokens: Sequence[str]) -> Tokenizer:
    """The special tokens, then the most frequent characters in the order of their code points; any other is <|unk|>."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    frequent = sorted(counts, key=lambda character: (-counts[character], character))[:most_characters]
    tokens = list(dict.fromkeys((*special_tokens, UNKNOWN_CHARACTER, *sorted(frequent))))
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=UNKNOWN_CHARACTER))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (*special_tokens, UNKNOWN_CHARACTER)]
    )
    return tokenizer
