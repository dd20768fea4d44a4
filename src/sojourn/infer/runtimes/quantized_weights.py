"""Models that are quantized in memory: whether they run here, and their weights, dequantized one by one, for comparison
with their source."""

from __future__ import annotations

import json
from copy import copy
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

_PACKAGES = {"torchao": "torchao", "bitsandbytes": "bitsandbytes", "compressed-tensors": "compressed_tensors"}
_NEED_CUDA = ("Int4WeightOnlyConfig", "Float8DynamicActivation")  # of torchao

if TYPE_CHECKING:
    from collections.abc import Iterator


def why_not_here(config: dict[str, Any]) -> str:
    """Empty, or what a model with this config.json needs."""
    found = config.get("quantization_config")
    method = found.get("quant_method") if isinstance(found, dict) else None
    package = _PACKAGES.get(str(method))
    if package is None or not isinstance(found, dict):
        return ""
    if find_spec(package) is None:
        return f"its weights need the package {package.replace('_', '-')}"
    import torch

    if any(f'"{name}' in json.dumps(found) for name in _NEED_CUDA) and not torch.cuda.is_available():
        return "its weights are in a form that needs a CUDA GPU"
    return ""


def dequantized(model: Any) -> Iterator[tuple[str, Any]] | None:
    """None where a weight is in a form that is not known here."""
    found = list(model.named_parameters())
    return ((name, _plain(one)) for name, one in found) if all(_is_known(one) for _, one in found) else None


def _is_known(tensor: Any) -> bool:
    return tensor.is_floating_point() or hasattr(tensor, "dequantize") or hasattr(tensor, "quant_state")


def dequantize_4bit(tensor: Any) -> Any:
    """A weight that bitsandbytes quantized, in fp32."""
    from bitsandbytes import functional

    data, state = tensor.data, copy(tensor.quant_state)
    if getattr(state, "packing_format_for_cpu", False):  # after a forward on some CPUs
        data, state = functional._convert_weight_packed_for_cpu_inverse(data, state)
    import torch

    state.dtype = torch.float32
    return functional.dequantize_4bit(data, state)


def _plain(tensor: Any) -> Any:
    if getattr(tensor, "quant_state", None) is not None:
        return dequantize_4bit(tensor).cpu()
    if not type(tensor.data).__module__.startswith("torchao"):
        return tensor.detach().float().cpu()
    try:
        return tensor.dequantize().float().cpu()
    except NotImplementedError:  # int4: its matmul dequantizes
        import torch

        unit = torch.eye(tensor.shape[1], dtype=tensor.dtype, device=tensor.device)
        return torch.nn.functional.linear(unit, tensor).T.float().cpu()
