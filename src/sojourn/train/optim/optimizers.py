"""Optimizers by name, the learning-rate schedule as a pure function of the step, and optimizer states as named tensors.

AdamW of torch, 8-bit and paged AdamW of bitsandbytes, our own for bf16 weights and for updates in the backward, Muon.
Weight decay applies to matrices; norms, biases, embeddings and the LM head are not decayed. States are saved as tensors
under the names of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sojourn.config.schema import TrainConfig
from sojourn.model.base import require_bitsandbytes

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


def learning_rate(step: int, total: int, train: TrainConfig) -> float:
    """Of step `step` (from 0) of `total`: linear warm-up, then the schedule down to `min_lr` times the peak."""
    peak = float(train.lr)
    warmup = int(train.warmup) if train.warmup >= 1 else math.ceil(train.warmup * total)
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, total - 1 - warmup)
    if train.schedule == "cosine":
        share = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    elif train.schedule == "linear":
        share = 1 - min(1.0, done)
    elif train.schedule == "wsd":
        share = min(1.0, 5 * (1 - min(1.0, done)))  # constant, then linear decay over the last fifth
    else:
        share = 1.0
    return peak * (train.min_lr + (1 - train.min_lr) * share)


_ADAM = {"step", "exp_avg", "exp_avg_sq"}
_STATES = {
    "adamw": _ADAM,
    "muon": {"step", "momentum", "mean", "square"},
    "paged_adamw": {"step", "state1", "state2"},
    "adamw_8bit": {"step", "state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2"},
    "paged_adamw_8bit": {"step", "state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2"},
}


class Optimizer:
    """An optimizer of torch, bitsandbytes or ours, with its state by the names of the parameters."""

    def __init__(
        self,
        model: Module,
        train: TrainConfig,
        device: str,
        local_shard: Callable[[Tensor], Tensor] = lambda parameter: parameter,
        lora_b_ratio: float = 1.0,
        cpu_kernels: bool = False,
    ) -> None:
        """`local_shard`: this rank's shard of a parameter, where parameters are sharded. `lora_b_ratio`: of LoRA+.
        `cpu_kernels`: they have passed their smoke test."""
        groups = parameter_groups(model, train, lora_b_ratio)
        for group in groups:
            group["params"] = [local_shard(parameter) for parameter in group["params"]]
        self.names = [name for group in groups for name in group.pop("names")]
        self.torch = _make(groups, train, device, cpu_kernels)
        self._kinds = _STATES[train.optimizer] | ({"compensation"} if train.master_weights == "bf16_kahan" else set())

    @property
    def parameters(self) -> list[Tensor]:
        return [parameter for group in self.torch.param_groups for parameter in group["params"]]

    def set_learning_rate(self, rate: float) -> None:
        set_learning_rate(self.torch.param_groups, rate)

    @property
    def fuses_clipping(self) -> bool:
        """Whether its kernel also does nothing where `found_inf` is 1, so that the device can decide."""
        return bool(self.torch.defaults.get("fused")) and self.parameters[0].device.type == "cuda"

    @property
    def clips_as_it_steps(self) -> bool:
        """Whether its kernel divides gradients by `grad_scale`: no extra pass to clip them."""
        return self.fuses_clipping or hasattr(self.torch, "grad_norm")

    def grad_norm(self, grads: list[Tensor]) -> Tensor:
        """Of `grads`, which are all gradients."""
        import torch

        if hasattr(self.torch, "grad_norm"):
            norm: Tensor = self.torch.grad_norm()
            return norm
        return torch.nn.utils.get_total_norm(grads)

    def zero_grad(self) -> None:
        self.torch.zero_grad(set_to_none=True)
        self.torch.grad_scale = self.torch.found_inf = None

    def state_tensors(self) -> dict[str, Tensor]:
        """The states as PARAMETER/KEY; numbers become tensors."""
        import torch

        self._synchronize()
        state = self.torch.state
        return {
            f"{name}/{key}": value if isinstance(value, torch.Tensor) else torch.tensor(value)
            for name, parameter in zip(self.names, self.parameters, strict=True)
            for key, value in state.get(parameter, {}).items()
        }

    def matches(self, tensors: dict[str, Tensor]) -> bool:
        """Whether they are states of this kind of optimizer for these parameters."""
        names = {full.rsplit("/", 1)[0] for full in tensors}
        kinds = {full.rsplit("/", 1)[1] for full in tensors}
        return names <= set(self.names) and kinds <= self._kinds

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        state: dict[str, dict[str, Any]] = {name: {} for name in self.names}
        for full, value in tensors.items():
            name, key = full.rsplit("/", 1)
            state[name][key] = value
        if hasattr(self.torch, "init_state") or hasattr(self.torch, "make_state"):
            self._synchronize()
            self._fill(state)
        else:
            numbered = {i: state[name] for i, name in enumerate(self.names) if state[name]}
            self.torch.load_state_dict({**self.torch.state_dict(), "state": numbered})

    def _synchronize(self) -> None:
        """Until states in host memory can be read and written."""
        if hasattr(self.torch, "synchronize"):
            self.torch.synchronize()

    def _fill(self, state: dict[str, dict[str, Any]]) -> None:
        """Copies into tensors that the optimizer allocates itself, so that they stay paged or offloaded."""
        import torch

        names = iter(self.names)
        for g, group in enumerate(self.torch.param_groups):
            for i, parameter in enumerate(group["params"]):
                loaded = state[next(names)]
                if not loaded:
                    continue
                if hasattr(self.torch, "make_state"):
                    self.torch.make_state(parameter)
                else:  # bitsandbytes
                    self.torch.init_state(group, parameter, g, i)
                own = self.torch.state[parameter]
                for key, value in loaded.items():
                    if isinstance(own[key], torch.Tensor):
                        own[key].copy_(value)
                    else:
                        own[key] = type(own[key])(value.item())


def parameter_groups(model: Module, train: TrainConfig, lora_b_ratio: float = 1.0) -> list[dict[str, Any]]:
    """Decayed matrices, which Muon takes, and the rest: norms, biases, embeddings, LM head. `lora_b_ratio`: LoRA+
    (arXiv 2402.12354) trains the B matrices of adapters with so many times the learning rate."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    not_decayed = ("embed", "lm_head", "wte", "wpe")
    groups: dict[tuple[bool, float], list[str]] = {}
    for name, parameter in named.items():
        is_matrix = parameter.ndim >= 2 and not any(part in name for part in not_decayed)
        groups.setdefault((is_matrix, lora_b_ratio if ".lora_B." in name else 1.0), []).append(name)
    return [
        {
            "names": names,
            "params": [named[name] for name in names],
            "weight_decay": train.weight_decay if is_matrix else 0.0,
            "matrices": is_matrix,
            "lr_ratio": ratio,
        }
        for (is_matrix, ratio), names in sorted(groups.items(), reverse=True)
    ]


