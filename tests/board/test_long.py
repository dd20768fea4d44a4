"""200 runs of 100,000 points: what a browser sees first, and five browsers at once for minutes: memory stays flat.

SOJOURN_BOARD_MINUTES: how long (1 by default). The figures go to benchmarks/results/.
"""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.board import measure, save

from board_page import in_browser

pytestmark = in_browser
MINUTES = float(os.environ.get("SOJOURN_BOARD_MINUTES", "1"))
GROWTH = 24  # MiB: what allocators keep


def test_many_long_runs_are_there_at_once_and_memory_stays_flat(tmp_path: Path) -> None:
    figures = measure(tmp_path, 200, 100_000, MINUTES, 5)
    print(save(figures))
    assert figures["first paint, s"] < 2 and figures["table of all runs shown, s"] < 2, figures
    assert figures["errors"] == [] and figures["update p99, s"] < 2, figures
    assert figures["growth in the last third, MiB"] < GROWTH or MINUTES < 5, figures
    assert figures["board, MiB, largest"] < 400, figures
