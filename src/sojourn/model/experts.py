"""The experts of mixture-of-experts models, which transformers holds as one (E, out, in) parameter per projection.

bitsandbytes quantizes linear layers only. Here experts are quantized, too, while the model is loaded: one projection of
one layer at a time, expert by expert, in bitsandbytes' own format. Frozen experts then compute by kernels/experts.py.
Adapters on experts are peft's (`target_parameters`); peft itself would compute whole weights from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from sojourn.model.kernels import experts as kernels
from sojourn.model.layers import swap_forward

WEIGHTS = ("gate_up_proj", "down_proj")
_SILU = ("SiLU", "SiLUActivation")  # of torch; transformers' own
_BLOCK_SIZE = 64  # weights with one scale, as bitsandbytes' default


def is_experts(module: nn.Module) -> bool:
    """Whether this module holds a layer's experts, in a form that we compute."""
    known = getattr(module, "has_gate", False) and not getattr(module, "has_post_expert_norm", False)
    return known and all(name in module._parameters for name in WEIGHTS)


def expert_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if is_experts(module)]


def quantize_expert_weight(slices: Iterable[Tensor], shape: tuple[int, ...], double_quant: bool) -> nn.Parameter:
    """A parameter of bitsandbytes with NF4 weights of `shape`, from consecutive parts of it, such as one expert each.

    The same as quantizing the whole tensor at once.
    """
    from bitsandbytes.functional import QuantState, get_4bit_type, quantize_4bit, quantize_blockwise
    from bitsandbytes.nn import Params4bit

    parts = [quantize_4bit(part.contiguous(), blocksize=_BLOCK_SIZE, quant_type="nf4") for part in slices]
    dtype, device = parts[0][1].dtype, parts[0][0].device
    packed, absmax = torch.cat([one for one, _ in parts]), torch.cat([state.absmax for _, state in parts])
    offset = state2 = None
    if double_quant:
        offset = absmax.mean()
        absmax, state2 = quantize_blockwise(absmax - offset, blocksize=256)
    state = QuantState(
        absmax=absmax, shape=torch.Size(shape), code=get_4bit_type("nf4", device=device), blocksize=_BLOCK_SIZE,
        quant_type="nf4", dtype=dtype, offset=offset, state2=state2,
    )  # fmt: skip
    parameter: nn.Parameter = Params4bit(
        packed, quant_state=state, blocksize=_BLOCK_SIZE, compress_statistics=double_quant, quant_type="nf4",
        bnb_quantized=True,
    )  # fmt: skip
    return parameter


def _expert_slices(weight_EOI: Tensor) -> Iterable[Tensor]:
    """Experts one by one, where blocks do not cross them."""
    return weight_EOI.unbind() if weight_EOI[0].numel() % _BLOCK_SIZE == 0 else [weight_EOI]


@contextmanager
def quantize_experts_on_load(leave_out: bool = False) -> Iterator[None]:
    """Within it, transformers' NF4 quantizer quantizes experts as well as linear layers; or leaves them empty."""
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    key = "bitsandbytes_4bit"
    original = AUTO_QUANTIZER_MAPPING[key]
    AUTO_QUANTIZER_MAPPING[key] = _quantizer_class(original, leave_out)
    try:
        yield
    finally:
        AUTO_QUANTIZER_MAPPING[key] = original


@cache
def _quantizer_class(original: Any, leave_out: bool) -> Any:
    from transformers.integrations.bitsandbytes import Bnb4bitQuantize

    class ExpertQuantizer(original):  # type: ignore[misc]
        def _process_model_before_weight_loading(self, model: Any, *args: Any, **kwargs: Any) -> None:
            super()._process_model_before_weight_loading(model, *args, **kwargs)
            for _, module in expert_modules(model) if leave_out else ():
                for name in WEIGHTS:
                    module._parameters[name] = nn.Parameter(torch.empty(0, device="meta"))

        def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
            module, _, name = param_name.rpartition(".")
            is_weight = name in WEIGHTS and is_experts(model.get_submodule(module))
            return is_weight or bool(super().param_needs_quantization(model, param_name, **kwargs))

        def get_quantize_ops(self) -> Any:
            return ExpertQuantize(self)

    class ExpertQuantize(Bnb4bitQuantize):  # type: ignore[misc]
        def convert(self, input_dict: dict[str, Any], model: Any = None, **kwargs: Any) -> dict[str, Any]:
            (name, value), *_ = input_dict.items()
            if not is_experts(model.get_submodule(name.rpartition(".")[0])):
                found: dict[str, Any] = super().convert(input_dict, model=model, **kwargs)
                return found
            weight = value[0] if isinstance(value, list) else value
            double_quant = self.hf_quantizer.quantization_config.bnb_4bit_use_double_quant
            return {name: quantize_expert_weight(_expert_slices(weight), tuple(weight.shape), double_quant)}

    return ExpertQuantizer


