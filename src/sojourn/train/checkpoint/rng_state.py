"""The states of all random number generators, as tensors."""

from __future__ import annotations

from typing import Any


def get_rng_state() -> dict[str, Any]:
    import torch

    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    if torch.backends.mps.is_available():
        states["mps"] = torch.mps.get_rng_state()
    return states


def set_rng_state(states: dict[str, Any]) -> None:
    """What this machine has no generator for is left out: the run may have moved."""
    import torch

    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "mps" in states and torch.backends.mps.is_available():
        torch.mps.set_rng_state(states["mps"])
