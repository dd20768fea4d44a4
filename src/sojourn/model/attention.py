"""Attention that stays inside documents, by whichever kernel the machine has; every one computes the same.

Shapes: B rows, T tokens a row, H heads of queries and K of keys and values, D numbers a head. Registered with
transformers under `NAME`, so that any of its models uses it; the batch's `Layout` reaches it as the keyword `layout`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

from sojourn.machine.probe_software import importable
from sojourn.model.kernels import hopper
from sojourn.model.kernels.triton_support import compute_capability, supports_triton
from sojourn.model.layout import Layout, compute_cu_seqlens, make_layout, pad_cu_seqlens

NAME = "sojourn"


def _parameters_of_varlen() -> frozenset[str]:
    """None where torch has no such thing (before 2.10); what it takes has grown since."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


_VARLEN_TAKES = _parameters_of_varlen()


@dataclass(frozen=True)
class AttentionParams:
    """Beside the tensors: what the scores are multiplied by, and what some models do to them."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    dropout: float = 0.0


def register() -> str:
    """Makes `NAME` known to transformers. It has no mask function there, so models build no mask of their own."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _from_transformers)
    return NAME


def _from_transformers(
    module: Any, query_BHTD: Any, key_BKTD: Any, value_BKTD: Any, attention_mask: Any = None, **given: Any
) -> tuple[Any, None]:
    if given.get("layout") is None or given.get("s_aux") is not None or not getattr(module, "is_causal", True):
        raise NotImplementedError(f"{type(module).__name__}: its attention cannot be told about packed documents")
    how = AttentionParams(
        given.get("scaling") or query_BHTD.shape[-1] ** -0.5,
        given.get("sliding_window"),
        given.get("softcap"),
        given.get("dropout") or 0.0,
    )
    query_BTHD, key_BTKD, value_BTKD = (x.transpose(1, 2) for x in (query_BHTD, key_BKTD, value_BKTD))
    return attend(query_BTHD, key_BTKD, value_BTKD, given["layout"], how), None


def attend(query_BTHD: Any, key_BTKD: Any, value_BTKD: Any, layout: Layout, how: AttentionParams) -> Any:
    # Rotation in 32 bits may have widened queries and keys; values are as the run computes.
    query_BTHD, key_BTKD = query_BTHD.to(value_BTKD.dtype), key_BTKD.to(value_BTKD.dtype)
    return _BACKENDS[layout.backend](query_BTHD, key_BTKD, value_BTKD, layout, how)


def takes_hopper(x: Any, layout: Layout, how: AttentionParams) -> bool:
    """Whether the kernels of fast/hopper.py can attend: each row one document, and nothing out of the ordinary."""
    if not hopper.HopperKernels.attention or layout.backend not in ("varlen", "sdpa"):
        return False
    ordinary = how.softcap is None and not how.dropout and layout.effective_window(how.window) is None
    return x.dtype == torch.bfloat16 and layout.one_document_per_row and layout.length_buckets is None and ordinary


def _math(query_BTHD: Any, key_BTKD: Any, value_BTKD: Any, layout: Layout, how: AttentionParams) -> Any:
    """Whole scores, in 32 bits at least: slow, and what the others are compared with."""
    wide = torch.promote_types(query_BTHD.dtype, torch.float32)
    q, k, v = (x.transpose(1, 2).to(wide) for x in _as_many_heads(query_BTHD, key_BTKD, value_BTKD))
    with torch.autocast(q.device.type, enabled=False):
        scores = (q @ k.transpose(-1, -2)) * how.scale
        if how.softcap is not None:
            scores = how.softcap * torch.tanh(scores / how.softcap)
        shares = scores.masked_fill(~layout.masks[layout.effective_window(how.window)], float("-inf")).softmax(-1)
        return (F.dropout(shares, how.dropout) @ v).transpose(1, 2).to(query_BTHD.dtype)


def _sdpa(query_BTHD: Any, key_BTKD: Any, value_BTKD: Any, layout: Layout, how: AttentionParams) -> Any:
    """torch's own: flash or cuDNN where a row is one document, else its kernels that take a mask."""
    window, buckets = layout.effective_window(how.window), layout.length_buckets
    mask = None if layout.one_document_per_row and window is None else layout.masks[window]
    if buckets is None:
        return _torchs(query_BTHD, key_BTKD, value_BTKD, mask, how)
    parts = zip(buckets.split(query_BTHD), buckets.split(key_BTKD), buckets.split(value_BTKD), strict=True)
    corner = (lambda size: None) if mask is None else (lambda size: mask[..., :size, :size])
    return buckets.join([_torchs(q, k, v, corner(q.shape[1]), how) for q, k, v in parts])


def _torchs(query_BTHD: Any, key_BTKD: Any, value_BTKD: Any, mask: Any, how: AttentionParams) -> Any:
    q, k, v = (x.transpose(1, 2) for x in _as_many_heads(query_BTHD, key_BTKD, value_BTKD))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=how.dropout, is_causal=mask is None, scale=how.scale
    )
    return out.transpose(1, 2)


def _varlen(query_BTHD: Any, key_BTKD: Any, value_BTKD: Any, layout: Layout, how: AttentionParams) -> Any:
    """torch's flash attention over documents of any length, end to end: no mask, no score outside a document."""
    if layout.one_document_per_row and layout.effective_window(how.window) is None:  # there are faster kernels for that
        return _sdpa(query_BTHD, key_BTKD, value_BTKD, layout, how)
    from torch.nn.attention.varlen import varlen_attn

    qkv = (query_BTHD, key_BTKD, value_BTKD)
    grouped = key_BTKD.shape[2] != query_BTHD.shape[2] and "enable_gqa" in _VARLEN_TAKES
    q, k, v = (x.flatten(0, 1) for x in (qkv if grouped else _as_many_heads(*qkv)))
    window = layout.effective_window(how.window)
    back = -1 if window is None else window - 1
    extra: dict[str, Any] = {"enable_gqa": True} if grouped else {}
    cu_seqlens, max_seqlen = layout.cu_seqlens, layout.max_seqlen
    out = varlen_attn(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, scale=how.scale, window_size=(back, 0), **extra
    )
    return out.view_as(query_BTHD)


