"""Causal attention that never crosses packed documents, by several backends that compute the same.

One name, `sojourn`, is registered with transformers, so that its models call `attend`; the batch's `Layout` arrives as
the keyword `layout`, and no model builds a mask of its own. Sliding windows and logit soft-capping are supported. The
records of the backends, with their capabilities and how to add one, are in config/attention_backends.py; here are the
implementations. FlashAttention-4 (kernels/hopper.py) replaces the backend in fused forwards where both records allow.

Shapes: B rows, T tokens per row, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from sojourn.config.attention_backends import ATTENTION_BACKENDS, LONG_ROW
from sojourn.model.kernels.hopper import HopperKernels
from sojourn.model.layout import Layout, compute_cu_seqlens, make_layout, pad_cu_seqlens

NAME = "sojourn"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class AttentionParams:
    """`scale` of the scores, size of the sliding window, logit soft-capping, dropout of attention weights."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    dropout: float = 0.0


Implementation = Callable[[Tensor, Tensor, Tensor, Layout, AttentionParams], Tensor]


def register() -> None:
    """Registers `NAME` with transformers. It has no mask function there, so models build no mask of their own."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _called_by_transformers)


def _called_by_transformers(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if kwargs.get("layout") is None or kwargs.get("s_aux") is not None or not getattr(module, "is_causal", True):
        raise NotImplementedError(f"{type(module).__name__} does not support packed documents")
    params = AttentionParams(
        kwargs.get("scaling") or query_BHTD.shape[-1] ** -0.5,
        kwargs.get("sliding_window"),
        kwargs.get("softcap"),
        kwargs.get("dropout") or 0.0,
    )
    query_BTHD, key_BTKD, value_BTKD = (x.transpose(1, 2) for x in (query_BHTD, key_BKTD, value_BKTD))
    return attend(query_BTHD, key_BTKD, value_BTKD, kwargs["layout"], params), None


def attend(query_BTHD: Tensor, key_BTKD: Tensor, value_BTKD: Tensor, layout: Layout, params: AttentionParams) -> Tensor:
    """Calls the layout's backend."""
    # RoPE in fp32 may have promoted queries and keys; values have the run's dtype.
    query_BTHD, key_BTKD = query_BTHD.to(value_BTKD.dtype), key_BTKD.to(value_BTKD.dtype)
    return _IMPLEMENTATIONS[layout.backend](query_BTHD, key_BTKD, value_BTKD, layout, params)


def uses_flash_attention_4(x: Tensor, layout: Layout, params: AttentionParams) -> bool:
    """Whether FlashAttention-4 is enabled, replaces the layout's backend, and its record allows this call."""
    if not HopperKernels.attention or "hopper_kernels" not in ATTENTION_BACKENDS[layout.backend].replaced_by:
        return False
    backend = ATTENTION_BACKENDS["flash_attention_4"]
    whole_rows = layout.one_document_per_row and layout.length_buckets is None
    return (
        x.dtype in _FLASH_ATTENTION_4_DTYPES
        and (backend.packed or whole_rows)
        and (backend.sliding_window or layout.effective_window(params.window) is None)
        and (backend.softcap or params.softcap is None)
        and (backend.dropout or not params.dropout)
    )


_FLASH_ATTENTION_4_DTYPES = tuple(DTYPES[name] for name in ATTENTION_BACKENDS["flash_attention_4"].dtypes)


def smoke_test(backend: str, device: str, precision: str, head_dim: int) -> bool:
    """Runs two short documents, forward and backward: a build may lack the kernels for this very GPU."""
    documents = np.array([[0] * 40 + [1] * 24], np.int32)
    cu_seqlens = torch.from_numpy(pad_cu_seqlens(compute_cu_seqlens(documents))).to(device)
    layout = make_layout(backend, documents, torch.from_numpy(documents).to(device), cu_seqlens, ())
    query, key, value = (
        torch.ones(1, 64, 2, head_dim, dtype=DTYPES[precision], device=device, requires_grad=True) for _ in range(3)
    )
    try:
        out = attend(query, key, value, layout, AttentionParams(1.0))
        out.sum().backward()
        return bool(torch.isfinite(out).all()) and query.grad is not None
    except Exception:  # whatever a missing kernel raises
        return False


# -- Implementations --


def math(query_BTHD: Tensor, key_BTKD: Tensor, value_BTKD: Tensor, layout: Layout, params: AttentionParams) -> Tensor:
    """Materializes all scores, in fp32 at least: slow, and the reference for the others."""
    dtype = torch.promote_types(query_BTHD.dtype, torch.float32)
    q, k, v = (x.transpose(1, 2).to(dtype) for x in _repeat_kv(query_BTHD, key_BTKD, value_BTKD))
    with torch.autocast(q.device.type, enabled=False):
        scores = (q @ k.transpose(-1, -2)) * params.scale
        if params.softcap is not None:
            scores = params.softcap * torch.tanh(scores / params.softcap)
        mask = layout.masks[layout.effective_window(params.window)]
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return (F.dropout(weights, params.dropout) @ v).transpose(1, 2).to(query_BTHD.dtype)


