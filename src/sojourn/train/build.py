"""The network to train: new or opened, with or without an adapter, in the right numbers, checked, ready for steps."""

from __future__ import annotations

from typing import Any

import torch

from sojourn.config.schema import RunConfig
from sojourn.data.artefact import Artefact
from sojourn.errors import UserError
from sojourn.model.activation_checkpointing import apply_activation_checkpointing
from sojourn.model.adapter import add_adapter, disable_adapter_upcast, empty_adapter, load_adapter
from sojourn.model.base import empty_base_model, load_base_model
from sojourn.model.kernels.smoke_test import disable_hopper_kernels, smoke_test_hopper_kernels
from sojourn.model.layers import compile_layers
from sojourn.model.network import Network, restore_attention, wrap_model
from sojourn.model.parity_check import check_parity
from sojourn.model.prune_last_layer import prune_last_layer
from sojourn.model.scratch import build_model
from sojourn.train.batcher import Batcher
from sojourn.train.model_spec import base_of

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def build_network(config: RunConfig, artefact: Artefact, device: str) -> Network:
    """Weights that are trained are kept in 32 bits; frozen ones in the numbers that the run computes in."""
    network = bare_network(config, artefact, device)
    if config.model.base is not None:
        network = _checked(network, config, device, packed=artefact.facts["packing"] != "off")
    save_memory(network, config)
    ready(network, config)
    return network


def bare_network(config: RunConfig, artefact: Artefact, device: str, empty: bool = False) -> Network:
    """Opened, but neither tried nor made ready for steps; `empty`: with room for an existing model's weights only."""
    train = config.train
    if config.model.base is None:
        sizes = (artefact.vocab_size, artefact.max_length, artefact.pad_id, artefact.stop_ids)
        model = build_model(config.model, *sizes, train.seed).to(device)
    else:
        model = _opened(config, artefact, device, empty)
    model.config.use_cache = False
    if config.advanced.fused_forwards == "off":
        return wrap_model(model, train.attention)
    from sojourn.model.kernels.fused_forwards import apply_fused_forwards

    # fp16 has too small a range for what blocks hand on, and DoRA is peft's own arithmetic: autocast knows both.
    by_itself = train.precision == "bf16" and not config.method.dora
    network = wrap_model(model, train.attention, torch.bfloat16 if by_itself else None)
    apply_fused_forwards(network.base_model)
    if train.device == "cpu" and train.compile != "on":
        network = prune_last_layer(network)
    return network


def save_memory(network: Network, config: RunConfig) -> None:
    if config.train.activation_checkpointing != "off":
        apply_activation_checkpointing(
            network.base_model, str(config.train.activation_checkpointing), network.has_dropout
        )


def ready(network: Network, config: RunConfig) -> None:
    """For steps."""
    disable_hopper_kernels()
    if config.advanced.hopper_kernels == "on":
        smoke_test_hopper_kernels(network.base_model)
    if config.train.fp8 != "off":
        from sojourn.model.kernels.fused_forwards import apply_fp8

        apply_fp8(network.base_model, config.train.fp8)
    if config.train.compile == "on":
        compile_layers(network.base_model)
    network.model.train()
    torch.manual_seed(config.train.seed)


def _opened(config: RunConfig, artefact: Artefact, device: str, empty: bool) -> Any:
    """An existing model, and on it what the method trains."""
    kind, frozen = config.method.kind, config.method.kind in ("lora", "qlora")
    dtype = DTYPES[str(config.train.precision)] if frozen else torch.float32
    model = empty_base_model(base_of(config), dtype) if empty else load_base_model(base_of(config), dtype, device)
    rows = model.get_input_embeddings().weight.shape[0]
    if artefact.vocab_size > rows:
        if frozen:
            raise UserError(
                f"data.tokenizer: {artefact.vocab_size} tokens, but model.base has only {rows}; use its own tokenizer "
                f"(data.tokenizer=auto), or train all weights: method.kind=full, not {kind}"
            )
        model.resize_token_embeddings(artefact.vocab_size, mean_resizing=not empty)
    if not frozen:
        if getattr(model, "quantization_method", None) is not None:
            raise UserError(f"method.kind: {kind} trains all weights, but those of model.base are quantised; use qlora")
        return model.requires_grad_(True)
    model.requires_grad_(False)
    if config.method.adapter is not None:
        model = (empty_adapter if empty else load_adapter)(model, config.method.adapter, trainable=True)
    else:
        model = add_adapter(model, config.method, config.train.seed)
    for parameter in model.parameters():
        if parameter.requires_grad:  # peft leaves modules_to_save as narrow as the base
            parameter.data = parameter.data.float()
    if config.train.precision != "fp32":
        disable_adapter_upcast(model)
    return model


def check(network: Network, config: RunConfig, device: str, packed: bool) -> None:
    batcher = Batcher(1, 1, 0, device, str(config.train.precision))
    check_parity(network, device, batcher.autocast(), packed)


def _checked(network: Network, config: RunConfig, device: str, packed: bool) -> Network:
    """The same network, or one with the model's own attention where it cannot take ours and need not."""
    try:
        check(network, config, device, packed)
    except NotImplementedError:
        restore_attention(network)
        network = wrap_model(network.model, None, network.compute_dtype)
        check(network, config, device, packed)
    return network
