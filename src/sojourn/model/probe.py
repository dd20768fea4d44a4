"""Tries a model on two tiny documents before anything is trained: does our way of computing agree with its own?

The loss must be that of the model's own logits, and a document must not notice which one is packed before it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch

from sojourn.errors import UserError
from sojourn.model.layout import find_starts, make_layout, padded_starts
from sojourn.model.network import Network

_FIRST, _SECOND, _LONGEST = 9, 16, 2048
_AGREE = 1e-3
_AGREE_HALF = 0.2  # rounding alone makes several percent of a deep model with random weights
_APART = 0.02  # the same kernels on the same shapes: rounding plays no part


def check_network(network: Network, device: str, autocast: Any, packed: bool) -> None:
    """Refuses a model that our computation does not fit, in one line that says what does."""
    model = network.plain
    long = min(max([_SECOND, *(window + 8 for window in network.windows)]), _LONGEST)  # beyond a window, if it can be
    numbers = np.random.default_rng(0).integers(
        0, min(1000, model.config.get_text_config().vocab_size), 2 * _FIRST + long
    )
    first, other, second = numbers[:_FIRST], numbers[_FIRST : 2 * _FIRST], numbers[2 * _FIRST :]
    was_training = network.model.training
    network.model.eval()
    try:
        with torch.no_grad(), autocast:
            alone = _hidden(network, device, [second])
            ours = network.head(alone).float()
            agree = _AGREE if isinstance(autocast, contextlib.nullcontext) else _AGREE_HALF
            with network.own_attention():
                own = network.model(input_ids=torch.tensor(second[None], device=device), use_cache=False).logits.float()
            off = _distance(ours, own)
            if not off <= agree:
                raise UserError(
                    f"model.base: {type(model).__name__} computes in a way that is not known here (its logits differ "
                    f"by {off:.1%}), so it cannot be trained yet"
                )
            if not packed:
                return
            pairs = [_hidden(network, device, [before, second])[:, _FIRST:] for before in (first, other)]
            if not (_distance(*pairs) <= min(agree, _APART) and _distance(pairs[0], alone) <= agree):
                raise UserError(
                    f"data.packing: {type(model).__name__} cannot keep packed documents apart; set data.packing=off"
                )
    finally:
        network.model.train(was_training)


def _hidden(network: Network, device: str, documents: list[np.ndarray]) -> Any:
    ids = np.concatenate(documents)[None]
    positions = np.concatenate([np.arange(len(d)) for d in documents])[None]
    which = np.concatenate([np.full(len(d), i, np.int32) for i, d in enumerate(documents)])[None]
    layout = None
    if network.backend is not None:
        starts = torch.from_numpy(padded_starts(find_starts(which))).to(device)
        layout = make_layout(network.backend, which, torch.from_numpy(which).to(device), starts, network.windows)
    return network.hidden(torch.from_numpy(ids).to(device), torch.from_numpy(positions).to(device), layout)


def _distance(one: Any, other: Any) -> float:
    one, other = one.float(), other.float()
    return float((one - other).norm() / other.norm())
