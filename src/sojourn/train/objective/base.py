"""What training asks of an objective. Step, evaluation and CUDA graphs know nothing else about the loss.

The loss of a step is the sum of `loss_sum` over all micro batches and ranks, divided by the sum of `weight` over them.
So neither the micro batch nor the number of ranks changes the result, but for rounding.

To add an objective, write a class with these members in a file of its own, and register it in `registry.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from sojourn.data.artefact import Batch
    from sojourn.model.network import Network
    from sojourn.train.batcher import DeviceBatch


class Objective(Protocol):
    @property
    def is_per_token(self) -> bool:
        """Whether the weight is the number of target tokens. Then held-out loss also gives bits per byte."""

    @property
    def needs_documents(self) -> bool:
        """Whether `loss_sum` reads `DeviceBatch.target_documents_N`."""

    @property
    def needs_padding(self) -> bool:
        """Whether `loss_sum` reads `DeviceBatch.is_real_BT`."""

    def weight(self, batch: Batch) -> int:
        """What a micro batch adds to the denominator, such as its target tokens or pairs. 0: nothing to learn from."""

    def loss_sum(self, network: Network, batch: DeviceBatch) -> Tensor:
        """The loss of a micro batch, summed. Labels below 0 are padding and must not count.

        It is captured as a CUDA graph: no shape may depend on values, and nothing may be read from the device.
        """

    def score(self, network: Network, batch: DeviceBatch) -> tuple[Tensor, Tensor]:
        """For evaluation: the summed loss, and how many of `weight` are right."""
