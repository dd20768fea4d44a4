"""What only this bench does to a session: weights are made on the device, and what is not measured is left out.

The ordinary path reads them from a file of holes, which for 15 GB takes ten seconds. All else of it stays as it is:
weights are cast or quantised one by one, by the same code.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def shorten_opening(device: str) -> None:
    """Zeros would be multiplied too fast, so they become random numbers as soon as they are there. The trial of a model
    is left out, and nothing is saved, so that the disk needs no room for it."""
    import torch

    build: Any = import_module("sojourn.train.build")
    session: Any = import_module("sojourn.train.session")
    streaming: Any = import_module("sojourn.model.streamed_loading")
    opened, built = build.load_base_model, build.build_model

    def made(*given: Any) -> Any:
        with torch.device(device):
            return built(*given)

    def hollow(_: Any, file: Any, name: str) -> Any:
        return torch.zeros(file.entries[name].shape, dtype=torch.bfloat16, device=device)

    build.load_base_model = lambda *given: filled(opened(*given))
    build.build_model = made
    build.check_parity = lambda *given: None
    session.check_free_space = lambda *given: None
    streaming.StagedReads.load = hollow


def filled(model: Any) -> Any:
    """The model with random numbers in place of its own, where they are."""
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            packed = getattr(weight, "quant_state", None)
            if packed is not None:
                weight.data.random_()
                _fill_scales(packed)
            elif "norm" in name:
                weight.normal_(1.0, 0.02)
            else:
                weight.normal_(0.0, 0.02)
    return model


def _fill_scales(packed: Any) -> None:
    """Scales of NF4 weights; these may be quantised to int8 themselves, with scales and an offset of their own."""
    if packed.nested:
        packed.absmax.random_()
        packed.offset.fill_(0.05)
        packed.state2.absmax.fill_(0.02)
    else:
        packed.absmax.fill_(0.05)
