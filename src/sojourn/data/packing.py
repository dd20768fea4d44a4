"""Packs whole documents into rows of a fixed length: best-fit, and nothing ever crosses a row.

Rows are packed in blocks of some million tokens (`row_writer.py`). Attention does not cross documents, positions
restart with each, and no label crosses either; tests compare a packed row with its documents one by one.
"""

from __future__ import annotations

import numpy as np

from sojourn.data.order import splitmix64


def pack_best_fit(lengths: np.ndarray, row_length: int, seed: int = 0) -> list[list[int]]:
    """Rows as lists of document indices. No document may be longer than a row.

    Long documents go first, then the short ones in shuffled order, each into the fullest row that still has space.
    `open_rows` has the rows by free tokens, and bit n of `sizes` is set if some row has n free tokens: the best fit is
    the lowest set bit at or above the document's length.
    """
    shuffled = np.argsort(splitmix64(np.arange(len(lengths), dtype=np.uint64), seed), kind="stable")
    long_first = np.where(lengths[shuffled] > row_length // 4, lengths[shuffled], 0)
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}
    sizes = 0
    for document in shuffled[np.argsort(-long_first, kind="stable")].tolist():
        length = int(lengths[document])
        fitting = sizes >> length
        if fitting:
            free = length + (fitting & -fitting).bit_length() - 1
            row = open_rows[free].pop()
            if not open_rows[free]:
                sizes &= ~(1 << free)
        else:
            free, row = row_length, len(rows)
            rows.append([])
        rows[row].append(document)
        left = free - length
        if left > 0:
            open_rows.setdefault(left, []).append(row)
            sizes |= 1 << left
    return rows
