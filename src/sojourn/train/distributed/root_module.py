"""The outermost module, which FSDP and DeepSpeed wrap: their hooks gather weights for work in its forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from sojourn.model.network import Network

T = TypeVar("T")


class RootModule(torch.nn.Module):
    def __init__(self, network: Network) -> None:
        super().__init__()
        self.model = network.model

    def forward(self, work: Callable[[], T]) -> T:
        return work()
