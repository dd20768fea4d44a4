"""Probes of torch: is it installed, does it match the driver, are matmuls correct on every device."""

import math
import os
from dataclasses import dataclass
from typing import Any

from sojourn.errors import UserError
from sojourn.machine.finding import Finding, Level, one_line
from sojourn.machine.gpus import DetectedGpu
from sojourn.machine.precision import INSTALL_TORCH, choose_device, choose_precision, wheel_for
from sojourn.machine.probe_software import REQUIRED, installed, satisfies

# Largest relative error of a 256x256 matmul against float64 that rounding explains; fp32 may run as TF32.
ROUNDING = {"fp32": 2e-3, "fp16": 5e-3, "bf16": 2e-2}


@dataclass(frozen=True)
class Torch:
    """What importing torch gave: the module, or the reason why there is none."""

    module: Any
    error: str | None = None


def load() -> Torch:
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name == "torch":
            return Torch(None)
        return Torch(None, one_line(error))
    except Exception as error:  # a broken install raises OSError, ImportError, RuntimeError and others
        return Torch(None, one_line(error))
    return Torch(torch)


def build(torch: Torch, driver: list[DetectedGpu]) -> Finding:
    """torch's version and build against the driver. A CUDA torch that works is never to be replaced."""
    fix = _install(driver)
    if torch.error:
        message = f"installed ({installed('torch') or 'no version'}) but cannot be imported: {torch.error}"
        return Finding("torch", "fail", message, f"in a fresh environment: {fix}")
    if torch.module is None:
        if driver:
            return Finding("torch", "fail", f"not installed, but there is a {driver[0].name}", fix)
        return Finding("torch", "warn", "not installed: planning works, training does not", INSTALL_TORCH)
    version, cuda = str(torch.module.__version__), torch.module.version.cuda
    hip = getattr(torch.module.version, "hip", None)
    usable = bool(torch.module.cuda.is_available())
    made = f"CUDA {cuda} build" if cuda else f"ROCm {hip} build" if hip else "CPU build"
    message, data = f"{version} ({made})", {"version": version, "cuda": cuda, "cuda_usable": usable}
    if driver and not usable:
        return _unusable(message, cuda or hip, driver, fix, data)
    if not satisfies(version, REQUIRED["torch"]):
        apart = "rent an image with a newer torch, or use an environment of its own: python -m venv ~/sojourn-env"
        return Finding(
            "torch", "warn", f"{message}: older than Sojourn is tested with ({REQUIRED['torch']})", apart, data
        )
    return Finding("torch", "ok", message + (", sees the GPU" if usable else ""), data=data)


def _unusable(message: str, cuda: str | None, driver: list[DetectedGpu], fix: str, data: dict[str, Any]) -> Finding:
    name = driver[0].name
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if cuda is None:
        return Finding("torch", "fail", f"{message} on a machine with a {name}: it would train on the CPU", fix, data)
    if hidden is not None and hidden.strip() in ("", "-1"):
        why = f"{message}; CUDA_VISIBLE_DEVICES='{hidden}' hides the {name}"
        return Finding("torch", "fail", why, "unset CUDA_VISIBLE_DEVICES", data)
    newest = driver[0].cuda
    if newest and int(cuda.partition(".")[0]) > newest[0]:
        why = f"{message} needs a newer driver than {driver[0].driver} (CUDA {newest[0]}.{newest[1]})"
        return Finding("torch", "fail", why, f"choose an image for this driver, or: {fix}", data)
    restart = "restart the machine or rent another; nvidia-smi tells whether the driver answers"
    return Finding("torch", "fail", f"{message} cannot use the {name}", restart, data)


def _install(driver: list[DetectedGpu]) -> str:
    if not driver:
        return INSTALL_TORCH
    tag = wheel_for(driver[0].cuda, driver[0].capability)
    return f"pip install 'torch{REQUIRED['torch']}' --index-url https://download.pytorch.org/whl/{tag}"


def precision(torch: Any) -> Finding:
    """The precision that `auto` chooses here, checked by a matmul on every device against float64."""
    device = choose_device("auto")
    devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if device == "cuda" else [device]
    errors: dict[str, float] = {}
    name, reason = "fp32", ""
    for where in devices:
        capability = torch.cuda.get_device_capability(where) if device == "cuda" else None
        try:
            name, reason = choose_precision(device, capability)
        except UserError as error:
            return Finding("precision", "fail", f"{where}: {error}", data={"device": where, "capability": capability})
        errors[where] = matmul_error(torch, where, name)
    worst = max(errors.values())
    data = {
        "device": device,
        "precision": name,
        "reason": reason,
        "relative_error": {p: e if math.isfinite(e) else None for p, e in errors.items()},
    }
    message = f"{name} on {device}: {reason}; a matmul is within {worst:.1g} of float64"
    if not worst < ROUNDING[name]:  # also true for nan
        bad = max(errors, key=lambda where: errors[where])
        message = f"{name} on {bad} computes wrong matmuls: off by {errors[bad]:.2g} from float64"
        return Finding("precision", "fail", message, "do not train on this device: rent another", data)
    return Finding("precision", "ok", message, data=data)


def matmul_error(torch: Any, device: str, name: str) -> float:
    """Relative error of one matmul in this precision on this device, against float64 on the CPU."""
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[name]
    seeded = torch.Generator().manual_seed(0)
    a = torch.randn(256, 256, generator=seeded, dtype=torch.float64).to(dtype)
    b = torch.randn(256, 256, generator=seeded, dtype=torch.float64).to(dtype)
    exact = a.double() @ b.double()
    got = (a.to(device) @ b.to(device)).cpu().double()
    return float((got - exact).norm() / exact.norm())


def bitsandbytes(torch: Any, gpu: bool) -> Finding:
    """NF4 bases and 8-bit optimizers: quantises a small tensor and dequantises it."""
    version = installed("bitsandbytes")
    needs: Level = "warn" if gpu else "ok"
    kept = f"'torch=={installed('torch')}' " if installed("torch") else ""  # the torch that is there stays
    if version is None:
        message = "not installed; only NF4 bases and 8-bit optimizers need it"
        return Finding("bitsandbytes", needs, message, f"pip install {kept}bitsandbytes" if gpu else None)
    device = choose_device("auto")
    try:
        from bitsandbytes import functional

        x = torch.linspace(-1, 1, 4096, device=device, dtype=torch.float16 if gpu else torch.float32)
        packed, state = functional.quantize_4bit(x, quant_type="nf4")
        off = float((functional.dequantize_4bit(packed, state) - x).abs().max())
    except Exception as error:  # its native library fails in many ways
        message = f"{version} does not work: {one_line(error)}"
        return Finding("bitsandbytes", needs, message, "pip install -U --no-deps bitsandbytes" if gpu else None)
    if off > 0.2:
        return Finding("bitsandbytes", "fail", f"{version} quantises wrongly (off by {off:.2g})")
    return Finding("bitsandbytes", "ok", f"{version}: NF4 quantisation works on {device}")
