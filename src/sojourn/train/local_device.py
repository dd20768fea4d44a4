"""Describes the device that this rank trains on, so that `resolve/` can decide every `auto` for it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from sojourn.catalog.gpus import Gpu, find_gpu
from sojourn.catalog.models import ModelSpec
from sojourn.config.schema import RunConfig
from sojourn.errors import UserError
from sojourn.machine.precision import choose_device, choose_precision
from sojourn.machine.probe_software import find_gcc, importable
from sojourn.model import attention
from sojourn.plan.calibration import correction
from sojourn.resolve.attention import supported_attention
from sojourn.resolve.device_spec import PACKAGES, DeviceSpec


def local_device(config: RunConfig, model: ModelSpec, ranks: int = 1) -> DeviceSpec:
    """Measures what must be measured: the precision on a CPU, free memory, and whether attention kernels run."""
    import torch

    device_type = choose_device(config.train.device)
    given = config.train.precision
    precision, reason = choose_precision(device_type) if given == "auto" else (str(given), "given")
    cuda = device_type == "cuda"
    device = DeviceSpec(
        device_type=device_type,
        name=torch.cuda.get_device_name() if cuda else device_type,
        precision=precision,
        precision_reason=reason,
        compute_capability=torch.cuda.get_device_capability() if cuda else None,
        free_bytes=_free_bytes(device_type),
        memory_correction=max(1.0, correction().memory),
        gpu=local_gpu() if cuda else None,
        ranks=ranks,
        torch_version=_torch_version(),
        packages=frozenset(filter(importable, PACKAGES)),
        has_gcc=find_gcc() is not None,
    )
    return _smoke_tested(device, model) if config.train.attention == "auto" else device


def local_gpu() -> Gpu | None:
    """The catalogue's row for the current GPU, if it has one."""
    import torch

    with suppress(UserError):
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return find_gpu(properties.name, properties.total_memory / 2**30)
    return None


def _free_bytes(device_type: str) -> float | None:
    import torch

    if device_type == "cuda":
        return float(torch.cuda.mem_get_info()[0])
    return float(torch.mps.recommended_max_memory()) if device_type == "mps" else None


def _torch_version() -> tuple[int, int]:
    import torch

    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _smoke_tested(device: DeviceSpec, model: ModelSpec) -> DeviceSpec:
    """Tries attention backends, the fastest first, until one works: a build may lack the kernels for just this GPU."""
    failed = set[str]()
    for name in supported_attention(model, device.precision, device):
        if attention.smoke_test(name, device.device_type, device.precision, model.head_dim):
            break
        failed.add(name)
    return replace(device, failed_attention=frozenset(failed))
