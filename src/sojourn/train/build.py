"""Builds the network to train: new or from a base model, with or without an adapter, and checks it."""

from __future__ import annotations

from typing import Any

import torch

from sojourn.config.schema import RunConfig
from sojourn.data.artefact import Artefact
from sojourn.errors import UserError
from sojourn.model.activation_checkpointing import apply_activation_checkpointing
from sojourn.model.adapter import disable_adapter_upcast, with_adapter
from sojourn.model.base import base_of, empty_base_model, load_base_model
from sojourn.model.kernels.cpu.smoke_test import enable_cpu_kernels
from sojourn.model.kernels.smoke_test import disable_hopper_kernels, smoke_test_hopper_kernels
from sojourn.model.layers import compile_layers
from sojourn.model.network import Network, restore_attention, wrap_model
from sojourn.model.parity_check import check_parity
from sojourn.model.prune_last_layer import prune_last_layer
from sojourn.model.scratch import build_model
from sojourn.model.weights import torch_dtype
from sojourn.train.batcher import Batcher


def build_network(config: RunConfig, artefact: Artefact, device: str) -> Network:
    """Trained weights are fp32, or as `train.master_weights` says; frozen ones have the compute dtype
    (`train.precision`)."""
    network = bare_network(config, artefact, device)
    if config.model.base is not None:
        network = _check_attention(network, config, device, packed=artefact.facts["packing"] != "off")
    save_memory(network, config)
    prepare_for_steps(network, config)
    return network


def bare_network(config: RunConfig, artefact: Artefact, device: str, empty: bool = False) -> Network:
    """Neither checked nor prepared for steps. `empty`: a base model's weights are allocated, but not loaded."""
    train = config.train
    if config.model.base is None:
        sizes = (artefact.vocab_size, artefact.max_length, artefact.pad_id, artefact.stop_ids)
        model = build_model(config.model, *sizes, train.seed).to(device)
    else:
        model = _load_base(config, artefact, device, empty)
    model.config.use_cache = False
    _check_router_loss(model, config)
    from sojourn.model.kernels.fused_forwards import apply_fused_forwards
    from sojourn.model.kernels.linear_layers import apply_nf4_linear

    if config.advanced.fused_forwards == "off":
        apply_nf4_linear(model)
        return wrap_model(model, train.attention)
    # Autocast instead: the range of fp16 is too small for the residual stream, and DoRA computes inside peft.
    casts_itself = train.precision == "bf16" and not config.method.dora
    network = wrap_model(model, train.attention, torch.bfloat16 if casts_itself else None)
    apply_fused_forwards(network.base_model)
    if train.device == "cpu" and train.compile != "on" and not train.router_aux_loss_coef:
        network = prune_last_layer(network)
    return network


def _check_router_loss(model: Any, config: RunConfig) -> None:
    if config.train.router_aux_loss_coef and not hasattr(model.config.get_text_config(), "router_aux_loss_coef"):
        family = model.config.model_type
        raise UserError(f"train.router_aux_loss_coef: transformers has no such loss for {family}; set it to 0")


def save_memory(network: Network, config: RunConfig) -> None:
    if config.train.activation_checkpointing != "off":
        apply_activation_checkpointing(
            network.base_model, str(config.train.activation_checkpointing), network.has_dropout
        )


def prepare_for_steps(network: Network, config: RunConfig) -> None:
    """Applies kernels, FP8 and torch.compile; sets training mode and the seed."""
    disable_hopper_kernels()
    if config.advanced.hopper_kernels == "on":
        smoke_test_hopper_kernels(network.base_model)
    if config.advanced.cpu_kernels == "on":
        enable_cpu_kernels(network.base_model)
    if config.train.fp8 != "off":
        from sojourn.model.kernels.fused_forwards import apply_fp8

        apply_fp8(network.base_model, config.train.fp8)
    if config.train.compile == "on":
        compile_layers(network.base_model)
    network.model.train()
    torch.manual_seed(config.train.seed)


def _load_base(config: RunConfig, artefact: Artefact, device: str, empty: bool) -> Any:
    """The base model; with an adapter for lora and qlora."""
    kind, frozen = config.method.kind, config.method.kind in ("lora", "qlora")
    in_compute_dtype = frozen or config.train.master_weights != "fp32"
    dtype = torch_dtype(str(config.train.precision)) if in_compute_dtype else torch.float32
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
    model = with_adapter(model, config.method, config.train.seed, empty)
    if config.train.precision != "fp32":
        disable_adapter_upcast(model)
    return model


def check(network: Network, config: RunConfig, device: str, packed: bool) -> None:
    batcher = Batcher(1, 1, 0, device, str(config.train.precision))
    fused_forwards = config.advanced.fused_forwards == "on"
    check_parity(network, device, batcher.autocast(), packed, fused_forwards)


def _check_attention(network: Network, config: RunConfig, device: str, packed: bool) -> Network:
    """The same network; one with transformers' attention if the model does not support ours and rows are not packed."""
    try:
        check(network, config, device, packed)
    except NotImplementedError:
        restore_attention(network)
        network = wrap_model(network.model, None, network.compute_dtype)
        check(network, config, device, packed)
    return network
