"""Packing: whole documents, each once, in full rows."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sojourn.data.packing import pack_best_fit


@given(st.lists(st.integers(1, 64), max_size=300))
def test_every_document_lands_in_one_row_and_no_row_overflows(lengths: list[int]):
    rows = pack_best_fit(np.array(lengths, dtype=np.int64), 64)
    assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[document] for document in row) <= 64 for row in rows)


def test_rows_are_at_least_98_percent_full_on_documents_of_mixed_lengths():
    lengths = np.random.default_rng(0).lognormal(4.8, 0.8, 5000).clip(5, 2048).astype(np.int64)
    rows = pack_best_fit(lengths, 2048)
    assert lengths.sum() / (len(rows) * 2048) >= 0.98


def test_a_row_mixes_short_documents_from_all_over_the_data():
    rows = pack_best_fit(np.full(1000, 10), 100)
    spread = [max(row) - min(row) for row in rows]
    assert np.median(spread) > 500
