"""AdamW for weights and optimizer states of fewer bytes, which can also update one parameter in the backward.

The update is computed in fp32 and
- written to fp32 weights (`train.master_weights=fp32`),
- rounded to bf16 at random (`bf16`, see stochastic_rounding.py), or
- rounded to the nearest bf16, and what was lost is added in the next step (`bf16_kahan`, Kahan summation: the
  compensation is one more bf16 optimizer state, itself rounded at random).
Optimizer states are fp32 or 8-bit (blockwise_8bit.py), on the device or in host memory (host_states.py). On a GPU one
Triton kernel does it all; elsewhere torch does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from sojourn.estimate.model_states import MIN_HOST_ELEMENTS, host_buffers, state_bytes
from sojourn.model.kernels.triton_support import supports_triton
from sojourn.train.optim.blockwise_8bit import BLOCK, MIN_ELEMENTS, code_values, dequantize, midpoints, quantize
from sojourn.train.optim.host_states import Chunk, HostStates, Tensors
from sojourn.train.optim.low_memory_update import Rounding, Update
from sojourn.train.optim.stochastic_rounding import rounding_seed, stochastic_round

_MAX_ERROR = 0.02  # of the kernel's update, relative: now and then a value is rounded the other way


class LowMemoryAdamW(torch.optim.Optimizer):
    """`state_names`: of the first and second moment. `grad_scale`: gradients are divided by it."""

    grad_scale: Tensor | None = None

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        rounding: Rounding,
        eight_bit: bool,
        on_host: bool,
        state_names: tuple[str, str],
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._rounding, self._eight_bit, self._names = rounding, eight_bit, state_names
        self._parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self._groups = {parameter: group for group in self.param_groups for parameter in group["params"]}
        self._numbers = {parameter: number for number, parameter in enumerate(self._parameters)}
        self._device = self._parameters[0].device
        codes = [code_values(signed) for signed in (True, False)]
        self._codes = torch.cat(codes).to(self._device)
        # a code has one midpoint less than values; both start at a multiple of 256
        self._midpoints = torch.cat([midpoints(codes[0]), torch.zeros(1), midpoints(codes[1])]).to(self._device)
        uses_kernel = self._device.type == "cuda" and supports_triton()
        self._apply = _kernel_or_torch(self._device, rounding, eight_bit) if uses_kernel else update_by_torch
        self._chunk = 0
        self._host = self._make_host_states() if on_host else None

    def _make_host_states(self) -> HostStates | None:
        large = [parameter.numel() for parameter in self._parameters if self._is_on_host(parameter)]
        if not large:
            return None
        kahan = self._rounding == "bf16_kahan"
        self._chunk, count = host_buffers(max(large), sum(large), state_bytes(self._eight_bit, kahan))
        layout = {"first": self._chunk, "second": self._chunk} | ({"compensation": self._chunk} if kahan else {})
        layout |= {"absmax1": self._chunk // BLOCK, "absmax2": self._chunk // BLOCK} if self._eight_bit else {}
        dtypes = {"compensation": torch.bfloat16, "absmax1": torch.float32, "absmax2": torch.float32}
        moment = torch.uint8 if self._eight_bit else torch.float32
        buffers = [
            {key: torch.empty(size, dtype=dtypes.get(key, moment), device=self._device) for key, size in layout.items()}
            for _ in range(count)
        ]
        return HostStates(self._device, self._states, buffers)

    @staticmethod
    def _is_on_host(parameter: Tensor) -> bool:
        """Small states stay on the device: copying them takes longer than it saves memory."""
        return bool(parameter.numel() >= MIN_HOST_ELEMENTS)

    def make_state(self, parameter: Tensor) -> None:
        """As checkpoints have it: names, shapes and dtypes of torch or bitsandbytes, and the Kahan compensation."""
        if self._host is not None:
            self._host.forget()  # what is fetched ahead may be loaded from a checkpoint now
        state = self.state[parameter]
        if state:
            return
        eight_bit = self._eight_bit and parameter.numel() >= MIN_ELEMENTS
        on_host = self._host is not None and self._is_on_host(parameter)
        where: dict[str, Any] = {"device": self._device}
        if on_host:
            where = {"device": "cpu", "pin_memory": self._device.type == "cuda"}
        state["step"] = torch.zeros((), dtype=torch.float32)
        for number, name in enumerate(self._names, 1):
            if not eight_bit:
                state[name] = torch.zeros(parameter.shape, dtype=torch.float32, **where)
                continue
            state[name] = torch.zeros(parameter.shape, dtype=torch.uint8, **where)  # times a scale of zero
            state[f"qmap{number}"] = self._codes[BLOCK * (number - 1) : BLOCK * number]
            state[f"absmax{number}"] = torch.zeros(-(-parameter.numel() // BLOCK), dtype=torch.float32, **where)
        if self._rounding == "bf16_kahan":
            state["compensation"] = torch.zeros(parameter.shape, dtype=torch.bfloat16, **where)

    def _states(self, chunk: Chunk) -> Tensors:
        """Flat views of the states of a chunk."""
        state = self.state[self._parameters[chunk.number]]
        names = {"first": self._names[0], "second": self._names[1], "compensation": "compensation"}
        found = {key: state[name].view(-1)[chunk.start : chunk.end] for key, name in names.items() if name in state}
        blocks = slice(chunk.start // BLOCK, -(-chunk.end // BLOCK))
        return found | {key: state[key][blocks] for key in ("absmax1", "absmax2") if key in state}

    def grad_norm(self) -> Tensor:
        """Of all gradients together."""
        norms = [grad_norm(p.grad) for p in self._parameters if p.grad is not None]
        return torch.linalg.vector_norm(torch.stack(norms))

    def start_step(self) -> None:
        """States in host memory start to travel."""
        if self._host is not None:
            self._host.start_step()

    def synchronize(self) -> None:
        """Until states can be read on the host."""
        if self._host is not None:
            self._host.synchronize()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.start_step()
        for parameter in self._parameters:
            if parameter.grad is not None:
                self.update(parameter)

    @torch.no_grad()
    def update(self, parameter: Tensor, norm: Tensor | None = None) -> None:
        """One parameter, by its gradient. `norm`: of the gradient; where it is not finite, weight and states do not
        change, and the caller must call `undo_step`."""
        if not self.state[parameter]:
            self.make_state(parameter)
        state, number = self.state[parameter], self._numbers[parameter]
        state["step"] += 1
        if norm is not None and self._apply is update_by_torch and not norm.isfinite():
            return
        update = self._update(self._groups[parameter], int(state["step"]), number)
        weight, grad = parameter.view(-1), parameter.grad.contiguous().view(-1)

        def work(chunk: Chunk, states: Tensors) -> None:
            part = slice(chunk.start, chunk.end)
            self._apply(update, weight[part], grad[part], states, chunk.start, norm)

        if self._host is None or not self._is_on_host(parameter):
            whole = Chunk(number, 0, parameter.numel())
            work(whole, self._states(whole))
            return
        for start in range(0, parameter.numel(), self._chunk):
            chunk = Chunk(number, start, min(start + self._chunk, parameter.numel()))
            self._host.update(chunk, partial(work, chunk))

    def undo_step(self, parameter: Tensor) -> None:
        """Of an update that changed nothing: it does not count."""
        self.state[parameter]["step"] -= 1

    def _update(self, group: dict[str, Any], step: int, number: int) -> Update:
        beta1, beta2 = group["betas"]
        return Update(
            self._rounding, step, group["lr"], group["weight_decay"], beta1, beta2, group["eps"],
            rounding_seed(step, number), self.grad_scale, self._codes, self._midpoints,
        )  # fmt: skip


def grad_norm(grad: Tensor) -> Tensor:
    return torch.linalg.vector_norm(grad, dtype=torch.float32)


def update_by_torch(
    update: Update, weight: Tensor, grad: Tensor, states: Tensors, start: int, norm: Tensor | None
) -> None:
    """One chunk. `start`: of its first element. `norm` is the kernel's."""
    if update.rounding == "fp32" and "absmax1" not in states:
        _update_by_fused_adamw(update, weight, grad, states)
        return
    grad = grad.float()
    if update.grad_scale is not None:
        grad = grad / update.grad_scale
    first, second = (_read(update, states, number) for number in (1, 2))
    first = first.mul_(update.beta1).add_(grad, alpha=1 - update.beta1)
    second = second.mul_(update.beta2).addcmul_(grad, grad, value=1 - update.beta2)
    _write(update, states, 1, first)
    _write(update, states, 2, second)
    value = weight.float()
    if "compensation" in states:
        value = value + states["compensation"]
    value = value * update.decay - update.rate * (first / (second.sqrt() * update.root + update.eps))
    if "compensation" in states:
        weight.copy_(value)
        states["compensation"].copy_(stochastic_round(value - weight, update.seed, start))
    elif update.rounding == "bf16":
        weight.copy_(stochastic_round(value, update.seed, start))
    else:
        weight.copy_(value)


