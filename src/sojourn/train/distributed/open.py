"""Opens the model on the engine that `parallel.engine` names."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from sojourn.config.schema import RunConfig
from sojourn.data.artefact import Artefact
from sojourn.errors import RunFailed, UserError
from sojourn.model.kernels.cpu.smoke_test import has_cpu_kernels
from sojourn.model.network import Network
from sojourn.train.build import bare_network, build_network, check, prepare_for_steps, save_memory
from sojourn.train.distributed.engine import Engine
from sojourn.train.optim.optimizers import Optimizer
from sojourn.train.ranks import Ranks


def open_engine(config: RunConfig, artefact: Artefact, ranks: Ranks) -> Engine:
    kind, device = config.parallel.engine, ranks.device
    scaler = torch.amp.GradScaler(device, enabled=config.train.precision == "fp16" and kind != "deepspeed")
    if kind == "fsdp":
        return _fsdp(config, artefact, ranks, scaler)
    network = build_network(config, artefact, device)
    if kind == "deepspeed":
        from sojourn.train.distributed.deepspeed import open_deepspeed

        return open_deepspeed(config, network, scaler, ranks)
    ratio, kernels = config.method.loraplus_lr_ratio, has_cpu_kernels(network.base_model)
    optimizer = Optimizer(network.model, config.train, device, lora_b_ratio=ratio, cpu_kernels=kernels)
    if kind == "ddp":
        from sojourn.train.distributed.ddp import Ddp

        return Ddp(network, optimizer, scaler, ranks)
    if config.train.optimizer_in_backward == "on":
        from sojourn.train.distributed.in_backward import InBackward

        return InBackward(network, optimizer, scaler, ranks)
    return Engine(network, optimizer, scaler, ranks)


def _fsdp(config: RunConfig, artefact: Artefact, ranks: Ranks, scaler: Any) -> Engine:
    """Rank 0 reads an existing model's weights and broadcasts them layer by layer; each rank keeps its shards."""
    from sojourn.train.distributed.fsdp import Fsdp, local_shard, refuse_unsupported, reshard, shard

    refuse_unsupported(config)
    from_rank_0 = config.model.base is not None and config.method.kind != "qlora"
    # NF4 weights are quantized on their own device.
    device = "cpu" if from_rank_0 or config.model.base is None else ranks.device
    network = bare_network(config, artefact, device, empty=from_rank_0 and not ranks.is_main)
    _refuse_different_models(network, ranks)
    save_memory(network, config)
    root = shard(network, config, ranks, from_rank_0)
    if config.model.base is not None:
        packed = artefact.facts["packing"] != "off"
        try:
            with torch.no_grad():
                root(lambda: check(network, config, ranks.device, packed))
        except NotImplementedError:
            raise UserError(
                "parallel.engine: this model's attention does not work with parallel.engine=fsdp; use ddp"
            ) from None
        reshard(root)
    prepare_for_steps(network, config)
    ratio = config.method.loraplus_lr_ratio
    optimizer = Optimizer(network.model, config.train, ranks.device, local_shard, ratio)
    return Fsdp(root, network, optimizer, scaler, ranks)


def _refuse_different_models(network: Network, ranks: Ranks) -> None:
    """A broadcast needs tensors of the same shape and dtype on all ranks."""
    shapes = [(name, tuple(t.shape), str(t.dtype)) for name, t in network.model.named_parameters()]
    hashes = ranks.all_gather(hashlib.sha256(repr(shapes).encode()).hexdigest())
    if len(set(hashes)) > 1:
        raise RunFailed(
            "the ranks have opened different models; use the same model.base and the same transformers on all nodes"
        )
