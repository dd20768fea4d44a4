"""The attention backends: what each supports, and the function that implements it.

`resolve/attention.py` decides `train.attention=auto` from these records, `model/layout.py` builds the masks that they
name, `model/attention.py` calls their implementations, `estimate/` has their memory and time. No torch here.

To add a backend: write a function `(query_BTHD, key_BTKD, value_BTKD, layout, params) -> out_BTHD` in any importable
module (those of model/attention.py are examples; import torch and its package inside the function if you write it in
this file) and add its record here, above the backends that are slower.
- The order is `auto`'s preference: a backend put first becomes `auto`'s choice wherever it is supported, and one below
  `math`, which supports everything, never does.
- `train.attention` takes its name; docs/training.md lists the names in the same order, which tests/test_readme.py
  checks.
- tests/test_attention.py compares it with a dense reference in fp64.
- Without `varlen=True`, `train.cuda_graphs=auto` captures no CUDA graph, and `on` captures none of packed rows.
"""

from dataclasses import dataclass
from typing import Literal

ALL_DEVICES = ("cuda", "mps", "cpu")
HALF = ("bf16", "fp16")
ALL_DTYPES = (*HALF, "fp32")


# Tokens from which on SDPA's kernels for one document do without repeated keys and values; these are faster before.
LONG_ROW = 32768


@dataclass(frozen=True)
class AttentionBackend:
    """One implementation of causal attention.

    implementation   "module:function"
    packed           supports rows of several documents
    varlen           takes documents end to end by their `cu_seqlens`; the others mask scores between documents
    mask             what it reads from `Layout.masks`: dense masks (it computes the scores that they then hide),
                     FlexAttention's block masks, or nothing: then it reads `layout.cu_seqlens` (varlen) or
                     `layout.documents_BT`
    causal           for rows of one document and no sliding window it reads neither masks nor `documents_BT` nor
                     `cu_seqlens`, so that a CUDA graph can be replayed for other documents
    sliding_window   attends to the last `params.window` tokens only
    saves_scores     computes all scores in fp32 and saves them for the backward; `estimate/` counts them
    native_gqa       takes fewer key/value heads than query heads as they are; the others repeat them
    long_row_gqa     does so on CUDA, for rows of one document of LONG_ROW tokens or more
    length_buckets   reads `layout.length_buckets`: batches without padding, sorted by document length
    replaced_by      the settings of `advanced` whose kernels compute attention in its place, where they can
    softcap          logit soft-capping, as Gemma 2 has it
    dropout          dropout of attention weights
    max_head_dim, head_dim_multiple
                     the head sizes that the kernels are built for
    min_capability   the oldest CUDA compute capability; asked of CUDA devices only
    min_torch        the oldest torch
    package          the module that must be importable
    fused_qkv        its implementation also computes q, k, v and RoPE: it is called by the fused forwards instead of
                     `train.attention`'s backend, and has its own signature
    """

    name: str
    implementation: str
    devices: tuple[str, ...] = ("cuda",)
    dtypes: tuple[str, ...] = ALL_DTYPES
    packed: bool = True
    varlen: bool = False
    mask: Literal["dense", "block"] | None = None
    causal: bool = False
    saves_scores: bool = False
    sliding_window: bool = True
    native_gqa: bool = False
    long_row_gqa: bool = False
    length_buckets: bool = False
    replaced_by: tuple[Literal["hopper_kernels", "cpu_kernels"], ...] = ()
    softcap: bool = False
    dropout: bool = False
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    min_capability: tuple[int, int] | None = None
    min_torch: tuple[int, int] | None = None
    package: str | None = None
    fused_qkv: bool = False


# In order of preference: `auto` takes the first that model, precision and device allow. `math` always works, and
# resolve/attention.py falls back to it by name.
_BACKENDS = (
    AttentionBackend(
        "varlen", "sojourn.model.attention:varlen", dtypes=HALF, varlen=True, causal=True, long_row_gqa=True,
        replaced_by=("hopper_kernels",), max_head_dim=256, head_dim_multiple=8, min_capability=(8, 0),
        min_torch=(2, 11),
    ),
    AttentionBackend(
        "flash_attention_2", "sojourn.model.attention:flash_attention_2", dtypes=HALF, varlen=True,
        native_gqa=True, softcap=True, dropout=True, max_head_dim=256, head_dim_multiple=8, min_capability=(8, 0),
        package="flash_attn",
    ),
    AttentionBackend(
        "sdpa", "sojourn.model.attention:sdpa", devices=ALL_DEVICES, mask="dense", causal=True, long_row_gqa=True,
        length_buckets=True, replaced_by=("hopper_kernels", "cpu_kernels"), dropout=True,
    ),
    AttentionBackend(
        "flex", "sojourn.model.attention:flex", mask="block", softcap=True, min_capability=(7, 0), package="triton"
    ),
    AttentionBackend(
        "math", "sojourn.model.attention:math", devices=ALL_DEVICES, mask="dense", saves_scores=True, softcap=True,
        dropout=True,
    ),
    # Enabled by advanced.hopper_kernels, after its smoke test (model/kernels/hopper.py).
    AttentionBackend(
        "flash_attention_4", "sojourn.model.kernels.hopper:qkv_rope_attention", dtypes=("bf16",), packed=False,
        causal=True, sliding_window=False, native_gqa=True, min_capability=(9, 0), package="flash_attn.cute",
        fused_qkv=True,
    ),
)  # fmt: skip
ATTENTION_BACKENDS = {backend.name: backend for backend in _BACKENDS}