def sdpa(query_BTHD: Tensor, key_BTKD: Tensor, value_BTKD: Tensor, layout: Layout, params: AttentionParams) -> Tensor:
    """torch's SDPA: its flash or cuDNN kernels where a row is one document, else those that take a mask."""
    window, buckets = layout.effective_window(params.window), layout.length_buckets
    mask = None if layout.one_document_per_row and window is None else layout.masks[window]
    if buckets is None:
        return _sdpa(query_BTHD, key_BTKD, value_BTKD, mask, params)
    outputs = []
    for q, k, v in zip(buckets.split(query_BTHD), buckets.split(key_BTKD), buckets.split(value_BTKD), strict=True):
        length = q.shape[1]
        outputs.append(_sdpa(q, k, v, None if mask is None else mask[..., :length, :length], params))
    return buckets.join(outputs)


def _sdpa(
    query_BTHD: Tensor, key_BTKD: Tensor, value_BTKD: Tensor, mask: Tensor | None, params: AttentionParams
) -> Tensor:
    gqa = mask is None and query_BTHD.is_cuda and query_BTHD.shape[1] >= LONG_ROW
    repeated = (query_BTHD, key_BTKD, value_BTKD) if gqa else _repeat_kv(query_BTHD, key_BTKD, value_BTKD)
    q, k, v = (x.transpose(1, 2) for x in repeated)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=params.dropout, is_causal=mask is None, scale=params.scale, enable_gqa=gqa
    )
    return out.transpose(1, 2)


def varlen(query_BTHD: Tensor, key_BTKD: Tensor, value_BTKD: Tensor, layout: Layout, params: AttentionParams) -> Tensor:
    """torch's variable-length flash attention over documents end to end: no mask, no scores between documents."""
    window = layout.effective_window(params.window)
    if layout.one_document_per_row and window is None:  # SDPA has faster kernels for that
        return sdpa(query_BTHD, key_BTKD, value_BTKD, layout, params)
    q, k, v = (x.flatten(0, 1) for x in (query_BTHD, key_BTKD, value_BTKD))
    starts, longest = layout.cu_seqlens, layout.max_seqlen
    return varlen_attention(q, k, v, starts, starts, longest, longest, params.scale, window).view_as(query_BTHD)


def varlen_attention(
    query_THD: Tensor,
    key_CKD: Tensor,
    value_CKD: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    max_query: int,
    max_key: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """Sequences end to end (cu_seqlens of each side); the last query of a sequence sees its last key."""
    from torch.nn.attention.varlen import varlen_attn

    heads, kv_heads = query_THD.shape[1], key_CKD.shape[1]
    gqa = heads != kv_heads and "enable_gqa" in _VARLEN_PARAMETERS
    if heads != kv_heads and not gqa:
        key_CKD, value_CKD = (x.repeat_interleave(heads // kv_heads, 1) for x in (key_CKD, value_CKD))
    return varlen_attn(
        query_THD, key_CKD, value_CKD, query_starts, key_starts, max_query, max_key, scale=scale,
        window_size=(-1 if window is None else window - 1, 0), **({"enable_gqa": True} if gqa else {}),
    )  # fmt: skip


def _varlen_parameters() -> frozenset[str]:
    """Empty where torch has no varlen_attn (before 2.10); newer versions take more."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


_VARLEN_PARAMETERS = _varlen_parameters()


def flash_attention_2(
    query_BTHD: Tensor, key_BTKD: Tensor, value_BTKD: Tensor, layout: Layout, params: AttentionParams
) -> Tensor:
    """The flash-attn package."""
    from flash_attn import flash_attn_varlen_func

    q, k, v = (x.flatten(0, 1) for x in (query_BTHD, key_BTKD, value_BTKD))
    window = layout.effective_window(params.window)
    cu_seqlens, max_seqlen = layout.cu_seqlens, layout.max_seqlen
    out = flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
        dropout_p=params.dropout, softmax_scale=params.scale, causal=True,
        window_size=(-1 if window is None else window - 1, 0), softcap=params.softcap or 0.0,
    )  # fmt: skip
    return out.view_as(query_BTHD)


def flex(query_BTHD: Tensor, key_BTKD: Tensor, value_BTKD: Tensor, layout: Layout, params: AttentionParams) -> Tensor:
    """FlexAttention: torch compiles a kernel for what flash kernels do not support, such as logit soft-capping."""

    def softcap(score: Tensor, *_: Any) -> Tensor:
        return params.softcap * torch.tanh(score / params.softcap)

    q, k, v = (x.transpose(1, 2) for x in _repeat_kv(query_BTHD, key_BTKD, value_BTKD))
    kernel = flex_attention if q.device.type != "cuda" or torch.compiler.is_compiling() else _compiled_flex_attention()
    out = kernel(
        q, k, v,
        score_mod=softcap if params.softcap is not None else None,
        block_mask=layout.masks[layout.effective_window(params.window)],
        scale=params.scale,
    )  # fmt: skip
    return out.transpose(1, 2)


@cache
def _compiled_flex_attention() -> Any:
    return torch.compile(flex_attention, dynamic=False)


def _repeat_kv(query_BTHD: Tensor, key_BTKD: Tensor, value_BTKD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values repeated for the query heads that share them (GQA)."""
    group = query_BTHD.shape[2] // key_BTKD.shape[2]
    if group == 1:
        return query_BTHD, key_BTKD, value_BTKD
    return query_BTHD, key_BTKD.repeat_interleave(group, 2), value_BTKD.repeat_interleave(group, 2)


def _load(implementation: str) -> Any:
    module, _, function = implementation.partition(":")
    return getattr(import_module(module), function)


# Loaded once, at the end of this module, whose own functions are among them: torch.compile must not trace an import.
_IMPLEMENTATIONS: dict[str, Implementation] = {
    name: _load(backend.implementation) for name, backend in ATTENTION_BACKENDS.items() if not backend.fused_qkv
}
