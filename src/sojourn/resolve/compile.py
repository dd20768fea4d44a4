"""Whether layers are compiled with torch.compile."""

from __future__ import annotations

from sojourn.catalog.models import ModelSpec
from sojourn.config.schema import RunConfig
from sojourn.resolve.device_spec import DeviceSpec

_FLOPS_PER_SECOND = 2e14  # that a good card reaches
_WORTH_SECONDS = 120.0  # of training, from which on compiling for about a minute pays


def choose_compile(config: RunConfig, model: ModelSpec, device: DeviceSpec) -> tuple[str, str]:
    train, length = config.train, config.data.max_length
    if device.device_type != "cuda":
        return "off", "compiling is for GPUs"
    if not device.has_triton:
        return "off", "triton is not installed, or does not support so old a GPU"
    if model.experts is not None and (config.method.kind in ("lora", "qlora") or train.router_aux_loss_coef):
        return "off", "experts have kernels of their own, and router logits are read out of layers"
    tokens = train.steps * train.global_batch * length if train.steps else int(train.tokens or 0)
    if tokens and model.flops_per_token(length) * tokens / _FLOPS_PER_SECOND < _WORTH_SECONDS:
        return "off", "compiling costs more time than it saves on so short a run"
    return "on", "layers are compiled once and run faster from then on"