def _flash(query_BTHD: Any, key_BTKD: Any, value_BTKD: Any, layout: Layout, how: AttentionParams) -> Any:
    """The flash-attn package."""
    from flash_attn import flash_attn_varlen_func

    q, k, v = (x.flatten(0, 1) for x in (query_BTHD, key_BTKD, value_BTKD))
    window = layout.effective_window(how.window)
    cu_seqlens, max_seqlen = layout.cu_seqlens, layout.max_seqlen
    out = flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
        dropout_p=how.dropout, softmax_scale=how.scale, causal=True,
        window_size=(-1 if window is None else window - 1, 0), softcap=how.softcap or 0.0,
    )  # fmt: skip
    return out.view_as(query_BTHD)


def _flex(query_BTHD: Any, key_BTKD: Any, value_BTKD: Any, layout: Layout, how: AttentionParams) -> Any:
    """Scores as a small program that torch compiles: for what the flash kernels cannot do, such as soft caps."""

    def capped(score: Any, *_: Any) -> Any:
        return how.softcap * torch.tanh(score / how.softcap)

    q, k, v = (x.transpose(1, 2) for x in _as_many_heads(query_BTHD, key_BTKD, value_BTKD))
    kernel = flex_attention if q.device.type != "cuda" or torch.compiler.is_compiling() else _flex_kernel()
    out = kernel(
        q, k, v,
        score_mod=capped if how.softcap is not None else None,
        block_mask=layout.masks[layout.effective_window(how.window)],
        scale=how.scale,
    )  # fmt: skip
    return out.transpose(1, 2)


_BACKENDS: dict[str, Callable[[Any, Any, Any, Layout, AttentionParams], Any]] = {
    "math": _math,
    "sdpa": _sdpa,
    "varlen": _varlen,
    "flash_attention_2": _flash,
    "flex": _flex,
}


@cache
def _flex_kernel() -> Any:
    return torch.compile(flex_attention, dynamic=False)


def _as_many_heads(query_BTHD: Any, key_BTKD: Any, value_BTKD: Any) -> tuple[Any, Any, Any]:
    """Keys and values repeated for the queries that share them."""
    times = query_BTHD.shape[2] // key_BTKD.shape[2]
    if times == 1:
        return query_BTHD, key_BTKD, value_BTKD
    return query_BTHD, key_BTKD.repeat_interleave(times, 2), value_BTKD.repeat_interleave(times, 2)


def fault(backend: str, device: str, half: bool, head_size: int, softcap: bool, dropout: bool) -> str | None:
    """Why `backend` cannot be used here, or None."""
    flash = backend in ("varlen", "flash_attention_2")
    if flash and device != "cuda":
        return f"needs a CUDA GPU, but this run is on {device}"
    if backend == "flex" and device != "cuda":
        return f"has no backward on a {device.upper()}"
    if backend == "flex" and not supports_triton():
        return "needs triton and a GPU of compute capability 7.0 or newer"
    if flash and not half:
        return "needs bf16 or fp16, but this run is in fp32"
    if flash and (head_size > 256 or head_size % 8):
        return f"takes heads of up to 256 in steps of 8, but this model's have {head_size}"
    if flash and compute_capability() < (8, 0):
        return "needs a GPU of compute capability 8.0 (RTX 30, A100) or newer"
    if backend == "flash_attention_2" and not importable("flash_attn"):
        return "needs the package flash-attn, which is not installed"
    if backend == "varlen" and "window_size" not in _VARLEN_TAKES:
        return "needs a newer torch (2.11)"
    if softcap and backend in ("varlen", "sdpa"):
        return "cannot cap scores, as this model does"
    if dropout and backend in ("varlen", "flex"):
        return "has no dropout, which this model's attention has"
    return None


def choose(device: str, half: bool, head_size: int, softcap: bool, dropout: bool) -> str:
    """The fastest that should work here, and does when it is tried; math always does."""
    order = ("varlen", "flash_attention_2", "sdpa", "flex") if device == "cuda" else ("sdpa",)
    able = [name for name in order if fault(name, device, half, head_size, softcap, dropout) is None]
    return next((name for name in able if works(name, device, half, head_size)), "math")


def works(backend: str, device: str, half: bool, head_size: int) -> bool:
    """Tried on two short documents, forward and backward: a build may lack the kernel for just this card."""
    dtype = torch.float32 if not half else torch.bfloat16 if compute_capability() >= (8, 0) else torch.float16
    documents = np.array([[0] * 40 + [1] * 24], np.int32)
    starts = torch.from_numpy(pad_cu_seqlens(compute_cu_seqlens(documents))).to(device)
    layout = make_layout(backend, documents, torch.from_numpy(documents).to(device), starts, ())
    made = [torch.ones(1, 64, 2, head_size, dtype=dtype, device=device, requires_grad=True) for _ in range(3)]
    try:
        out = attend(made[0], made[1], made[2], layout, AttentionParams(1.0))
        out.sum().backward()
        return bool(torch.isfinite(out).all()) and made[0].grad is not None
    except Exception:  # whatever a missing kernel raises
        return False
