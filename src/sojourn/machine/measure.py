"""What this machine's GPU sustains, measured in a minute: `sojourn doctor --measure` and `sojourn rehearse`.

Matmuls and attention as training has them, forward and backward, with random numbers and long enough for a power limit
to act; a copy in memory; what the CPU needs to launch a small operation; the disk; an all-reduce where there are
several GPUs. The row goes into the user's catalogue, and plans for that card then use it.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from sojourn.catalog.gpus import find_gpu
from sojourn.catalog.user_rows import add_row
from sojourn.errors import UserError
from sojourn.machine.finding import guarded
from sojourn.machine.gpus import DetectedGpu
from sojourn.machine.probe_disk import write_and_read

_TOKENS = 8192
_SHAPES = ((4096, 4096), (4096, 11008), (11008, 4096))  # inputs and outputs of a 7B's linear layers
_HEADS, _HEAD_DIM = 32, 128
ATTENTION_LENGTH = 4096  # tokens; estimate/fit.toml has the same
_COPY_BYTES, _DISK_BYTES = 2**30, 2**28
_OPERATIONS, _REPEATS = 300, 9
_TIMEOUT = 480.0  # seconds of an all-reduce: torchrun has to start
_BUSY = 2**30  # bytes that other processes use, from which on they disturb


@dataclass(frozen=True)
class Size:
    """How much is measured: on a CPU, and in tests, little."""

    seconds: float = 6.0
    scale: int = 1  # by how much less each side of a matmul, and the tokens of attention, are


@dataclass(frozen=True)
class Measurement:
    """`values` by the keys of the catalogue's GPUs; `failed`: what could not be measured, and why."""

    device: str
    name: str
    values: dict[str, float]
    failed: dict[str, str]
    how: str