def _update_by_fused_adamw(update: Update, weight: Tensor, grad: Tensor, states: Tensors) -> None:
    """fp32 weights and states: torch's own, to the last bit."""
    count = torch.full((), update.step - 1, dtype=torch.float32, device=weight.device)
    adamw(
        [weight], [grad], [states["first"]], [states["second"]], [], [count], fused=True, amsgrad=False, maximize=False,
        beta1=update.beta1, beta2=update.beta2, lr=update.lr, weight_decay=update.weight_decay, eps=update.eps,
        grad_scale=update.grad_scale,
    )  # fmt: skip


def _read(update: Update, states: Tensors, number: int) -> Tensor:
    state = states["first" if number == 1 else "second"]
    if "absmax1" not in states:
        return state.clone()
    return dequantize(state, states[f"absmax{number}"], update.codes[BLOCK * (number - 1) : BLOCK * number])


def _write(update: Update, states: Tensors, number: int, values: Tensor) -> None:
    state = states["first" if number == 1 else "second"]
    if "absmax1" not in states:
        state.copy_(values)
        return
    numbers, absmax = quantize(values, update.codes[BLOCK * (number - 1) : BLOCK * number])
    state.copy_(numbers)
    states[f"absmax{number}"].copy_(absmax)


@cache
def _kernel_or_torch(device: torch.device, rounding: Rounding, eight_bit: bool) -> Callable[..., None]:
    """The kernel, if it computes here what torch computes; else torch, with a note."""
    try:
        from sojourn.train.optim.low_memory_kernel import update_by_kernel

        ours, expected = (_example(apply, device, rounding, eight_bit) for apply in (update_by_kernel, update_by_torch))
        error = float((ours - expected).norm() / expected.norm())
        reason = None if error <= _MAX_ERROR else f"its update differs by {error:.1%}"
    except Exception as error:  # whatever Triton raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    if reason is None:
        return update_by_kernel
    print(f"note: the AdamW kernel failed its smoke test ({reason}); using torch's operations, slower", flush=True)
    return update_by_torch


