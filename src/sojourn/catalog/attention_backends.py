"""The attention backends and what each supports.

`resolve/attention.py` chooses among them, `model/attention.py` implements them, `estimate/` has their memory and time.
"""

from dataclasses import dataclass

ALL_DEVICES = ("cuda", "mps", "cpu")
HALF = ("bf16", "fp16")
ALL_DTYPES = (*HALF, "fp32")


@dataclass(frozen=True)
class AttentionBackend:
    """One implementation of attention over packed documents.

    varlen           takes documents end to end by their `cu_seqlens`; the others mask scores between documents
    dense_mask       computes the scores that the mask then hides
    native_gqa       takes fewer key/value heads than query heads as they are; the others repeat them
    softcap          logit soft-capping, as Gemma 2 has it
    dropout          dropout of attention weights
    max_head_dim, head_dim_multiple
                     the head sizes that the kernels are built for
    min_capability   the oldest CUDA compute capability
    min_torch        the oldest torch
    package          the module that must be importable
    """

    name: str
    devices: tuple[str, ...] = ("cuda",)
    dtypes: tuple[str, ...] = ALL_DTYPES
    varlen: bool = False
    dense_mask: bool = False
    sliding_window: bool = True
    native_gqa: bool = False
    softcap: bool = False
    dropout: bool = False
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    min_capability: tuple[int, int] | None = None
    min_torch: tuple[int, int] | None = None
    package: str | None = None


# In order of preference: `auto` takes the first that model, precision and device allow. `math` always works.
_BACKENDS = (
    AttentionBackend(
        "varlen", dtypes=HALF, varlen=True, max_head_dim=256, head_dim_multiple=8, min_capability=(8, 0),
        min_torch=(2, 11),
    ),
    AttentionBackend(
        "flash_attention_2", dtypes=HALF, varlen=True, native_gqa=True, softcap=True, dropout=True, max_head_dim=256,
        head_dim_multiple=8, min_capability=(8, 0), package="flash_attn",
    ),
    AttentionBackend("sdpa", devices=ALL_DEVICES, dense_mask=True, dropout=True),
    AttentionBackend("flex", softcap=True, min_capability=(7, 0), package="triton"),
    AttentionBackend("math", devices=ALL_DEVICES, dense_mask=True, softcap=True, dropout=True),
)  # fmt: skip
ATTENTION_BACKENDS = {backend.name: backend for backend in _BACKENDS}