def measure(
    home: Path, cards: list[DetectedGpu], size: Size | None = None, env: Mapping[str, str] = os.environ
) -> Measurement:
    """Of the first GPU, or of the CPU where there is none."""
    try:
        import torch
    except ImportError:
        raise UserError("--measure: needs torch here; it is installed with: pip install torch") from None
    device = "cuda" if cards and torch.cuda.is_available() else "cpu"
    size = size or (Size() if device == "cuda" else Size(seconds=0.3, scale=16))
    parts: dict[str, Callable[[], float]] = {
        "matmul_tflops": lambda: matmul_tflops(device, size),
        "attention_tflops": lambda: attention_tflops(device, size),
        "copy_gbs": lambda: copy_gbs(device, size),
        "launch_us": lambda: launch_us(device),
        "disk_mbs": lambda: write_and_read(home, _DISK_BYTES // size.scale),
    }
    if device == "cuda" and len(cards) > 1:
        parts["allreduce_gbs"] = lambda: allreduce_gbs(len(cards), env)
    values: dict[str, float] = {}
    failed: dict[str, str] = {}
    for key, part in parts.items():
        try:
            values[key] = _rounded(part())
        except (RuntimeError, OSError) as error:  # one that fails must not hide the others
            failed[key] = (str(error).splitlines() or [type(error).__name__])[0]
        if device == "cuda":
            torch.cuda.empty_cache()
    how = f"sojourn doctor --measure, {date.today().isoformat()}, torch {torch.__version__}"
    return Measurement(device, cards[0].name if cards else "CPU", values, failed, how)


def matmul_tflops(device: str, size: Size) -> float:
    """Of forward, input gradient and weight gradient, in turns; the last half of the time, when clocks have settled."""
    import torch

    dtype, calls, flops = _dtype(device), [], 0.0
    tokens = _TOKENS // size.scale
    for inputs, outputs in _SHAPES:
        k, n = inputs // size.scale, outputs // size.scale
        x, weight, grad = (
            torch.randn(*shape, device=device, dtype=dtype) for shape in ((tokens, k), (n, k), (tokens, n))
        )
        calls += [_call(torch.mm, x, weight.t()), _call(torch.mm, grad, weight), _call(torch.mm, grad.t(), x)]
        flops += 3 * 2.0 * tokens * k * n
    return flops / _settled(device, calls, size.seconds) / 1e12


def attention_tflops(device: str, size: Size) -> float:
    """Causal, forward and backward: 3.5 times the forward's FLOPs, as plans count them."""
    import torch

    length = ATTENTION_LENGTH // size.scale
    shape = (2, _HEADS // min(size.scale, 8), length, _HEAD_DIM)
    query, key, value = (torch.randn(*shape, device=device, dtype=_dtype(device), requires_grad=True) for _ in range(3))
    grad = torch.randn(*shape, device=device, dtype=_dtype(device))

    def both() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(out, (query, key, value), grad)

    forward = 2.0 * shape[0] * shape[1] * length**2 * _HEAD_DIM
    return 4 * 3.5 * forward / _settled(device, [both] * 4, size.seconds / 3) / 1e12


def copy_gbs(device: str, size: Size) -> float:
    import torch

    count = _COPY_BYTES // size.scale
    source = torch.randint(0, 255, (count,), device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 20 * 2 * count / _settled(device, 20 * [_call(target.copy_, source)], size.seconds / 6) / 1e9


def launch_us(device: str) -> float:
    """Microseconds of one small operation, forward and backward, for the CPU that launches it."""
    import torch

    one, times = torch.ones(1, device=device, requires_grad=True), []
    for _ in range(_REPEATS):
        _synchronize(device)  # else a GPU that is behind makes it wait
        began, made = time.perf_counter(), one
        for _ in range(_OPERATIONS):
            made = made * 1.0
        torch.autograd.grad(made, one)
        times.append(time.perf_counter() - began)
    return 1e6 * statistics.median(times) / _OPERATIONS


def allreduce_gbs(count: int, env: Mapping[str, str]) -> float:
    from sojourn.machine.probe_parallel import measure as measure_all_reduce

    found = guarded("all-reduce", lambda: measure_all_reduce(count, env), seconds=_TIMEOUT)
    speeds = [float(one.data["gb_per_s"]) for one in found if one.data and "gb_per_s" in one.data]
    if not speeds:
        raise RuntimeError(found[0].message if found else "no answer")
    return speeds[0]


def _settled(device: str, calls: list[Callable[[], Any]], seconds: float) -> float:
    """Seconds of one round of all calls, over the last half of `seconds`."""
    for call in calls:
        call()
    _synchronize(device)
    began, rounds = time.perf_counter(), list[float]()
    while len(rounds) < 3 or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        for call in calls:
            call()
        _synchronize(device)
        rounds.append(time.perf_counter() - start)
    return statistics.median(rounds[len(rounds) // 2 :])


def _call(function: Callable[..., Any], *values: Any) -> Callable[[], Any]:
    return lambda: function(*values)


def _synchronize(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def _dtype(device: str) -> Any:
    """As training chooses it: bf16 from Ampere on, fp16 before, fp32 on a CPU."""
    import torch

    if device != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def catalogue_row(found: Measurement, card: DetectedGpu) -> tuple[str, dict[str, Any]]:
    """The card's name in the catalogue and what to write there; a card that it does not have gets a whole row."""
    row: dict[str, Any] = {**found.values, "rates": "measured", "rates_source": found.how}
    try:
        return find_gpu(card.name, card.memory_gib).name, row
    except UserError:
        matmul, copied = found.values.get("matmul_tflops"), found.values.get("copy_gbs")
        if matmul is None or copied is None:
            raise UserError(
                f"{card.name} is not in the catalogue, and its matmuls or its memory could not be measured"
            ) from None
        kind = "bf16_tflops" if card.capability and card.capability >= (8, 0) else "fp16_tflops"
        whole = {"memory_gib": round(card.memory_gib, 1), "bandwidth_gbs": round(copied / 0.89), kind: matmul}
        capability = {"capability": ".".join(map(str, card.capability))} if card.capability else {}
        return card.name, {**whole, **capability, **row}


def write_row(found: Measurement, card: DetectedGpu) -> tuple[Path, str]:
    """Into the user's catalogue; the file, and the card's name there."""
    name, row = catalogue_row(found, card)
    return add_row("gpu", name, row)[0], name


_WORDS = {
    "matmul_tflops": ("matmuls", "TFLOP/s"), "attention_tflops": ("attention", "TFLOP/s"),
    "copy_gbs": ("memory", "GB/s"), "launch_us": ("a small operation takes the CPU", "µs"),
    "disk_mbs": ("disk", "MB/s"), "allreduce_gbs": ("all-reduce", "GB/s"),
}  # fmt: skip


def describe(found: Measurement, cards: list[DetectedGpu], written: tuple[Path, str] | None) -> list[str]:
    """What was measured, and where it is now."""
    lines = [f"{_WORDS[key][0]}: {value:g} {_WORDS[key][1]}" for key, value in found.values.items()]
    lines += [f"{_WORDS[key][0]}: not measured: {why}" for key, why in found.failed.items()]
    used = cards[0].used_bytes if cards else None
    if used is not None and used > _BUSY:
        lines.append(f"note: {used / 2**30:.1f} GiB of its memory were in use by others: measure again when it is idle")
    if written is None:
        return [*lines, "no GPU here: nothing was written, since plans are for GPUs"]
    path, name = written
    return [*lines, f"written to {path} as {name}: plans for it use this now; to send it to us: sojourn plan --share"]
