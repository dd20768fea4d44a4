"""Checks an opened model on two tiny documents before training: does our computation agree with transformers'?

The logits must equal the model's own, and a packed document must not be affected by the document before it.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from sojourn.errors import UserError
from sojourn.model.layout import compute_cu_seqlens, make_layout, pad_cu_seqlens
from sojourn.model.network import Network

_FIRST_LENGTH, _SECOND_LENGTH, _MAX_LENGTH = 9, 16, 2048  # tokens
_TOLERANCE_FP32 = 1e-3
_TOLERANCE_HALF = 0.2  # in bf16 and fp16, rounding alone makes several percent in a deep model with random weights
_TOLERANCE_PACKED = 0.02  # same kernels on the same shapes: no rounding differences


def check_parity(network: Network, device: str, autocast: AbstractContextManager[object], packed: bool) -> None:
    """Raises a UserError where logits differ from transformers' own, or packed documents affect each other."""
    model = network.base_model
    beyond_windows = [window + 8 for window in network.sliding_windows]
    length = min(max([_SECOND_LENGTH, *beyond_windows]), _MAX_LENGTH)
    vocab_size = min(1000, model.config.get_text_config().vocab_size)
    tokens = np.random.default_rng(0).integers(0, vocab_size, 2 * _FIRST_LENGTH + length)
    first, other, second = np.split(tokens, [_FIRST_LENGTH, 2 * _FIRST_LENGTH])
    was_training = network.model.training
    network.model.eval()
    try:
        with torch.no_grad(), autocast:
            alone = _hidden_states(network, device, [second])
            logits = network.lm_head(alone).float()
            tolerance = _TOLERANCE_FP32 if isinstance(autocast, contextlib.nullcontext) else _TOLERANCE_HALF
            with network.transformers_attention():
                ids = torch.tensor(second[None], device=device)
                expected = network.model(input_ids=ids, use_cache=False).logits.float()
            error = _relative_error(logits, expected)
            if not error <= tolerance:
                raise UserError(
                    f"model.base: {type(model).__name__} is not supported yet: our logits differ from transformers' "
                    f"by {error:.1%}"
                )
            if not packed:
                return
            after_first, after_other = (
                _hidden_states(network, device, [before, second])[:, _FIRST_LENGTH:] for before in (first, other)
            )
            isolated = _relative_error(after_first, after_other) <= min(tolerance, _TOLERANCE_PACKED)
            if not (isolated and _relative_error(after_first, alone) <= tolerance):
                raise UserError(
                    f"data.packing: {type(model).__name__} cannot keep packed documents apart; set data.packing=off"
                )
    finally:
        network.model.train(was_training)


def _hidden_states(network: Network, device: str, documents: list[np.ndarray]) -> Tensor:
    ids = np.concatenate(documents)[None]
    positions = np.concatenate([np.arange(len(d)) for d in documents])[None]
    document_ids = np.concatenate([np.full(len(d), i, np.int32) for i, d in enumerate(documents)])[None]
    layout = None
    if network.attention_backend is not None:
        cu_seqlens = torch.from_numpy(pad_cu_seqlens(compute_cu_seqlens(document_ids))).to(device)
        documents_BT = torch.from_numpy(document_ids).to(device)
        layout = make_layout(network.attention_backend, document_ids, documents_BT, cu_seqlens, network.sliding_windows)
    return network.hidden_states(torch.from_numpy(ids).to(device), torch.from_numpy(positions).to(device), layout)


def _relative_error(value: Tensor, expected: Tensor) -> float:
    value, expected = value.float(), expected.float()
    return float((value - expected).norm() / expected.norm())
