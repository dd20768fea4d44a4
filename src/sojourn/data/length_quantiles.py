"""The lengths of any number of documents as a few quantiles, which is enough for a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

QUANTILES = 512


def length_quantiles(lengths: np.ndarray) -> tuple[int, ...]:
    import numpy as np

    ordered = np.sort(lengths)
    if len(ordered) > QUANTILES:
        ordered = ordered[((np.arange(QUANTILES) + 0.5) * len(ordered) / QUANTILES).astype(np.int64)]
    return tuple(int(one) for one in ordered)
