"""What a run may give up when memory runs out, and which of two values saves more memory."""

from __future__ import annotations

from typing import Any

# By key, the values from the most memory to the least; a micro batch is a number of rows.
MEMORY_SAVING: dict[str, tuple[str, ...]] = {
    "train.cuda_graphs": ("auto", "on", "off"),
    "train.micro_batch": (),
    "train.activation_checkpointing": ("auto", "off", "selective", "full", "offload"),
    "advanced.chunked_loss": ("auto", "off", "on"),
    "train.offload": ("off", "optimizer", "all"),
}


def saves_more_memory(key: str, one: Any, other: Any) -> bool:
    """Whether one value of a setting saves more memory than the other."""
    order = MEMORY_SAVING[key]
    return order.index(one) > order.index(other) if order else int(one) < int(other)


def is_fallback(key: str, value: Any) -> bool:
    """Whether a run may have taken it; ladder.json may hold anything."""
    order = MEMORY_SAVING.get(key)
    if order is None:
        return False
    return isinstance(value, str) and value in order if order else type(value) is int and 1 <= value < 2**31
