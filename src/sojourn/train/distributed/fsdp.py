"""Fully sharded data parallel: torch's `fully_shard` (FSDP2) on every decoder layer and on the root module.

Weights, gradients and optimizer states are sharded over the ranks; a layer's weights are gathered when it runs. The
optimizer updates this rank's shards as plain tensors, so its arithmetic and the names of its state are those of a
single rank. Gathered checkpoints are the same as well. Rank 0 gathers one tensor at a time into host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from sojourn.config.schema import RunConfig
from sojourn.errors import UserError
from sojourn.model.layers import decoder_layers
from sojourn.model.network import Network
from sojourn.model.weights import check_state_dict, trainable_state_dict
from sojourn.train.distributed.engine import Engine
from sojourn.train.distributed.root_module import RootModule
from sojourn.train.optim.optimizers import Optimizer
from sojourn.train.ranks import Ranks

T = TypeVar("T")


def shard(network: Network, config: RunConfig, ranks: Ranks, from_rank_0: bool) -> RootModule:
    """Shards the network layer by layer, so that a device holds at most one full layer and the rest.

    `from_rank_0`: only rank 0 has read the weights; the others have empty tensors of the same shapes.
    """
    mesh = init_device_mesh(ranks.device, (ranks.world_size,))
    bf16 = config.train.precision == "bf16" and config.method.kind in ("full", "pretrain")
    on_host = config.train.offload == "all" and ranks.device != "cpu"
    offload = CPUOffloadPolicy() if on_host else OffloadPolicy()
    common: dict[str, Any] = {"mesh": mesh, "offload_policy": offload}
    # Layers are gathered in bf16, in which they compute; what is outside them keeps its dtype.
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    reshard_layers = config.advanced.reshard_after_forward and ranks.world_size > 1
    for layer in decoder_layers(network.base_model):
        _move_to_device(layer, ranks, from_rank_0)
        fully_shard(layer, mp_policy=policy, reshard_after_forward=reshard_layers, **common)
    root = RootModule(network)
    _move_to_device(root, ranks, from_rank_0)
    fully_shard(root, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False), reshard_after_forward=False, **common)
    return root


def reshard(root: RootModule) -> None:
    """After a forward without a backward: parameters that stay gathered would be taken for the shards."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _move_to_device(module: torch.nn.Module, ranks: Ranks, from_rank_0: bool) -> None:
    """Moves a module to the device; with `from_rank_0` all ranks get the values of rank 0."""
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = _broadcast(buffer.to(ranks.device), ranks, from_rank_0)
        for parameter in part.parameters(recurse=False):
            if not isinstance(parameter, DTensor):
                parameter.data = _broadcast(parameter.data.to(ranks.device), ranks, from_rank_0)


def _broadcast(tensor: Tensor, ranks: Ranks, from_rank_0: bool) -> Tensor:
    if from_rank_0 and ranks.world_size > 1:
        dist.broadcast(tensor, 0)
    return tensor


def local_shard(parameter: Tensor) -> Tensor:
    """This rank's shard as a plain parameter that shares its memory."""
    return torch.nn.Parameter(parameter.to_local(), requires_grad=True) if isinstance(parameter, DTensor) else parameter


def refuse_unsupported(config: RunConfig) -> None:
    train, method = config.train, config.method
    if train.optimizer != "adamw":
        raise UserError(
            f"train.optimizer: {train.optimizer} needs full tensors, which parallel.engine=fsdp shards; use adamw, or "
            "parallel.engine=ddp"
        )
    if method.kind == "qlora" and method.bits == 8:
        raise UserError(
            "method.bits: an int8 base cannot be sharded by parallel.engine=fsdp; use method.bits=4, or ddp"
        )


