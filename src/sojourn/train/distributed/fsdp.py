"""Fully sharded: weights, gradients and moments are cut over the processes; a block's weights are gathered when needed.

torch's `fully_shard` (FSDP2) on every block and on the rest. The optimizer works on this process's shards as plain
tensors, so that its arithmetic is the same as anywhere else. Names and shapes of whole tensors are those of a process
alone, and so are checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
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


def shard(network: Network, config: RunConfig, ranks: Ranks, from_first: bool) -> RootModule:
    """Cuts the network, block by block, so that no device ever holds more than one block and the rest in full.

    `from_first`: only the first process has read the weights; the others have room for them.
    """
    mesh = init_device_mesh(ranks.device, (ranks.world_size,))
    narrow = config.train.precision == "bf16" and config.method.kind in ("full", "pretrain")
    host = config.train.offload == "all" and ranks.device != "cpu"
    offload = CPUOffloadPolicy() if host else OffloadPolicy()
    common: dict[str, Any] = {"mesh": mesh, "offload_policy": offload}
    # Blocks travel in 16 bits, as they compute; what is outside them stays as wide as it is for a process alone.
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if narrow else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    reshard = config.advanced.reshard_after_forward and ranks.world_size > 1  # alone, there is nothing to give back
    for block in decoder_layers(network.base_model):
        _arrive(block, ranks, from_first)
        fully_shard(block, mp_policy=policy, reshard_after_forward=reshard, **common)
    root = RootModule(network)
    _arrive(root, ranks, from_first)
    fully_shard(root, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False), reshard_after_forward=False, **common)
    return root


def reshard(root: RootModule) -> None:
    """After a pass that no backward follows: what stayed gathered would be taken for the weights."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _arrive(module: Any, ranks: Ranks, from_first: bool) -> None:
    """On the device, with the first process's values."""
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = _same(buffer.to(ranks.device), ranks, from_first)
        for parameter in part.parameters(recurse=False):
            if not isinstance(parameter, DTensor):
                parameter.data = _same(parameter.data.to(ranks.device), ranks, from_first)


def _same(tensor: Any, ranks: Ranks, from_first: bool) -> Any:
    if from_first and ranks.world_size > 1:
        dist.broadcast(tensor, 0)
    return tensor


def local(parameter: Any) -> Any:
    """This process's shard, as a tensor of its own that shares its memory."""
    return torch.nn.Parameter(parameter.to_local(), requires_grad=True) if isinstance(parameter, DTensor) else parameter


def refuse_unsupported(config: RunConfig) -> None:
    train, method = config.train, config.method
    if train.optimizer != "adamw":
        raise UserError(
            f"train.optimizer: {train.optimizer} needs whole tensors, which parallel.engine=fsdp cuts; use adamw, or "
            "parallel.engine=ddp"
        )
    if method.kind == "qlora" and method.bits == 8:
        raise UserError("method.bits: a base of 8 bits cannot be cut by parallel.engine=fsdp; use 4, or ddp")


class Fsdp(Engine):
    syncs_every_micro_batch = True
    gathers_copies = True

    def __init__(self, root: RootModule, network: Network, optimizer: Optimizer, scaler: Any, ranks: Ranks) -> None:
        super().__init__(network, optimizer, scaler, ranks)
        self._root = root
        named = dict(network.model.named_parameters())
        self._cut = [named[name] for name in optimizer.names]

    def run(self, work: Callable[[], T]) -> T:
        made: T = self._root(work)
        if not torch.is_grad_enabled():
            reshard(self._root)  # after a backward it happens by itself
        return made

    def backward(self, loss: Any, last: bool) -> None:
        super().backward(loss * self.ranks.world_size, last)  # the shards are averaged, and a sum is wanted

    def clip_grad_norm(self, max_norm: float) -> Any:
        ours = self.optimizer.parameters
        for parameter, shard_ in zip(self._cut, ours, strict=True):
            shard_.grad = None if parameter.grad is None else parameter.grad.to_local()
        self.scaler.unscale_(self.optimizer.torch)
        if self.scaler.is_enabled():
            for state in self.scaler._per_optimizer_states.values():
                for found in state["found_inf_per_device"].values():
                    self.ranks.all_reduce(found)
        grads = [p.grad for p in ours if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads) if grads else torch.zeros(())
        square = norm.to(self.ranks.device).double().square()
        self.ranks.all_reduce(square)
        norm = square.sqrt().float()
        if max_norm and ours:
            self._clip(norm.to(ours[0].device), max_norm)
        return norm

    def optimizer_step(self, good: Any = None) -> None:
        if any(parameter.grad is not None for parameter in self.optimizer.parameters):
            self.scaler.step(self.optimizer.torch)
            self.scaler.update()
        self._forget()

    def discard_gradients(self) -> None:
        super().discard_gradients()
        self._forget()

    def _forget(self) -> None:
        self.optimizer.zero_grad()
        for parameter in self._cut:
            parameter.grad = None

    def local_states(self) -> Iterable[Any]:
        cut = [t.to_local() if isinstance(t, DTensor) else t for t in trainable_state_dict(self.network.model).values()]
        return [*cut, *self.optimizer.state_tensors().values()]

    def full_weights(self) -> dict[str, Any]:
        return self._gathered(trainable_state_dict(self.network.model).items())

    def full_optimizer_states(self) -> dict[str, Any]:
        by_name = dict(zip(self.optimizer.names, self._cut, strict=True))

        def like_its_parameter(name: str, tensor: Any) -> Any:
            parameter = by_name[name.rsplit("/", 1)[0]]
            if tensor.ndim == 0 or not isinstance(parameter, DTensor):
                return tensor
            return DTensor.from_local(
                tensor.to(self.ranks.device), parameter.device_mesh, parameter.placements, run_check=False,
                shape=parameter.shape, stride=parameter.stride(),
            )  # fmt: skip

        return self._gathered((n, like_its_parameter(n, t)) for n, t in self.optimizer.state_tensors().items())

    def _gathered(self, tensors: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        """Whole tensors, one after another, in the first process's host memory."""
        whole = {}
        for name, tensor in tensors:
            full = _whole(tensor.detach())
            if self.ranks.is_main:
                whole[name] = full.to("cpu", copy=True)
        return whole

    def load_full_weights(self, tensors: dict[str, Any]) -> None:
        places = trainable_state_dict(self.network.model)
        check_state_dict(places, tensors)
        with torch.no_grad():
            for name, tensor in tensors.items():
                place = places[name]
                if isinstance(place, DTensor):
                    place.to_local().copy_(self._share(tensor))
                else:
                    place.copy_(tensor)

    def load_optimizer_states(self, tensors: dict[str, Any]) -> None:
        self.optimizer.load_state_tensors({n: t if t.ndim == 0 else self._share(t) for n, t in tensors.items()})

    def _share(self, whole: Any) -> Any:
        """As torch cuts it: along the first dimension; who comes late may get nothing."""
        pieces = whole.chunk(self.ranks.world_size, dim=0)
        return pieces[self.ranks.rank] if self.ranks.rank < len(pieces) else whole[:0]


def _whole(tensor: Any) -> Any:
    if not isinstance(tensor, DTensor):
        return tensor
    here = tensor.to_local()
    if here.device.type != tensor.device_mesh.device_type:  # offloaded
        moved = here.to(tensor.device_mesh.device_type)
        tensor = DTensor.from_local(moved, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape,
                                    stride=tensor.stride())  # fmt: skip
    return tensor.full_tensor()
