"""Checks an opened model on short documents before training and scoring: does our computation agree with transformers'?

The logits must equal the model's own, a pruned last layer must compute the same as the whole one, and a packed document
must not be affected by the document before it.
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
_TOLERANCE_SAME_KERNELS = 0.02  # for packed documents and the pruned last layer: hardly any rounding differences


def check_parity(
    network: Network, device: str, autocast: AbstractContextManager[object], packed: bool, fused_forwards: bool
) -> None:
    """Raises a UserError where logits differ from transformers' own, or packed documents affect each other, and
    NotImplementedError where the model does not call our attention."""
    model = network.base_model
    documents = _documents(network)
    second = documents[-1]
    was_training = network.model.training
    network.model.eval()
    try:
        with torch.no_grad(), autocast:
            _check_calls_ours(network, device, documents)
            alone = _hidden_states(network, device, [second])
            tolerance = _TOLERANCE_FP32 if isinstance(autocast, contextlib.nullcontext) else _TOLERANCE_HALF
            with network.transformers_attention():
                ids = torch.tensor(second[None], device=device)
                expected = network.model(input_ids=ids, use_cache=False).logits.float()
            errors = [
                ("our logits differ from transformers'", _relative_error(network.lm_head(alone), expected), tolerance)
            ]
            if network.last_layer_pruned:
                pruned = _hidden_states(network, device, [second], as_targets=True)
                what = "our last layer's hidden states of target tokens differ from transformers'"
                errors.append((what, _relative_error(pruned, alone[0]), min(tolerance, _TOLERANCE_SAME_KERNELS)))
            for what, error, largest in errors:
                if not error <= largest:
                    raise UserError(
                        f"model.base: {type(model).__name__} is not supported yet: {what} by {error:.1%}"
                        + ("; try advanced.fused_forwards=off" if fused_forwards else "")
                    )
            if packed:
                after_first = _check_apart(network, device, documents, min(tolerance, _TOLERANCE_SAME_KERNELS))
                if not _relative_error(after_first, alone) <= tolerance:
                    raise _not_apart(network)
    except TypeError as error:
        if "keyword" not in str(error):
            raise
        raise UserError(f"model.base: {type(model).__name__} is not supported yet: {error}") from None
    finally:
        network.model.train(was_training)


def check_packing(network: Network, device: str, packed: bool) -> None:
    """The part of the check that needs no second attention to compare with, for scoring."""
    documents = _documents(network)
    with torch.no_grad():
        _check_calls_ours(network, device, documents)
        if packed:
            _check_apart(network, device, documents, _TOLERANCE_SAME_KERNELS)


def _documents(network: Network) -> list[np.ndarray]:
    """Two short ones of the same length, and one that is longer than the sliding windows."""
    beyond_windows = [window + 8 for window in network.sliding_windows]
    length = min(max([_SECOND_LENGTH, *beyond_windows]), _MAX_LENGTH)
    vocab_size = min(1000, network.base_model.config.get_text_config().vocab_size)
    tokens = np.random.default_rng(0).integers(0, vocab_size, 2 * _FIRST_LENGTH + length)
    return np.split(tokens, [_FIRST_LENGTH, 2 * _FIRST_LENGTH])


def _check_calls_ours(network: Network, device: str, documents: list[np.ndarray]) -> None:
    """Code that is not transformers' may say that it calls any attention, and call its own."""
    if network.attention_backend is None or type(network.base_model).__module__.startswith("transformers."):
        return
    first, _, second = documents
    apart, together = (_hidden_states(network, device, [first, second], as_one=as_one) for as_one in (False, True))
    if torch.equal(apart, together):
        raise NotImplementedError(type(network.base_model).__name__)


def _check_apart(network: Network, device: str, documents: list[np.ndarray], tolerance: float) -> Tensor:
    """Hidden states of a document after another one; they must be the same after any other."""
    *others, second = documents
    after_first, after_other = (
        _hidden_states(network, device, [before, second])[:, _FIRST_LENGTH:] for before in others
    )
    if not _relative_error(after_first, after_other) <= tolerance:
        raise _not_apart(network)
    return after_first


def _not_apart(network: Network) -> UserError:
    name = type(network.base_model).__name__
    return UserError(f"data.packing: {name} cannot keep packed documents apart; set data.packing=off")


def _hidden_states(
    network: Network, device: str, documents: list[np.ndarray], as_targets: bool = False, as_one: bool = False
) -> Tensor:
    """`as_targets`: of all tokens as targets, which a pruned last layer computes in its own way. `as_one`: the layout
    says that they are one document."""
    ids = np.concatenate(documents)[None]
    positions = np.concatenate([np.arange(len(d)) for d in documents])[None]
    indices = [np.full(len(d), 0 if as_one else i, np.int32) for i, d in enumerate(documents)]
    document_ids = np.concatenate(indices)[None]
    layout = None
    if network.attention_backend is not None:
        cu_seqlens = torch.from_numpy(pad_cu_seqlens(compute_cu_seqlens(document_ids))).to(device)
        documents_BT = torch.from_numpy(document_ids).to(device)
        layout = make_layout(network.attention_backend, document_ids, documents_BT, cu_seqlens, network.sliding_windows)
    targets = torch.arange(ids.size, device=device) if as_targets else None
    ids_BT, positions_BT = torch.from_numpy(ids).to(device), torch.from_numpy(positions).to(device)
    return network.hidden_states(ids_BT, positions_BT, layout, targets)


def _relative_error(value: Tensor, expected: Tensor) -> float:
    value, expected = value.float(), expected.float()
    return float((value - expected).norm() / expected.norm())
