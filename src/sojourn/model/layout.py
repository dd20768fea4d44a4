"""Where documents begin and end in a packed batch, in the form that each attention backend reads.

Flash-style kernels read `cu_seqlens` (cumulative document lengths) and `max_seqlen`; SDPA and math read dense masks;
FlexAttention reads block masks. A row's padding counts as one more document, so that every token attends to at least
itself.

Shapes: B rows, T tokens per row.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sojourn.config.attention_backends import ATTENTION_BACKENDS
from sojourn.model.length_buckets import LengthBuckets

if TYPE_CHECKING:
    from torch import Tensor

# Each new length of cu_seqlens, and each new max_seqlen, compiles kernels again: both are rounded up.
_CU_SEQLENS_MULTIPLE = 64
_MAX_SEQLEN_MULTIPLE = 512


@dataclass(frozen=True)
class Layout:
    """`cu_seqlens`: starts of all documents in the flattened batch, then its end, repeated as padding."""

    backend: str
    documents_BT: Tensor  # index of each token's document in its row; -1: padding
    cu_seqlens: Tensor
    max_seqlen: int
    one_document_per_row: bool  # then plain causal attention is exact
    masks: dict[int | None, Any] = field(default_factory=dict)  # by sliding window; as `mask` of the backend says
    has_window: bool = False  # some layer's sliding window is shorter than the longest document
    length_buckets: LengthBuckets | None = None  # then `masks` are for one row as long as the longest document

    def effective_window(self, window: int | None) -> int | None:
        """None for a sliding window that no document exceeds."""
        return window if window is not None and window < self.max_seqlen else None


def compute_cu_seqlens(documents_BT: np.ndarray) -> np.ndarray:
    """Starts of the documents in the flattened batch, and its end."""
    is_start = np.ones(documents_BT.shape, bool)
    is_start[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    return np.append(np.flatnonzero(is_start), documents_BT.size).astype(np.int32)


def pad_cu_seqlens(cu_seqlens: np.ndarray) -> np.ndarray:
    padding = -len(cu_seqlens) % _CU_SEQLENS_MULTIPLE
    return np.append(cu_seqlens, np.full(padding, cu_seqlens[-1], np.int32))


def make_layout(
    backend: str,
    documents: np.ndarray,
    documents_BT: Tensor,
    cu_seqlens: Tensor,
    sliding_windows: tuple[int, ...],
    length_buckets: LengthBuckets | None = None,
) -> Layout:
    """`documents` is `documents_BT` in host memory; `sliding_windows` are those that the model has."""
    longest = int(np.diff(compute_cu_seqlens(documents)).max())
    rows, width = documents.shape
    layout = Layout(
        backend,
        documents_BT,
        cu_seqlens,
        min(width, -(-longest // _MAX_SEQLEN_MULTIPLE) * _MAX_SEQLEN_MULTIPLE),
        one_document_per_row=length_buckets is not None or bool((documents.max(axis=1) <= 0).all()),
        length_buckets=length_buckets,
    )
    windows = {layout.effective_window(size) for size in (None, *sliding_windows)}
    layout = replace(layout, has_window=windows != {None})
    mask, causal = ATTENTION_BACKENDS[backend].mask, ATTENTION_BACKENDS[backend].causal
    for window in windows:
        if causal and layout.one_document_per_row and window is None:
            continue
        if mask == "block":
            layout.masks[window] = _block_mask(documents_BT, rows, width, window)
        elif mask == "dense":
            masked_BT = documents_BT if length_buckets is None else documents_BT.new_zeros(1, length_buckets.longest)
            layout.masks[window] = dense_mask(masked_BT, window)
    return layout


def dense_mask(documents_BT: Tensor, window: int | None) -> Tensor:
    """True where a query (second last axis) may attend to a key (last axis): causal, same document, in the window."""
    import torch

    index_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    distance_TT = index_T[:, None] - index_T[None, :]
    allowed_TT = (distance_TT >= 0) if window is None else (distance_TT >= 0) & (distance_TT < window)
    return (documents_BT[:, :, None] == documents_BT[:, None, :])[:, None] & allowed_TT


def _block_mask(documents_BT: Tensor, rows: int, width: int, window: int | None) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def mask_mod(b: Tensor, _: Tensor, q: Tensor, k: Tensor) -> Tensor:
        allowed = (q >= k) & (documents_BT[b, q] == documents_BT[b, k])
        return allowed if window is None else allowed & (q - k < window)

    return create_block_mask(mask_mod, rows, None, width, width, device=str(documents_BT.device))
