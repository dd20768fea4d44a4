"""What trades time for memory, or start-up for speed, put on a model from outside: recomputing and compiling blocks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


def recompute(model: Any, how: str) -> None:
    """`full` keeps only each block's input; `selective` also what its multiplications and attention made, so that only
    cheap things are made again in the backward."""
    if how == "off":
        return
    settings: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)


_DEAR = ("mm", "addmm", "bmm", "linear", "attention", "attn", "flash")


def _policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = getattr(operation, "_opname", str(operation))
    return CheckpointPolicy.MUST_SAVE if any(word in name for word in _DEAR) else CheckpointPolicy.PREFER_RECOMPUTE


def compile_blocks(body: Any) -> None:
    """Block by block: all blocks share one graph, so compiling takes as long for 80 as for 2."""
    torch._dynamo.config.cache_size_limit = max(64, torch._dynamo.config.cache_size_limit)
    for block in body.layers:
        block.compile()
