"""The GPUs of this machine: what the driver lists (nvidia-smi) and what torch can use."""

import re
import subprocess
from dataclasses import dataclass, replace
from typing import Any, Literal

GIB = 1024**3
GPU_USE_FIELDS = "index,name,utilization.gpu,memory.used,memory.total,temperature.gpu,power.draw"


@dataclass(frozen=True)
class DetectedGpu:
    """One GPU as the driver or torch reports it; `driver` and `cuda` are the driver's version and its newest CUDA."""

    index: int
    name: str
    memory_bytes: int
    used_bytes: int | None
    capability: tuple[int, int] | None
    driver: str | None
    cuda: tuple[int, int] | None
    via: Literal["torch", "nvidia-smi"]

    @property
    def memory_gib(self) -> float:
        return self.memory_bytes / GIB


def gpus() -> list[DetectedGpu]:
    """Through torch where it is installed and sees any, with the driver's version; else through nvidia-smi."""
    return merge_gpus(driver_gpus(), torch_gpus())


def merge_gpus(by_driver: list[DetectedGpu], by_torch: list[DetectedGpu]) -> list[DetectedGpu]:
    if not by_torch or not by_driver:
        return by_torch or by_driver
    first = by_driver[0]  # one driver serves every GPU; the order may differ under CUDA_VISIBLE_DEVICES
    return [replace(seen, driver=first.driver, cuda=first.cuda) for seen in by_torch]


def driver_gpus() -> list[DetectedGpu]:
    """What nvidia-smi lists; empty where there is no driver. A driver that fails to answer raises RuntimeError."""
    rows = _ask("index,name,memory.total,memory.used,driver_version,compute_cap")
    if rows is None:  # older drivers do not know compute_cap
        rows = _ask("index,name,memory.total,memory.used,driver_version")
    if not rows:
        return []
    cuda = _driver_cuda()
    return [_from_row(row, cuda) for row in rows]


def gpu_use() -> list[dict[str, Any]]:
    """How busy each GPU is: percent, bytes, °C, W; None where the driver does not know. [] where it does not answer."""
    try:
        return gpu_use_of_rows(_ask(GPU_USE_FIELDS) or [])
    except RuntimeError:
        return []


def gpu_use_of_rows(rows: list[list[str]]) -> list[dict[str, Any]]:
    """Of cells in the order of GPU_USE_FIELDS."""
    found = []
    for index, name, *cells in (row for row in rows if len(row) == GPU_USE_FIELDS.count(",") + 1):
        utilization, used, total, temperature, power = (_number(cell) for cell in cells)
        found.append({
            "index": index, "name": name, "utilization": utilization, "temperature": temperature, "power": power,
            "memory_used": used and used * 2**20, "memory_total": total and total * 2**20,
        })  # fmt: skip
    return found


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:  # [N/A]
        return None


def torch_gpus() -> list[DetectedGpu]:
    """What torch can use; empty without torch or without CUDA."""
    try:
        import torch
    except ModuleNotFoundError:
        return []
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        props = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        capability = (int(props.major), int(props.minor))
        size = int(props.total_memory)
        found.append(DetectedGpu(index, str(props.name), size, int(total - free), capability, None, None, "torch"))
    return found


def _ask(fields: str) -> list[list[str]] | None:
    """Rows of a query; [] when there is no nvidia-smi or no GPU, None when it does not know a field."""
    try:
        done = subprocess.run(gpu_query(fields), capture_output=True, text=True, timeout=15, check=False)
    except FileNotFoundError:
        return []
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"nvidia-smi did not answer: {error}") from error
    output = (done.stdout + done.stderr).strip()
    if "is not a valid field" in output:
        return None
    if "No devices were found" in output:
        return []
    if done.returncode != 0:
        raise RuntimeError(f"nvidia-smi failed: {output.splitlines()[0] if output else done.returncode}")
    return split_rows(done.stdout)


def gpu_query(fields: str) -> list[str]:
    return ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]


def split_rows(output: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split(",")] for line in output.splitlines() if line.strip()]


def _driver_cuda() -> tuple[int, int] | None:
    done = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=15, check=False)
    found = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", done.stdout)
    return (int(found[1]), int(found[2])) if found else None


def _from_row(row: list[str], cuda: tuple[int, int] | None) -> DetectedGpu:
    index, name, total, used, driver = row[:5]
    capability = None
    if len(row) > 5 and re.fullmatch(r"\d+\.\d+", row[5]):
        major, _, minor = row[5].partition(".")
        capability = (int(major), int(minor))
    # nvidia-smi prints [N/A] for MIG slices and some cards
    size = int(total) * 1024**2 if total.isdigit() else 0
    taken = int(used) * 1024**2 if used.isdigit() else None
    return DetectedGpu(int(index), name, size, taken, capability, driver, cuda, "nvidia-smi")
