"""The order of rows: a pure function, a fair shuffle, each row once an epoch."""

import numpy as np
import pytest

from sojourn.data.order import epoch_order, splitmix64, step_rows


def test_an_epoch_reads_every_row_exactly_once():
    rows = np.concatenate([step_rows(k, 103, 8, seed=5) for k in range(26)])
    assert sorted(rows[:103]) == list(range(103))
    assert sorted(rows[103:206]) == list(range(103))


def test_epochs_and_seeds_give_different_orders():
    orders = {tuple(epoch_order(50, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_a_step_is_the_same_whenever_it_is_asked_for():
    later = step_rows(37, 103, 8, seed=5)
    epoch_order.cache_clear()
    assert (step_rows(37, 103, 8, seed=5) == later).all()


def test_the_order_is_the_same_on_every_machine_and_in_every_version():
    assert (
        int(splitmix64(np.array([0], dtype=np.uint64), 0)[0]) == 0xE220A8397B1DCDAF
    )  # SplitMix64's published first output
    assert epoch_order(10, 0, 0).tolist() == [1, 5, 0, 3, 4, 9, 7, 8, 2, 6]
    assert epoch_order(10, 1, 3).tolist() == [3, 9, 2, 1, 6, 5, 0, 8, 4, 7]


def test_the_last_step_of_a_run_stops_at_its_last_row():
    assert len(step_rows(2, 10, 4, seed=0, last_row=10)) == 2
    assert len(step_rows(1, 10, 4, seed=0, last_row=10)) == 4


@pytest.mark.parametrize("rows", [2, 7, 64])
def test_every_place_is_equally_likely_for_every_row(rows: int):
    places = np.zeros((rows, rows))
    draws = 4000
    for seed in range(draws):
        places[np.arange(rows), epoch_order(rows, seed, 0)] += 1
    expected = draws / rows
    chi2 = ((places - expected) ** 2 / expected).sum()
    freedom = (rows - 1) ** 2
    assert abs(chi2 - freedom) < 6 * np.sqrt(2 * freedom)
