"""Documents to pieces that fit a row: texts get start and end tokens; too long ones are split, truncated or dropped."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

WHOLE, TRUNCATED, SPLIT, DROPPED = range(4)  # the outcome of a document

Pieces = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class LengthPolicy:
    """`texts` and `chats` say what happens to a document longer than `max_length`: split, truncate or drop."""

    max_length: int
    texts: str
    chats: str
    end_of_text: int


def truncate(
    ids: np.ndarray, mask: np.ndarray, counts: np.ndarray, owners: np.ndarray, texts: np.ndarray, bos: np.ndarray,
    policy: LengthPolicy,
) -> Pieces:  # fmt: skip
    """Ids, loss mask, length and document of each piece, and the outcome of each document.

    `counts` and `owners` are the number of tokens and the document of each encoded text; `texts` is true for documents
    that are plain texts. The first token of a piece is never a target, since nothing precedes it.
    """
    outcomes = np.full(len(texts), WHOLE, np.uint8)
    if not texts.any() and (counts <= policy.max_length).all():
        return ids, _mask_first_tokens(mask, counts), counts, owners, outcomes
    starts = np.concatenate([[0], np.cumsum(counts)])
    pieces: list[tuple[np.ndarray, np.ndarray, int]] = []
    for index, owner in enumerate(owners.tolist()):
        tokens, trained = (whole[starts[index] : starts[index + 1]] for whole in (ids, mask))
        if texts[owner]:
            tokens = np.concatenate([bos, tokens, [policy.end_of_text]]).astype(np.uint32)
            trained = np.concatenate([np.zeros(len(bos)), trained, [1]]).astype(np.uint8)
        if len(tokens) > policy.max_length:
            choice = policy.texts if texts[owner] else policy.chats
            tokens, trained, outcome = _shorten(tokens, trained, choice, policy.max_length)
            outcomes[owner] = max(outcomes[owner], outcome)
        for start in range(0, len(tokens), policy.max_length):
            stop = start + policy.max_length
            pieces.append((tokens[start:stop], trained[start:stop], owner))
    # A piece of one token has no target.
    pieces = [one for one in pieces if outcomes[one[2]] != DROPPED and (len(one[0]) > 1 or not texts[one[2]])]
    lengths = np.array([len(tokens) for tokens, _, _ in pieces], np.int64)
    ids = np.concatenate([np.zeros(0, np.uint32), *(tokens for tokens, _, _ in pieces)])
    mask = np.concatenate([np.zeros(0, np.uint8), *(trained for _, trained, _ in pieces)])
    documents = np.array([owner for _, _, owner in pieces], np.int64)
    return ids, _mask_first_tokens(mask, lengths), lengths, documents, outcomes


def _shorten(
    tokens: np.ndarray, trained: np.ndarray, choice: str, max_length: int
) -> tuple[np.ndarray, np.ndarray, int]:
    if choice == "split":
        return tokens, trained, SPLIT
    tokens, trained = tokens[:max_length], trained[:max_length]
    return tokens, trained, TRUNCATED if choice == "truncate" and trained[1:].any() else DROPPED


def _mask_first_tokens(mask: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    mask = mask.copy()
    mask[(np.cumsum(lengths) - lengths)[lengths > 0]] = 0
    return mask
