"""DeepSpeed's ZeRO, stages 1 to 3, from the user's own `ds_config.json` or from none.

It keeps the weights, gradients and moments in its own flat partitions; whole tensors come from and go to it by its
public functions, so that checkpoints are the same as those of any other engine. It clips and updates in one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

import torch

from sojourn.config.schema import RunConfig
from sojourn.errors import UserError
from sojourn.model.network import Network
from sojourn.model.weights import check_state_dict, trainable_state_dict
from sojourn.train.distributed.ds_config import filled, usual
from sojourn.train.distributed.engine import Engine
from sojourn.train.distributed.root_module import RootModule
from sojourn.train.optim.optimizers import Optimizer
from sojourn.train.ranks import Ranks

T = TypeVar("T")
_MOMENTS = ("exp_avg", "exp_avg_sq")


def open_deepspeed(config: RunConfig, network: Network, scaler: Any, ranks: Ranks) -> Engine:
    import_quietly()
    import deepspeed

    if ranks.device == "cpu":  # it would compile an operation that no training calls; a kill meanwhile locks out all
        deepspeed.ops.__compatible_ops__ = {}
    file = config.parallel.deepspeed
    settings, notes = (
        (usual(config, ranks.world_size), [])
        if file is None
        else filled(Path(file).expanduser(), config, ranks.world_size)
    )
    for note in notes:
        print(f"note: {note}", flush=True)
    stage = settings["zero_optimization"]["stage"]
    _refuse(config, stage)
    train = config.train.model_copy(update={"offload": "off"})  # it offloads by itself
    optimizer, root = Optimizer(network.model, train, ranks.device), RootModule(network)
    if stage == 3:  # its weight is used without its forward
        deepspeed.zero.register_external_parameter(root, network.base_model.get_output_embeddings().weight)
    os.environ.setdefault("LOCAL_RANK", str(ranks.local_rank))  # it insists
    with redirect_stdout(StringIO()):
        made, *_ = deepspeed.initialize(
            model=root, optimizer=optimizer.torch, config=settings, dist_init_required=False
        )
    return DeepSpeed(made, network, optimizer, scaler, ranks, config.train.precision == "fp16")


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


def _refuse(config: RunConfig, stage: int) -> None:
    if stage == 0:
        raise UserError(
            "parallel.deepspeed: stage 0 shares nothing; set stage 1, 2 or 3, or leave DeepSpeed out: "
            "parallel.engine=ddp"
        )
    if stage == 3 and config.method.kind == "qlora":
        raise UserError("method.kind: a quantised base cannot be cut by ZeRO-3; use stage 2, or parallel.engine=fsdp")


class DeepSpeed(Engine):
    syncs_every_micro_batch = True
    gathers_copies = True

    def __init__(
        self, made: Any, network: Network, optimizer: Optimizer, scaler: Any, ranks: Ranks, scaled: bool
    ) -> None:
        super().__init__(network, optimizer, scaler, ranks)
        self._made, self._zero, self._scaled = made, made.optimizer, scaled
        named = dict(network.model.named_parameters())
        self._trained = {name: named[name] for name in optimizer.names}
        self._make_state()

    @property
    def uses_loss_scaling(self) -> bool:
        return self._scaled

    def run(self, work: Callable[[], T]) -> T:
        made: T = self._made(work)
        return made

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        self._made.set_gradient_accumulation_boundary(False)
        yield

    def backward(self, loss: Any, last: bool) -> None:
        self._made.set_gradient_accumulation_boundary(last)
        self._made.backward(loss * self.ranks.world_size)  # it averages, and a sum is wanted

    def clip_grad_norm(self, max_norm: float) -> Any:
        """The norm only: clipping is part of its update."""
        zero = self._zero
        if hasattr(zero, "scaled_global_norm"):
            norm = torch.as_tensor(zero.scaled_global_norm())
        else:
            norm = torch.linalg.vector_norm(torch.stack([torch.as_tensor(one) for one in zero._get_norm_groups()]))
        norm = norm.detach().float() / float(zero.loss_scale)
        return torch.where(norm >= 0, norm, torch.full_like(norm, torch.nan))  # below 0 it means: no number

    def optimizer_step(self, good: Any = None) -> None:
        self._made.step()

    def discard_gradients(self) -> None:
        zero = self._zero
        if hasattr(zero, "_overflow_clean_up"):
            zero._overflow_clean_up(zero.loss_scale)
        else:
            zero.zero_grad(set_to_none=True)
            for kept in (zero.averaged_gradients, zero.all_grad_tensors):
                for key in list(kept):
                    kept[key] = None
            if zero.cpu_offload:
                zero.reset_cpu_buffers()
        zero.micro_step_id = -1 if hasattr(zero, "scaled_global_norm") else 0

    def set_learning_rate(self, rate: float) -> None:
        for group in self._zero.param_groups:
            group["lr"] = rate

    def local_states(self) -> Iterable[Any]:
        partitions = getattr(self._zero, "single_partition_of_fp32_groups", None)
        return list(self._zero.fp32_partitioned_groups_flat if partitions is None else partitions)

    def full_weights(self) -> dict[str, Any]:
        from deepspeed.utils import safe_get_full_fp32_param

        buffers = dict(self.network.model.named_buffers())
        return self._gathered(
            (name, buffers[name] if name in buffers else safe_get_full_fp32_param(self._trained[name]))
            for name in self._names()
        )

    def full_optimizer_states(self) -> dict[str, Any]:
        from deepspeed.utils import safe_get_full_optimizer_state

        found = self._gathered(
            (f"{name}/{key}", safe_get_full_optimizer_state(parameter, key))
            for name, parameter in self._trained.items()
            for key in _MOMENTS
        )
        if found:
            step = float(next(state["step"] for state in self._zero.optimizer.state.values()))
            found.update({f"{name}/step": torch.tensor(step) for name in self._trained})
        return found

    def _names(self) -> list[str]:
        return list(trainable_state_dict(self.network.model))

    def _gathered(self, tensors: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        """Whole tensors, one after another, in the first process's host memory."""
        return {name: t.detach().to("cpu", copy=True) for name, t in tensors if self.ranks.is_main}

    def load_full_weights(self, tensors: dict[str, Any]) -> None:
        import deepspeed
        from deepspeed.utils import safe_set_full_fp32_param

        buffers = dict(self.network.model.named_buffers())
        forms = {name: torch.empty(getattr(p, "ds_shape", p.shape), device="meta") for name, p in self._trained.items()}
        check_state_dict(forms, {name: tensor for name, tensor in tensors.items() if name not in buffers})
        with torch.no_grad():
            for name, tensor in tensors.items():
                if name in buffers:
                    buffers[name].copy_(tensor)
                    continue
                place = self._trained[name]
                with deepspeed.zero.GatheredParameters([place], modifier_rank=0):
                    place.data.copy_(tensor)
                safe_set_full_fp32_param(place, tensor.to(self.ranks.device))

    def load_optimizer_states(self, tensors: dict[str, Any]) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        if not tensors:
            return
        for name, parameter in self._trained.items():
            for key in _MOMENTS:
                safe_set_full_optimizer_state(parameter, tensors[f"{name}/{key}"].to(self.ranks.device), key)
        step = float(next(tensor for name, tensor in tensors.items() if name.endswith("/step")))
        for state in self._zero.optimizer.state.values():
            state["step"].fill_(step)

    def _make_state(self) -> None:
        """The places for the moments. It would make them group by group in its first update, and then know only the
        first group's by name."""
        zero = self._zero
        for flat in self.local_states():
            state = zero.optimizer.state[flat]
            if not state:
                state.update({key: torch.zeros_like(flat) for key in _MOMENTS})
                state["step"] = torch.zeros((), dtype=torch.float32, device=flat.device)
        if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
            zero._lazy_init_hp_params_optimizer_state()