class Fsdp(Engine):
    syncs_every_micro_batch = True
    gathers_copies = True

    def __init__(self, root: RootModule, network: Network, optimizer: Optimizer, scaler: Any, ranks: Ranks) -> None:
        super().__init__(network, optimizer, scaler, ranks)
        self._root = root
        named = dict(network.model.named_parameters())
        self._sharded = [named[name] for name in optimizer.names]

    def run(self, work: Callable[[], T]) -> T:
        result: T = self._root(work)
        if not torch.is_grad_enabled():
            reshard(self._root)  # a backward does this by itself
        return result

    def backward(self, loss: Tensor, last: bool) -> None:
        super().backward(loss * self.ranks.world_size, last)  # FSDP averages gradients; we need their sum

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        shards = self.optimizer.parameters
        for parameter, own in zip(self._sharded, shards, strict=True):
            own.grad = None if parameter.grad is None else parameter.grad.to_local()
        self.scaler.unscale_(self.optimizer.torch)
        if self.scaler.is_enabled():
            for state in self.scaler._per_optimizer_states.values():
                for found_inf in state["found_inf_per_device"].values():
                    self.ranks.all_reduce(found_inf)
        grads = [p.grad for p in shards if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads) if grads else torch.zeros(())
        square = norm.to(self.ranks.device).double().square()
        self.ranks.all_reduce(square)
        norm = square.sqrt().float()
        if max_norm and shards:
            self._clip(norm.to(shards[0].device), max_norm)
        return norm

    def optimizer_step(self, good: Tensor | None = None) -> None:
        if any(parameter.grad is not None for parameter in self.optimizer.parameters):
            self.scaler.step(self.optimizer.torch)
            self.scaler.update()
        self._zero_grad()

    def discard_gradients(self) -> None:
        super().discard_gradients()
        self._zero_grad()

    def _zero_grad(self) -> None:
        self.optimizer.zero_grad()
        for parameter in self._sharded:
            parameter.grad = None

    def local_states(self) -> Iterable[Tensor]:
        shards = [
            t.to_local() if isinstance(t, DTensor) else t for t in trainable_state_dict(self.network.model).values()
        ]
        return [*shards, *self.optimizer.state_tensors().values()]

    def full_weights(self) -> dict[str, Tensor]:
        return self._gather(trainable_state_dict(self.network.model).items())

    def full_optimizer_states(self) -> dict[str, Tensor]:
        by_name = dict(zip(self.optimizer.names, self._sharded, strict=True))

        def sharded_like_its_parameter(name: str, tensor: Tensor) -> Tensor:
            parameter = by_name[name.rsplit("/", 1)[0]]
            if tensor.ndim == 0 or not isinstance(parameter, DTensor):
                return tensor
            return DTensor.from_local(
                tensor.to(self.ranks.device), parameter.device_mesh, parameter.placements, run_check=False,
                shape=parameter.shape, stride=parameter.stride(),
            )  # fmt: skip

        return self._gather((n, sharded_like_its_parameter(n, t)) for n, t in self.optimizer.state_tensors().items())

    def _gather(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Full tensors, one after another, in the host memory of rank 0."""
        gathered = {}
        for name, tensor in tensors:
            full = _full_tensor(tensor.detach())
            if self.ranks.is_main:
                gathered[name] = full.to("cpu", copy=True)
        return gathered

    def load_full_weights(self, tensors: dict[str, Tensor]) -> None:
        weights = trainable_state_dict(self.network.model)
        check_state_dict(weights, tensors)
        with torch.no_grad():
            for name, tensor in tensors.items():
                weight = weights[name]
                if isinstance(weight, DTensor):
                    weight.to_local().copy_(self._shard_of(tensor))
                else:
                    weight.copy_(tensor)

    def load_optimizer_states(self, tensors: dict[str, Tensor]) -> None:
        self.optimizer.load_state_tensors({n: t if t.ndim == 0 else self._shard_of(t) for n, t in tensors.items()})

    def _shard_of(self, full: Tensor) -> Tensor:
        """Sharded as torch does it: along the first dimension; the last ranks may get nothing."""
        pieces = full.chunk(self.ranks.world_size, dim=0)
        return pieces[self.ranks.rank] if self.ranks.rank < len(pieces) else full[:0]


def _full_tensor(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor.to_local()
    if local.device.type != tensor.device_mesh.device_type:  # offloaded
        moved = local.to(tensor.device_mesh.device_type)
        tensor = DTensor.from_local(moved, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape,
                                    stride=tensor.stride())  # fmt: skip
    return tensor.full_tensor()