@contextmanager
def unpacked_shapes(model: nn.Module) -> Iterator[None]:
    """Within it, NF4 experts have parameters of their true shape and without memory, which peft reads for adapters."""
    packed = [(m, n, m._parameters[n]) for _, m in expert_modules(model) for n in WEIGHTS if is_packed(m, n)]
    for module, name, weight in packed:
        state: Any = getattr(weight, "quant_state", None)
        shape = state.shape if not _is_mxfp4(weight) else (state.shape[0], state.shape[2], state.shape[1])
        empty = torch.empty((), dtype=state.dtype, device=state.absmax.device).expand(shape)
        module._parameters[name] = nn.Parameter(empty, requires_grad=False)
    try:
        yield
    finally:
        for module, name, weight in packed:
            module._parameters[name] = weight


def _is_mxfp4(weight: Any) -> bool:
    """Then it is (E, out, in), also in experts whose weights are (E, in, out)."""
    state = getattr(weight, "quant_state", None)
    return state is not None and bool(state.quant_type == "mxfp4")


def is_packed(experts: nn.Module, name: str) -> bool:
    return getattr(experts._parameters[name], "quant_state", None) is not None


def apply_expert_forwards(model: nn.Module) -> None:
    """Experts, and peft's adapters on them, compute by our kernels from now on. For frozen experts."""
    for module in model.modules():
        forward: Any = _experts_forward if is_experts(module) else _adapter_forward
        wraps_experts = hasattr(module, "parameter_name") and is_experts(_innermost(module))
        if (is_experts(module) or wraps_experts) and type(module).forward is not forward:
            swap_forward(module, forward)


def _innermost(module: nn.Module) -> nn.Module:
    """What peft's wrappers wrap: one per parameter, around each other."""
    while hasattr(module, "base_layer"):
        module = module.base_layer
    return module


def _experts_forward(
    self: Any,
    hidden_TD: Tensor,
    experts_Tk: Tensor,
    weights_Tk: Tensor,
    lora: dict[str, kernels.ExpertLora] | None = None,
) -> Tensor:
    lora, device_type = lora or {}, hidden_TD.device.type
    autocast = torch.is_autocast_enabled(device_type)
    x_TD = hidden_TD.to(torch.get_autocast_dtype(device_type)) if autocast else hidden_TD
    route = kernels.sort_by_expert(experts_Tk, weights_Tk, self.num_experts)
    where = (route.tokens_S, route.rows_S)
    transposed = self.is_transposed and not _is_mxfp4(self.gate_up_proj)
    x_SD = kernels.dispatch(x_TD, *where)
    gate_up_SF = kernels.experts_linear(x_SD, route.offsets_E, self.gate_up_proj, transposed, lora.get("gate_up_proj"))
    if self.has_bias:
        gate_up_SF = gate_up_SF + self.gate_up_proj_bias.to(x_SD.dtype)[route.experts_S]
    x_SF = _weighted_gate(self, gate_up_SF, route.weights_S)
    # Before the down projection: what follows that saves nothing for the backward, so nothing of it is recomputed.
    bias_TD = _down_bias(self, experts_Tk, weights_Tk, x_TD.dtype) if self.has_bias else None
    y_SD = kernels.experts_linear(x_SF, route.offsets_E, self.down_proj, transposed, lora.get("down_proj"))
    y_TD = kernels.combine(y_SD, *where, len(x_TD))
    return (y_TD if bias_TD is None else y_TD + bias_TD).to(hidden_TD.dtype)


def _weighted_gate(self: Any, gate_up_SF: Tensor, weights_S: Tensor) -> Tensor:
    if type(getattr(self, "act_fn", None)).__name__ in _SILU and self.is_concatenated:
        return kernels.weighted_swiglu(gate_up_SF, weights_S)
    if hasattr(self, "limit") and not self.is_concatenated:
        return kernels.weighted_clamped_swiglu(gate_up_SF, weights_S, self.alpha, self.limit)
    return (self._apply_gate(gate_up_SF) * weights_S[:, None]).to(gate_up_SF.dtype)


def _down_bias(self: Any, experts_Tk: Tensor, weights_Tk: Tensor, dtype: torch.dtype) -> Tensor:
    weights_TE = weights_Tk.new_zeros(len(weights_Tk), self.num_experts).scatter(1, experts_Tk, weights_Tk)
    return weights_TE.to(dtype) @ self.down_proj_bias.to(dtype)


def _adapter_forward(self: Any, hidden_TD: Tensor, experts_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
    lora, module = {}, self
    while hasattr(module, "base_layer"):
        if not module.disable_adapters:
            lora[module.parameter_name] = _expert_lora(module, module.active_adapters[0])
        module = module.base_layer
    out_TD: Tensor = module(hidden_TD, experts_Tk, weights_Tk, lora)
    return out_TD


def _expert_lora(wrapper: Any, adapter: str) -> kernels.ExpertLora:
    a, b = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
    experts = wrapper.num_experts
    a_ERI, b_EOR = a.view(experts, -1, a.shape[1]), b.view(len(b), -1, experts).permute(2, 0, 1)
    # Before version 0.19 peft takes every expert's weight for (in, out): then A is on the side of the outputs.
    if not (_innermost(wrapper).is_transposed or getattr(wrapper, "_did_swap_in_out_features", False)):
        a_ERI, b_EOR = b_EOR.transpose(1, 2), a_ERI.transpose(1, 2)
    return kernels.ExpertLora(a_ERI, b_EOR, wrapper.scaling[adapter])
