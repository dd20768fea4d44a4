"""Experts that a model's files hold in MXFP4 (gpt-oss): QLoRA keeps them so, instead of quantizing them a second time.

MXFP4 has FP4 values in blocks of 32 that share a power of two. That is what bitsandbytes' double quantization can hold,
too, with other tables: so the parameter is bitsandbytes', and the kernels of NF4 dequantize it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sojourn.model.experts import WEIGHTS, expert_modules
from sojourn.model.folder_check import weight_files
from sojourn.model.kernels.nf4 import MXFP4_BLOCK
from sojourn.model.safetensors_reader import SafetensorsFile

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # of a block's exponent
_ONE_SCALE = 1 << 40  # blocks that share the second scale, which is 1


def mxfp4_parameter(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> nn.Parameter:
    """`blocks` (E, out, in / 32, 16), the first of two values in a byte's lower half; `scales` (E, out, in / 32)."""
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Params4bit

    device, (experts, outputs, groups) = blocks.device, scales.shape
    code = torch.tensor([*_FP4, *(-value for value in _FP4)], device=device)
    powers = torch.exp2(torch.arange(256, device=device, dtype=torch.float32) - _BIAS)
    second = QuantState(absmax=torch.ones(1, device=device), code=powers, blocksize=_ONE_SCALE, dtype=torch.float32)
    state = QuantState(
        absmax=scales.reshape(-1).contiguous(), shape=torch.Size((experts, outputs, groups * MXFP4_BLOCK)), code=code,
        blocksize=MXFP4_BLOCK, quant_type="mxfp4", dtype=dtype, offset=torch.zeros((), device=device), state2=second,
    )  # fmt: skip
    packed = ((blocks << 4) | (blocks >> 4)).reshape(-1, 1)
    parameter: nn.Parameter = Params4bit(
        packed, quant_state=state, blocksize=MXFP4_BLOCK, quant_type="mxfp4", bnb_quantized=True
    )
    return parameter


def load_mxfp4_experts(model: nn.Module, folder: Path, dtype: torch.dtype, device: str) -> set[str]:
    """Reads the experts from a model's files, one projection of a layer at a time. Returns the parameters' names."""
    files = {name: file for file in map(SafetensorsFile, weight_files(folder)[0]) for name in file.entries}
    loaded = set()
    for module, experts in expert_modules(model):
        for weight in WEIGHTS:
            name = f"{module}.{weight}"
            parts = [f"{name}_blocks", f"{name}_scales"]
            if all(part in files for part in parts):
                blocks, scales = (files[part].load(part).to(device) for part in parts)
                setattr(experts, weight, mxfp4_parameter(blocks, scales, dtype))
                loaded.add(name)
    return loaded


def config_without_quantization(config: Any) -> Any:
    """transformers would dequantize the experts, or refuse to quantize the linear layers."""
    del config.quantization_config
    return config
