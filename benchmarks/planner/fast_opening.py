"""What only this bench does to a session: weights are made on the device, and what is not measured is left out.

The ordinary path reads them from a file of holes, which for 15 GB takes ten seconds. All else of it stays as it is:
weights are cast or quantised one by one, by the same code.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any


def shorten_opening(device: str) -> None:
    """Zeros would be multiplied too fast, so they become random numbers as soon as they are there. The trial of a model
    is left out, and nothing is saved, so that the disk needs no room for it."""
    import torch

    build: Any = import_module("sojourn.train.build")
    session: Any = import_module("sojourn.train.session")
    loading: Any = import_module("transformers.modeling_utils")
    opened, built, reads = build.load_base_model, build.build_model, loading.safe_open

    def made(*given: Any) -> Any:
        with torch.device(device):
            return built(*given)

    build.load_base_model = lambda *given: filled(opened(*given))
    build.build_model = made
    build.check_parity = lambda *given: None
    session.check_free_space = lambda *given: None
    loading.safe_open = lambda *given, **named: _Hollow(reads(*given, **named), device)


@dataclass(frozen=True, eq=False)
class _Hollow:
    """An opened file of weights that knows their names and shapes, and has zeros for them."""

    file: Any
    device: str

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> _Hollow:
        self.file.__enter__()
        return self

    def __exit__(self, *given: Any) -> None:
        self.file.__exit__(*given)

    def get_slice(self, name: str) -> Any:
        return _Zeros(self.file.get_slice(name), self.device)


@dataclass(frozen=True, eq=False)
class _Zeros:
    tensor: Any
    device: str

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)

    def __getitem__(self, which: Any) -> Any:
        import torch

        return torch.zeros(self.tensor.get_shape(), dtype=torch.bfloat16, device=self.device)[which]


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
