"""A model's weights by name, each once (a tied head is its embedding), and putting them back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sojourn.errors import UserError


def weights(model: Any) -> dict[str, Any]:
    """What training changes: all of it, or of a model with frozen weights the rest (an adapter)."""
    if any(not p.requires_grad for p in model.parameters()):
        return {name: p for name, p in model.named_parameters() if p.requires_grad}
    kept = {name for name, _ in model.named_parameters()}  # names each shared tensor once
    shared = {name for name, _ in model.named_parameters(remove_duplicate=False)} - kept
    return {name: value for name, value in model.state_dict().items() if name not in shared}


def are_numbers(tensors: Iterable[Any]) -> bool:
    """Whether none of them has become infinite or undefined."""
    import torch

    largest = [
        torch.linalg.vector_norm(tensor.detach(), torch.inf, dtype=torch.float32)
        for tensor in tensors
        if tensor.is_floating_point() and tensor.numel()
    ]
    return not largest or bool(torch.isfinite(torch.stack(largest)).all())


def load_weights(model: Any, tensors: dict[str, Any]) -> None:
    """Every tensor must find its place and fill it."""
    import torch

    places = weights(model)
    check_fit(places, tensors)
    with torch.no_grad():
        for name, tensor in tensors.items():
            places[name].copy_(tensor)


def check_fit(places: dict[str, Any], tensors: dict[str, Any]) -> None:
    wrong = sorted(places.keys() ^ tensors.keys()) or [n for n, t in tensors.items() if places[n].shape != t.shape]
    if wrong:
        raise UserError(
            f"the checkpoint belongs to another model ({wrong[0]} differs); give this run another name: name=NEW"
        )