def set_learning_rate(groups: list[dict[str, Any]], rate: float) -> None:
    for group in groups:
        group["lr"] = rate * group["lr_ratio"]


def _make(groups: list[dict[str, Any]], train: TrainConfig, device: str, cpu_kernels: bool) -> Any:
    import torch

    from sojourn.model.kernels.cpu.library import cpu_kernels_take
    from sojourn.model.kernels.triton_support import supports_triton

    settings: dict[str, Any] = {"lr": 0.0, "betas": (train.beta1, train.beta2), "eps": 1e-8}
    if train.optimizer == "muon":
        from sojourn.train.optim.muon import Muon

        return Muon(groups, **settings)
    if train.master_weights != "fp32" or train.optimizer_in_backward == "on":
        return _low_memory(groups, train, settings)
    if train.offload == "optimizer":
        from sojourn.train.optim.offload import OffloadedAdamW

        return OffloadedAdamW(groups, **settings)
    if train.optimizer == "adamw" and device == "cuda" and supports_triton():
        from sojourn.train.optim.adamw import AdamW

        return AdamW(groups, **settings, fused=True)
    parameters = [parameter for group in groups for parameter in group["params"]]
    if train.optimizer == "adamw" and cpu_kernels and cpu_kernels_take(*parameters):
        from sojourn.train.optim.adamw_cpu import AdamW as CpuAdamW

        return CpuAdamW(groups, **settings)
    if train.optimizer == "adamw":
        return torch.optim.AdamW(groups, **settings, fused=device in ("cpu", "cuda"))
    require_bitsandbytes(f"train.optimizer: {train.optimizer}")
    import bitsandbytes

    kinds = {"adamw_8bit": "AdamW8bit", "paged_adamw": "PagedAdamW", "paged_adamw_8bit": "PagedAdamW8bit"}
    return getattr(bitsandbytes.optim, kinds[train.optimizer])(groups, **settings)


def _low_memory(groups: list[dict[str, Any]], train: TrainConfig, settings: dict[str, Any]) -> Any:
    from sojourn.train.optim.low_memory_adamw import LowMemoryAdamW

    names = ("exp_avg", "exp_avg_sq") if train.optimizer == "adamw" else ("state1", "state2")
    on_host = train.offload == "optimizer" or train.optimizer.startswith("paged_")
    return LowMemoryAdamW(groups, **settings, rounding=train.master_weights, eight_bit="8bit" in train.optimizer,
                          on_host=on_host, state_names=names)  # fmt: skip
