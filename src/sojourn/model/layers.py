"""What is put on a model's blocks from outside: recomputing, which trades time for memory, and compiling."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_DEAR = ("mm", "linear", "times_nf4", "attention", "attn", "flash")


def blocks(model: Any) -> list[Any]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def recompute(model: Any, how: str, by_chance: bool = True) -> None:
    """`full` keeps only each block's input; `selective` also what its multiplications and attention made, so that only
    cheap things are made again in the backward. Where nothing goes `by_chance`, no state of chance is carried along:
    that costs a CPU time, and cannot be recorded."""
    for block in blocks(model):
        kind: Any = type(block)
        block.__class__ = _recomputing(kind, how == "selective", by_chance)


@cache
def _recomputing(kind: Any, selective: bool, by_chance: bool) -> Any:
    """The class whose forward is recomputed: inside what is compiled, and the same for every block."""
    plain = kind.forward
    extra: dict[str, Any] = {"context_fn": _keep_dear} if selective else {}
    extra |= {"use_reentrant": False, "preserve_rng_state": by_chance, "determinism_check": "none"}

    def forward(self: Any, *given: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(self, *given, **named)
        return checkpoint(plain, self, *given, **extra, **named)

    return type(kind.__name__, (kind,), {"forward": forward, "selective": selective, "__module__": kind.__module__})


def _keep_dear() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(_: Any, operation: Any, *given: Any, **named: Any) -> CheckpointPolicy:
    return _policy_of(operation)


@cache
def _policy_of(operation: Any) -> CheckpointPolicy:
    name = str(operation)
    return CheckpointPolicy.MUST_SAVE if any(word in name for word in _DEAR) else CheckpointPolicy.PREFER_RECOMPUTE


def compile_blocks(model: Any) -> None:
    """All share one graph, so compiling takes as long for 80 as for 2."""
    torch._dynamo.config.cache_size_limit = max(64, torch._dynamo.config.cache_size_limit)
    for block in blocks(model):
        block.compile()
