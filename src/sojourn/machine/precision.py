"""Chooses the device and the precision for training, each with the reason in one line."""

import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, cast

from sojourn.errors import UserError

Device = Literal["cuda", "mps", "cpu"]
Precision = Literal["bf16", "fp16", "fp32"]
Capability = tuple[int, int]

INSTALL_TORCH = "pip install 'sojourn[train]'"


def choose_device(requested: str = "auto") -> Device:
    """`auto` takes CUDA, then Apple's MPS, then the CPU; a device asked for by name is there or it is an error."""
    kind = requested.partition(":")[0].lower()
    if kind not in ("auto", "cuda", "mps", "cpu"):
        raise UserError(f"unknown device '{requested}': say auto, cuda, mps or cpu")
    try:
        import torch
    except ModuleNotFoundError as error:
        if kind in ("auto", "cpu"):
            return "cpu"
        raise UserError(f"device '{requested}' needs torch, which is not installed: {INSTALL_TORCH}") from error
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if kind == "auto":
        return cast(Device, next(name for name, works in there.items() if works))
    if not there[kind]:
        raise UserError(f"device '{requested}' is not usable on this machine; run sojourn doctor to see why")
    return cast(Device, kind)


def choose_precision(device: str, capability: Capability | None = None) -> tuple[Precision, str]:
    """bf16 or fp16 where the device runs it fast, else fp32, and why. Refuses a GPU that torch has no kernels for."""
    kind = device.partition(":")[0]
    if kind == "cuda":
        return _for_cuda(capability or _torch_capability())
    if kind == "mps":
        return _for_mps()
    return _for_cpu()


def has_kernels(capability: Capability, built_for: Sequence[str]) -> bool:
    """Whether a torch build with this architecture list runs on the GPU: same major and not newer, or through PTX."""
    for name in built_for:
        kind, _, digits = name.partition("_")
        number = "".join(c for c in digits if c.isdigit())
        if len(number) < 2:
            continue
        built = (int(number[:-1]), int(number[-1]))
        if kind == "sm" and built[0] == capability[0] and built[1] <= capability[1]:
            return True
        if kind == "compute" and built <= capability:
            return True
    return False


def _for_cuda(capability: Capability) -> tuple[Precision, str]:
    version = f"{capability[0]}.{capability[1]}"
    built_for = _torch_built_for()
    if built_for and not has_kernels(capability, built_for):
        raise UserError(
            f"this torch has no kernels for compute capability {version} (it has {', '.join(built_for)}): "
            + _other_build(capability)
        )
    if capability < (7, 0) and not built_for:
        raise UserError(f"compute capability {version} (P100 and older): {_other_build(capability)}")
    return cuda_precision(capability)


def cuda_precision(capability: Capability) -> tuple[Precision, str]:
    """The precision for a GPU of this compute capability, and why."""
    version = f"{capability[0]}.{capability[1]}"
    if capability < (7, 0):
        return "fp32", f"compute capability {version} has no tensor cores: fp16 training gains nothing here"
    if capability < (8, 0):
        return "fp16", f"compute capability {version} has no bf16 arithmetic (it came with 8.0): fp16 with loss scaling"
    return "bf16", f"compute capability {version} has bf16 tensor cores: no loss scaling needed"


def _other_build(capability: Capability) -> str:
    if capability < (7, 0):
        return "current torch builds are not made for it; rent a T4 or newer (on Kaggle choose GPU T4 x2)"
    return f"use an image whose torch is built for it (wheels: download.pytorch.org/whl/{wheel_for(None, capability)})"


def wheel_for(driver_cuda: tuple[int, int] | None, capability: Capability | None) -> str:
    """The tag of torch's wheel index that suits a driver and a GPU (torch >= 2.6 has cu118, cu126, cu128, cu130)."""
    if capability is not None and capability < (7, 5):
        return "cu126"  # the newer builds dropped Pascal and Volta
    if driver_cuda is not None and driver_cuda < (12, 0):
        return "cu118"
    if driver_cuda is not None and driver_cuda >= (13, 0):
        return "cu130"
    blackwell = capability is not None and capability >= (10, 0)
    return "cu128" if blackwell or (driver_cuda is not None and driver_cuda >= (12, 8)) else "cu126"


def _torch_capability() -> Capability:
    import torch

    major, minor = torch.cuda.get_device_capability()
    return int(major), int(minor)


def _torch_built_for() -> list[str]:
    try:
        import torch
    except ModuleNotFoundError:
        return []
    if not torch.cuda.is_available() or torch.version.cuda is None:  # ROCm names its architectures otherwise
        return []
    return list(torch.cuda.get_arch_list())


def _for_mps() -> tuple[Precision, str]:
    import platform

    version = platform.mac_ver()[0]
    if int(version.partition(".")[0] or 0) < 14:
        return "fp32", f"macOS {version or 'of unknown version'}: bf16 on the GPU came with macOS 14"
    import torch

    try:
        x = torch.ones(32, 32, device="mps", dtype=torch.bfloat16)
        right = bool((x @ x == 32).all().item())
    except (RuntimeError, TypeError) as error:
        return "fp32", f"a bf16 matmul on the Apple GPU failed: {str(error).splitlines()[0]}"
    return ("bf16", "a bf16 matmul on the Apple GPU works") if right else ("fp32", "bf16 on the Apple GPU is wrong")


def _for_cpu() -> tuple[Precision, str]:
    feature = cpu_bf16_feature()
    if feature is None:
        return "fp32", "this CPU has no bf16 instructions: bf16 would be emulated, many times slower"
    try:
        gain = _cpu_bf16_gain()
    except ModuleNotFoundError:
        return "fp32", "torch is not installed, so bf16 could not be measured"
    if gain >= 1.5:
        return "bf16", f"{feature}: a bf16 matmul measured {gain:.1f}x the speed of fp32"
    return "fp32", f"{feature} is there, but a bf16 matmul measured only {gain:.2g}x the speed of fp32"


def cpu_bf16_feature(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """The instruction set that multiplies bf16 in hardware, if the CPU lists one."""
    if sys.platform == "darwin":
        import subprocess

        asked = ["sysctl", "-n", "hw.optional.arm.FEAT_BF16"]
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=5, check=False).stdout
        return "ARM BF16" if answer.strip() == "1" else None
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    flags: set[str] = set()
    for line in lines:
        if line.startswith(("flags", "Features")):
            flags.update(line.partition(":")[2].split())
            break
    named = {"amx_bf16": "AMX", "avx512_bf16": "AVX512_BF16", "bf16": "ARM BF16"}
    return next((spoken for flag, spoken in named.items() if flag in flags), None)


@functools.cache
def _cpu_bf16_gain() -> float:
    """How many times faster a bf16 matmul is than fp32 here: best of three each, about 10 ms of work."""
    import torch

    def best(dtype: "torch.dtype") -> float:
        a, b = torch.ones(512, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
        a @ b
        times = []
        for _ in range(3):
            start = time.perf_counter()
            a @ b
            times.append(time.perf_counter() - start)
        return min(times)

    return best(torch.float32) / best(torch.bfloat16)
