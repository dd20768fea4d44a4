"""The device of a rank as far as decisions depend on it. Plans describe a GPU of the catalogue, `train/local_device.py`
describes the machine that it runs on."""

from __future__ import annotations

from dataclasses import dataclass

from sojourn.catalog.gpus import Gpu
from sojourn.config.attention_backends import ATTENTION_BACKENDS
from sojourn.config.schema import RunConfig
from sojourn.estimate.memory import memory_budget
from sojourn.machine.precision import cuda_precision

_TRITON_CAPABILITY = (7, 0)
# What `pip install sojourn[train]` brings to a rented machine: see pyproject.toml and constraints.txt.
_RENTED_TORCH = (2, 11)
_RENTED_PACKAGES = frozenset({"triton", "tensorboard"})
HOPPER_PACKAGES = frozenset({"quack", "flash_attn.cute"})
_ATTENTION_PACKAGES = frozenset(backend.package for backend in ATTENTION_BACKENDS.values() if backend.package)
PACKAGES = _RENTED_PACKAGES | HOPPER_PACKAGES | _ATTENTION_PACKAGES  # that decisions ask for


@dataclass(frozen=True)
class DeviceSpec:
    """One rank's device, and the software beside it.

    name               for messages
    precision          what `train.precision=auto` means here, and why; measured where it must be
    free_bytes         memory that the run may take; None where it is not planned, as on a CPU
    memory_correction  measured over planned memory of earlier runs, 1 or more
    gpu                the catalogue's row, where it has one
    ranks              of the whole run
    packages           importable modules, of those that decisions ask for
    failed_attention   attention backends that failed their smoke test
    has_gcc            whether gcc can compile kernels for this CPU
    """

    device_type: str
    name: str
    precision: str
    precision_reason: str = ""
    compute_capability: tuple[int, int] | None = None
    free_bytes: float | None = None
    memory_correction: float = 1.0
    gpu: Gpu | None = None
    ranks: int = 1
    torch_version: tuple[int, int] = _RENTED_TORCH
    packages: frozenset[str] = _RENTED_PACKAGES
    failed_attention: frozenset[str] = frozenset()
    has_gcc: bool = False

    @property
    def has_triton(self) -> bool:
        """Whether torch can compile kernels of its own for this device."""
        capable = self.compute_capability is not None and self.compute_capability >= _TRITON_CAPABILITY
        return capable and "triton" in self.packages

    @property
    def memory_budget(self) -> float | None:
        """Bytes that a run may be planned into."""
        return None if self.free_bytes is None else memory_budget(self.free_bytes, self.ranks) / self.memory_correction


def catalog_device(config: RunConfig, gpu: Gpu, ranks: int = 1, memory_correction: float = 1.0) -> DeviceSpec:
    """A rented GPU: all its usable memory is free, and the software is what Sojourn installs there, with the packages
    that the configuration names."""
    precision, reason = _catalog_precision(gpu)
    named = ATTENTION_BACKENDS[config.train.attention].package if config.train.attention != "auto" else None
    packages = (
        _RENTED_PACKAGES
        | ({named} if named else set())
        | (HOPPER_PACKAGES if config.advanced.hopper_kernels == "on" else set())
    )
    return DeviceSpec(
        device_type="mps" if gpu.unified else "cuda",
        name=gpu.name,
        precision=precision,
        precision_reason=reason,
        compute_capability=gpu.capability,
        free_bytes=gpu.plan_gib * 2**30,
        memory_correction=max(1.0, memory_correction),
        gpu=gpu,
        ranks=ranks,
        packages=packages,
    )


def _catalog_precision(gpu: Gpu) -> tuple[str, str]:
    if gpu.capability is not None:
        return cuda_precision(gpu.capability)
    if gpu.unified:
        return "bf16", "Apple GPUs compute in bf16 from macOS 14 on"
    return ("bf16", "the catalogue has its bf16 rate") if gpu.bf16_tflops else ("fp32", "no bf16 rate in the catalogue")
