"""Which errors mean that memory has run out, and how to free some."""

from __future__ import annotations

import gc

_OOM_MESSAGES = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_oom(error: BaseException) -> bool:
    """torch's own error, or one of the libraries below it."""
    import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(word.lower() in str(error).lower() for word in _OOM_MESSAGES)


def free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
