"""Documents into pieces that fit a row: a text gets its beginning and end, what is too long is cut as the user says."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

WHOLE, TRUNCATED, SPLIT, DROPPED = range(4)

Cut = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class LengthPolicy:
    """The longest piece, and what becomes of a document that is longer."""

    longest: int
    texts: str
    chats: str
    end_of_text: int


def cut(
    ids: np.ndarray, mask: np.ndarray, counts: np.ndarray, owners: np.ndarray, texts: np.ndarray, before: np.ndarray,
    policy: LengthPolicy,
) -> Cut:  # fmt: skip
    """Ids, mask, length and document of each piece, and the outcome of each document.

    `counts` and `owners` are the tokens and the document of each strand; `texts` says which documents are texts.
    Nothing comes before a piece's first token, so that it is not trained on.
    """
    outcomes = np.full(len(texts), WHOLE, np.uint8)
    if not texts.any() and (counts <= policy.longest).all():
        return ids, _without_firsts(mask, counts), counts, owners, outcomes
    starts = np.concatenate([[0], np.cumsum(counts)])
    found: list[tuple[np.ndarray, np.ndarray, int]] = []
    for number, owner in enumerate(owners.tolist()):
        part, trained = (whole[starts[number] : starts[number + 1]] for whole in (ids, mask))
        if texts[owner]:
            part = np.concatenate([before, part, [policy.end_of_text]]).astype(np.uint32)
            trained = np.concatenate([np.zeros(len(before)), trained, [1]]).astype(np.uint8)
        if len(part) > policy.longest:
            part, trained, outcome = _fitted(
                part, trained, policy.texts if texts[owner] else policy.chats, policy.longest
            )
            outcomes[owner] = max(outcomes[owner], outcome)
        for place in range(0, len(part), policy.longest):
            stop = place + policy.longest
            found.append((part[place:stop], trained[place:stop], owner))
    # A single token left over has nothing to learn from and nothing to say.
    found = [one for one in found if outcomes[one[2]] != DROPPED and (len(one[0]) > 1 or not texts[one[2]])]
    lengths = np.array([len(part) for part, _, _ in found], np.int64)
    ids = np.concatenate([np.zeros(0, np.uint32), *(part for part, _, _ in found)])
    mask = np.concatenate([np.zeros(0, np.uint8), *(trained for _, trained, _ in found)])
    return ids, _without_firsts(mask, lengths), lengths, np.array([owner for _, _, owner in found], np.int64), outcomes


def _fitted(part: np.ndarray, trained: np.ndarray, policy: str, longest: int) -> tuple[np.ndarray, np.ndarray, int]:
    if policy == "split":
        return part, trained, SPLIT
    part, trained = part[:longest], trained[:longest]
    return part, trained, TRUNCATED if policy == "truncate" and trained[1:].any() else DROPPED


def _without_firsts(mask: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    mask = mask.copy()
    mask[(np.cumsum(lengths) - lengths)[lengths > 0]] = 0
    return mask
