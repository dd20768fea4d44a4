"""Packs documents into rows of a fixed length: best fit, whole documents, nothing ever crosses a row."""

from __future__ import annotations

import numpy as np

from sojourn.data.order import splitmix64


def pack_best_fit(lengths: np.ndarray, row_length: int, seed: int = 0) -> list[list[int]]:
    """Rows as lists of document numbers. No document may be longer than a row.

    Long documents go first, then the short ones in a mixed order, each into the fullest row that still has room. Open
    rows are kept by the room left in them, and `rooms` has a bit for each room that some row has, so that the best fit
    is the lowest bit at or above the document's length.
    """
    shuffled = np.argsort(splitmix64(np.arange(len(lengths), dtype=np.uint64), seed), kind="stable")
    long_first = np.where(lengths[shuffled] > row_length // 4, lengths[shuffled], 0)
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}
    rooms = 0
    for document in shuffled[np.argsort(-long_first, kind="stable")].tolist():
        length = int(lengths[document])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = open_rows[room].pop()
            if not open_rows[room]:
                rooms &= ~(1 << room)
        else:
            room, row = row_length, len(rows)
            rows.append([])
        rows[row].append(document)
        left = room - length
        if left > 0:
            open_rows.setdefault(left, []).append(row)
            rooms |= 1 << left
    return rows
