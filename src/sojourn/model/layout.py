"""Where documents lie in a batch of rows, in the forms that the attention backends want.

Shapes: B rows, T tokens a row. A row's padding counts as one more document, so that every token sees at least itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sojourn.model.length_buckets import Grids

_STARTS_ROUND = 64  # lengths of `starts`, and of the longest document, come in few sizes: each costs a compilation
_LONGEST_ROUND = 512


@dataclass(frozen=True)
class Layout:
    """`starts`: of all documents, in the flattened batch, and its end (repeated, so that lengths are few)."""

    backend: str
    documents_BT: Any
    starts: Any
    longest: int
    plain: bool  # one document a row: causal attention is already exact
    masks: dict[int | None, Any] = field(default_factory=dict)  # by window; what sdpa, math and flex read
    grids: Grids | None = None  # then the rows of `masks` are those of the longest documents

    def window(self, wanted: int | None) -> int | None:
        """A window that no document reaches beyond is none."""
        return wanted if wanted is not None and wanted < self.longest else None


def find_starts(documents_BT: np.ndarray) -> np.ndarray:
    """Starts of the documents in the flattened batch, and its end."""
    new = np.ones(documents_BT.shape, bool)
    new[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    return np.append(np.flatnonzero(new), documents_BT.size).astype(np.int32)


def padded_starts(starts: np.ndarray) -> np.ndarray:
    short = -len(starts) % _STARTS_ROUND
    return np.append(starts, np.full(short, starts[-1], np.int32))


def make_layout(
    backend: str,
    documents: np.ndarray,
    documents_BT: Any,
    starts: Any,
    windows: tuple[int, ...],
    grids: Grids | None = None,
) -> Layout:
    """`documents` is the same as `documents_BT`, still in the host's memory; `windows` are those that the model has."""
    ends = find_starts(documents)
    longest = int(np.diff(ends).max())
    rows, width = documents.shape
    layout = Layout(
        backend,
        documents_BT,
        starts,
        min(width, -(-longest // _LONGEST_ROUND) * _LONGEST_ROUND),
        plain=grids is not None or bool((documents.max(axis=1) <= 0).all()),
        grids=grids,
    )
    for window in {layout.window(wanted) for wanted in (None, *windows)}:
        if backend == "flex":
            layout.masks[window] = _block_mask(documents_BT, rows, width, window)
        elif backend in ("sdpa", "math") and not (backend == "sdpa" and layout.plain and window is None):
            alike_BT = documents_BT if grids is None else documents_BT.new_zeros(1, grids.longest)
            layout.masks[window] = dense_mask(alike_BT, window)
    return layout


def dense_mask(documents_BT: Any, window: int | None) -> Any:
    """True where a token (second last axis) may look (last axis): back, in its own document, within the window."""
    import torch

    places = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    back = places[:, None] - places[None, :]
    allowed = (back >= 0) if window is None else (back >= 0) & (back < window)
    return (documents_BT[:, :, None] == documents_BT[:, None, :])[:, None] & allowed


def _block_mask(documents_BT: Any, rows: int, width: int, window: int | None) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def allowed(b: Any, _: Any, q: Any, k: Any) -> Any:
        inside = (q >= k) & (documents_BT[b, q] == documents_BT[b, k])
        return inside if window is None else inside & (q - k < window)

    return create_block_mask(allowed, rows, None, width, width, device=str(documents_BT.device))
