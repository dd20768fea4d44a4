"""The network on its engine, ready for steps."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from sojourn.config.schema import RunConfig
from sojourn.data.artefact import Artefact
from sojourn.errors import RunFailed, UserError
from sojourn.model.network import Network
from sojourn.train.build import bare_network, build_network, check, ready, save_memory
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
    optimizer = Optimizer(network.model, config.train, device)
    if kind == "ddp":
        from sojourn.train.distributed.ddp import Ddp

        return Ddp(network, optimizer, scaler, ranks)
    return Engine(network, optimizer, scaler, ranks)


def _fsdp(config: RunConfig, artefact: Artefact, ranks: Ranks, scaler: Any) -> Engine:
    """The first process reads an existing model's weights; each gets its shards as they pass by."""
    from sojourn.train.distributed.fsdp import Fsdp, local, refuse_unsupported, reshard, shard

    refuse_unsupported(config)
    by_first = config.model.base is not None and config.method.kind != "qlora"
    # A base in 4 bits is what it is only on its own device.
    where = "cpu" if by_first or config.model.base is None else ranks.device
    network = bare_network(config, artefact, where, empty=by_first and not ranks.is_main)
    _refuse_others(network, ranks)
    save_memory(network, config)
    root = shard(network, config, ranks, by_first)
    if config.model.base is not None:
        packed = artefact.facts["packing"] != "off"
        try:
            with torch.no_grad():
                root(lambda: check(network, config, ranks.device, packed))
        except NotImplementedError:
            raise UserError(
                "parallel.engine: this model attends in a way that parallel.engine=fsdp cannot use; use ddp"
            ) from None
        reshard(root)
    ready(network, config)
    optimizer = Optimizer(network.model, config.train, ranks.device, local)
    return Fsdp(root, network, optimizer, scaler, ranks)


def _refuse_others(network: Network, ranks: Ranks) -> None:
    """What travels must find a place of the same form everywhere."""
    forms = [(name, tuple(t.shape), str(t.dtype)) for name, t in network.model.named_parameters()]
    marks = ranks.all_gather(hashlib.sha256(repr(forms).encode()).hexdigest())
    if len(set(marks)) > 1:
        raise RunFailed(
            "the processes have opened different models; is model.base the same on all machines, and transformers too?"
        )
