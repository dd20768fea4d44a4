"""Next-token cross-entropy, for pretraining and fine-tuning: summed over target tokens, divided by their number.

The LM head sees the hidden states of target tokens only. With `chunked`, the logits of all target tokens are never held
at once (`model/loss.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sojourn.config.schema import RunConfig
from sojourn.data.artefact import Batch
from sojourn.model import loss
from sojourn.model.network import Network
from sojourn.train.batcher import DeviceBatch


@dataclass(frozen=True)
class Supervised:
    chunked: bool = True
    is_per_token = True
    needs_documents = False

    def weight(self, batch: Batch) -> int:
        return batch.targets

    def loss_sum(self, network: Network, batch: DeviceBatch) -> Tensor:
        total: Tensor = loss.cross_entropy_sum(
            network.lm_head, batch.target_hidden(network), batch.labels_N, self.chunked
        )
        return total

    def score(self, network: Network, batch: DeviceBatch) -> tuple[Tensor, Tensor]:
        return loss.loss_and_correct(network.lm_head, batch.target_hidden(network), batch.labels_N)


def make_supervised(config: RunConfig) -> Supervised:
    return Supervised(chunked=config.advanced.chunked_loss != "off")
