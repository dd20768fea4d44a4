"""The load-balancing loss of mixture-of-experts models (router auxiliary loss), as transformers computes it.

Of the Switch Transformer paper: the share of tokens that visit an expert times its mean router probability, summed over
experts and times their number; 1 where experts are visited evenly. It is not linear in the tokens: the loss of a global
batch is the mean over micro batches, weighted by their target tokens.

Shapes: T tokens (padding too), E experts, k experts per token.
"""

from __future__ import annotations

import torch
from torch import Tensor


def load_balancing_loss(router_logits: list[Tensor], top_k: int, is_real_T: Tensor) -> Tensor:
    """`router_logits`: of each layer, (T, E). Padding does not count."""
    experts, real_T = router_logits[0].shape[-1], is_real_T.float()
    visits_E, sums_E = real_T.new_zeros(experts), real_T.new_zeros(experts)
    for logits_TE in router_logits:
        probabilities_TE = torch.softmax(logits_TE.float(), -1)
        chosen_Tk = probabilities_TE.topk(top_k, -1).indices
        visits_E = visits_E.index_add(0, chosen_Tk.flatten(), real_T.repeat_interleave(top_k))
        sums_E = sums_E + real_T @ probabilities_TE
    tokens = len(router_logits) * real_T.sum()
    return experts * (visits_E * sums_E).sum() / tokens.square().clamp(min=1.0)
