"""DeepSpeed's ZeRO, stages 1 to 3, with the user's own `ds_config.json` or without one.

DeepSpeed keeps weights, gradients and optimizer states in flat partitions of its own. Full tensors are read and written
through its public functions, so checkpoints are those of any other engine. Clipping is part of its optimizer step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import Any, TypeVar

import torch
from torch import Tensor

from sojourn.config.schema import RunConfig
from sojourn.errors import UserError
from sojourn.expand_user import expand_user
from sojourn.model.network import Network
from sojourn.model.weights import check_state_dict, trainable_state_dict
from sojourn.resolve.ds_config import config_from_file, default_config
from sojourn.train.distributed.engine import Engine
from sojourn.train.distributed.root_module import RootModule
from sojourn.train.optim.optimizers import Optimizer, set_learning_rate
from sojourn.train.ranks import Ranks

T = TypeVar("T")
_ADAM_STATES = ("exp_avg", "exp_avg_sq")


def open_deepspeed(config: RunConfig, network: Network, scaler: Any, ranks: Ranks) -> Engine:
    import_quietly()
    import deepspeed

    if (
        ranks.device == "cpu"
    ):  # otherwise it compiles an op that training never calls; a kill during that leaves a lock behind
        deepspeed.ops.__compatible_ops__ = {}
    file = config.parallel.deepspeed
    settings, notes = (
        (default_config(config, ranks.world_size), [])
        if file is None
        else config_from_file(expand_user(file), config, ranks.world_size)
    )
    for note in notes:
        print(f"note: {note}", flush=True)
    stage = settings["zero_optimization"]["stage"]
    _refuse_unsupported(config, stage)
    train = config.train.model_copy(update={"offload": "off"})  # DeepSpeed offloads by itself
    optimizer = Optimizer(network.model, train, ranks.device, lora_b_ratio=config.method.loraplus_lr_ratio)
    root = RootModule(network)
    if stage == 3:  # its weight is used outside its forward
        deepspeed.zero.register_external_parameter(root, network.base_model.get_output_embeddings().weight)
    os.environ.setdefault("LOCAL_RANK", str(ranks.local_rank))  # DeepSpeed requires it
    with redirect_stdout(StringIO()):
        engine, *_ = deepspeed.initialize(
            model=root, optimizer=optimizer.torch, config=settings, dist_init_required=False
        )
    return DeepSpeed(engine, network, optimizer, scaler, ranks, config.train.precision == "fp16")


def import_quietly() -> None:
    try:
        with redirect_stdout(StringIO()):
            import deepspeed
    except ImportError:
        raise UserError(
            "parallel.engine: deepspeed is not installed; run: "
            "DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed"
        ) from None
    deepspeed.utils.logger.setLevel("ERROR")


def _refuse_unsupported(config: RunConfig, stage: int) -> None:
    if stage == 0:
        raise UserError(
            "parallel.deepspeed: ZeRO stage 0 shards nothing; set stage 1, 2 or 3, or use parallel.engine=ddp"
        )
    if stage == 3 and config.method.kind == "qlora":
        raise UserError(
            "method.kind: a quantized base cannot be sharded by ZeRO-3; use stage 2, or parallel.engine=fsdp"
        )


class DeepSpeed(Engine):
    syncs_every_micro_batch = True
    gathers_copies = True

    def __init__(
        self, engine: Any, network: Network, optimizer: Optimizer, scaler: Any, ranks: Ranks, scaled: bool
    ) -> None:
        super().__init__(network, optimizer, scaler, ranks)
        self._engine, self._zero, self._scaled = engine, engine.optimizer, scaled
        named = dict(network.model.named_parameters())
        self._trained = {name: named[name] for name in optimizer.names}
        self._create_optimizer_states()

    @property
    def uses_loss_scaling(self) -> bool:
        return self._scaled

    def run(self, work: Callable[[], T]) -> T:
        result: T = self._engine(work)
        return result

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        self._engine.set_gradient_accumulation_boundary(False)
        yield

    def backward(self, loss: Tensor, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * self.ranks.world_size)  # DeepSpeed averages; we need the sum

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Only the norm: DeepSpeed clips in its optimizer step."""
        zero = self._zero
        if hasattr(zero, "scaled_global_norm"):
            norm = torch.as_tensor(zero.scaled_global_norm())
        else:
            norm = torch.linalg.vector_norm(torch.stack([torch.as_tensor(one) for one in zero._get_norm_groups()]))
        norm = norm.detach().float() / float(zero.loss_scale)
        return torch.where(norm >= 0, norm, torch.full_like(norm, torch.nan))  # DeepSpeed reports NaN as -1

    def optimizer_step(self, good: Tensor | None = None) -> None:
        self._engine.step()

    def discard_gradients(self) -> None:
        zero = self._zero
        if hasattr(zero, "_overflow_clean_up"):
            zero._overflow_clean_up(zero.loss_scale)
        else:
            zero.zero_grad(set_to_none=True)
            for gradients in (zero.averaged_gradients, zero.all_grad_tensors):
                for key in list(gradients):
                    gradients[key] = None
            if zero.cpu_offload:
                zero.reset_cpu_buffers()
        zero.micro_step_id = -1 if hasattr(zero, "scaled_global_norm") else 0

    def set_learning_rate(self, rate: float) -> None:
        set_learning_rate(self._zero.param_groups, rate)

    def local_states(self) -> Iterable[Tensor]:
        partitions = getattr(self._zero, "single_partition_of_fp32_groups", None)
        return list(self._zero.fp32_partitioned_groups_flat if partitions is None else partitions)

    def full_weights(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        buffers = dict(self.network.model.named_buffers())
        return self._gather(
            (name, buffers[name] if name in buffers else safe_get_full_fp32_param(self._trained[name]))
            for name in self._names()
        )

    def full_optimizer_states(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_optimizer_state

        states = self._gather(
            (f"{name}/{key}", safe_get_full_optimizer_state(parameter, key))
            for name, parameter in self._trained.items()
            for key in _ADAM_STATES
        )
        if states:
            step = float(next(state["step"] for state in self._zero.optimizer.state.values()))
            states.update({f"{name}/step": torch.tensor(step) for name in self._trained})
        return states

    def _names(self) -> list[str]:
        return list(trainable_state_dict(self.network.model))

    def _gather(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Full tensors, one after another, in the host memory of rank 0."""
        return {name: t.detach().to("cpu", copy=True) for name, t in tensors if self.ranks.is_main}

    def load_full_weights(self, tensors: dict[str, Tensor]) -> None:
        import deepspeed
        from deepspeed.utils import safe_set_full_fp32_param

        buffers = dict(self.network.model.named_buffers())
        shapes = {
            name: torch.empty(getattr(p, "ds_shape", p.shape), device="meta") for name, p in self._trained.items()
        }
        check_state_dict(shapes, {name: tensor for name, tensor in tensors.items() if name not in buffers})
        with torch.no_grad():
            for name, tensor in tensors.items():
                if name in buffers:
                    buffers[name].copy_(tensor)
                    continue
                parameter = self._trained[name]
                with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                    parameter.data.copy_(tensor)
                safe_set_full_fp32_param(parameter, tensor.to(self.ranks.device))

    def load_optimizer_states(self, tensors: dict[str, Tensor]) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        if not tensors:
            return
        for name, parameter in self._trained.items():
            for key in _ADAM_STATES:
                safe_set_full_optimizer_state(parameter, tensors[f"{name}/{key}"].to(self.ranks.device), key)
        step = float(next(tensor for name, tensor in tensors.items() if name.endswith("/step")))
        for state in self._zero.optimizer.state.values():
            state["step"].fill_(step)

    def _create_optimizer_states(self) -> None:
        """DeepSpeed creates them group by group in its first step, and then finds only the first group's by name."""
        zero = self._zero
        for flat in self.local_states():
            state = zero.optimizer.state[flat]
            if not state:
                state.update({key: torch.zeros_like(flat) for key in _ADAM_STATES})
                state["step"] = torch.zeros((), dtype=torch.float32, device=flat.device)
        if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
            zero._lazy_init_hp_params_optimizer_state()
