"""The outermost module that engines wrap: work that runs inside it finds the weights that it needs."""

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