def _example(apply: Callable[..., None], device: torch.device, rounding: Rounding, eight_bit: bool) -> Tensor:
    """What three updates change of a small tensor."""
    size, codes = 5 * BLOCK + 100, [code_values(signed) for signed in (True, False)]
    middle = torch.cat([midpoints(codes[0]), torch.zeros(1), midpoints(codes[1])]).to(device)
    start, *grads = (torch.sin(torch.arange(size, device=device) * (1.0 + number)) for number in range(4))
    weight = start.clone().to(torch.float32 if rounding == "fp32" else torch.bfloat16)
    moment = torch.uint8 if eight_bit else torch.float32
    states = {key: torch.zeros(size, dtype=moment, device=device) for key in ("first", "second")}
    if eight_bit:
        states |= {key: torch.zeros(-(-size // BLOCK), device=device) for key in ("absmax1", "absmax2")}
    if rounding == "bf16_kahan":
        states["compensation"] = torch.zeros_like(weight)
    for step, grad in enumerate(grads, 1):
        update = Update(rounding, step, 0.01, 0.1, 0.9, 0.95, 1e-8, step, None, torch.cat(codes).to(device), middle)
        apply(update, weight, grad.to(weight.dtype), states, 0, None)
    return weight.float() + states.get("compensation", torch.zeros_like(weight)) - start
