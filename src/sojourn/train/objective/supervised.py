"""Next-token cross-entropy, for pretraining and fine-tuning: summed over target tokens, divided by their number.

The LM head sees the hidden states of target tokens only. With `chunked`, the logits of all target tokens are never held
at once (`model/loss.py`). With `router_aux_loss_coef`, training adds so much of the load-balancing loss of
mixture-of-experts models; held-out loss is without it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sojourn.config.schema import RunConfig
from sojourn.data.artefact import Batch
from sojourn.model import loss
from sojourn.model.load_balancing import load_balancing_loss
from sojourn.model.network import Network
from sojourn.train.batcher import DeviceBatch


@dataclass(frozen=True)
class Supervised:
    chunked: bool = True
    router_aux_loss_coef: float = 0.0
    is_per_token = True
    needs_documents = False

    @property
    def needs_padding(self) -> bool:
        return self.router_aux_loss_coef > 0

    def weight(self, batch: Batch) -> int:
        return batch.targets

    def loss_sum(self, network: Network, batch: DeviceBatch) -> Tensor:
        if batch.is_real_BT is None:
            return self._cross_entropy(network, batch, batch.target_hidden(network))
        router_logits: list[Tensor] = []
        total = self._cross_entropy(network, batch, batch.target_hidden(network, router_logits))
        top_k = network.base_model.config.get_text_config().num_experts_per_tok
        balance = load_balancing_loss(router_logits, top_k, batch.is_real_BT.flatten())
        return total + self.router_aux_loss_coef * len(batch.labels_N) * balance

    def _cross_entropy(self, network: Network, batch: DeviceBatch, hidden: Tensor) -> Tensor:
        total: Tensor = loss.cross_entropy_sum(network.lm_head, hidden, batch.labels_N, self.chunked)
        return total

    def score(self, network: Network, batch: DeviceBatch) -> tuple[Tensor, Tensor]:
        return loss.loss_and_correct(network.lm_head, batch.target_hidden(network), batch.labels_N)


def make_supervised(config: RunConfig) -> Supervised:
    return Supervised(config.advanced.chunked_loss != "off", config.train.router_aux_loss_coef or 0.0)
