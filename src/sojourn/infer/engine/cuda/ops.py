"""The operations of a step on CUDA: one token by matrix-vector kernels that activate and add, more by cuBLAS; attention
of single tokens over block tables, of prompts by torch's variable-length flash attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sojourn.errors import UserError
from sojourn.infer.engine.batch import StepBatch
from sojourn.infer.engine.block_pool import BLOCK
from sojourn.infer.engine.cuda import kernels
from sojourn.infer.engine.decoder import AttentionSpec
from sojourn.model.attention import varlen_attention
from sojourn.model.kernels import quantized_linear
from sojourn.model.kernels.quantized_linear import Quantized, quantize


class CudaOps:
    """`quantization`: of the matrices: None, fp8, int8 or nf4."""

    def __init__(self, quantization: str | None = None) -> None:
        if quantization == "fp8" and torch.cuda.get_device_capability() < (8, 9):
            raise UserError("--quantize fp8 needs a GPU of Ada's, Hopper's or a later generation; try: --quantize int8")
        self._quantization = quantization

    def pack(self, weight_OI: Tensor) -> Any:
        return weight_OI if self._quantization is None else quantize(weight_OI, self._quantization)

    def linear(self, x_TI: Tensor, packed: Any, bias_O: Tensor | None = None) -> Tensor:
        if isinstance(packed, Quantized):
            return quantized_linear.linear(x_TI, packed, bias_O)
        return kernels.matvec(x_TI, packed, bias_O) if len(x_TI) == 1 else F.linear(x_TI, packed, bias_O)

    def linear_add_(self, sum_TO: Tensor, x_TI: Tensor, packed: Any, bias_O: Tensor | None = None) -> None:
        if isinstance(packed, Quantized):
            quantized_linear.linear(x_TI, packed, bias_O, add_to=sum_TO)
        elif len(x_TI) == 1:
            kernels.matvec(x_TI, packed, bias_O, sum_TO)
        else:
            sum_TO.addmm_(x_TI, packed.T)
            if bias_O is not None:
                sum_TO += bias_O

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        return kernels.rms_norm(x_TD, weight_D, eps)

    def norm_linear(
        self, x_TD: Tensor, weight_D: Tensor, eps: float, packed: Any, bias_O: Tensor | None = None
    ) -> Tensor:
        return self.linear(self.rms_norm(x_TD, weight_D, eps), packed, bias_O)

    def gated_act(self, gate_up_TF: Tensor, activation: str) -> Tensor:
        return kernels.gated_act(gate_up_TF, activation)

    def norm_gated(self, x_TD: Tensor, weight_D: Tensor, eps: float, packed: Any, activation: str) -> Tensor:
        normed = self.rms_norm(x_TD, weight_D, eps)
        if len(x_TD) == 1 and not isinstance(packed, Quantized):
            return kernels.matvec(normed, packed, activation=activation)
        return self.gated_act(self.linear(normed, packed), activation)

    def new_cache(self, blocks: int, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(2, blocks * BLOCK, spec.kv_heads, spec.head_dim, dtype=dtype, device=device)

    def rope_store(self, qkv_TE: Tensor, cache: Tensor, batch: StepBatch, spec: AttentionSpec) -> Tensor:
        return kernels.rope_store(qkv_TE, cache, batch, spec)

    def attention(self, query_THD: Tensor, cache: Tensor, batch: StepBatch, spec: AttentionSpec) -> Tensor:
        count = batch.decodes
        parts = []
        if count:
            single = (batch.block_table_SB[:count], batch.context_S[:count])
            parts.append(kernels.decode_attention(query_THD[:count], cache, *single, spec))
        if batch.prompts is not None:
            prompts = batch.prompts
            key, value = cache[:, prompts.kv_slots_C]
            lengths = (prompts.query_starts, prompts.kv_starts, batch.max_query, batch.max_context)
            parts.append(varlen_attention(query_THD[count:], key, value, *lengths, spec.scale, spec.window))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)
