"""Probes of the hardware: CPU cores and memory as usable here, and every GPU with its row in the catalogue."""

from pathlib import Path

from sojourn.catalog.gpus import find_gpu
from sojourn.errors import UserError
from sojourn.machine import hardware
from sojourn.machine.finding import Finding, gib
from sojourn.machine.gpus import DetectedGpu

GIB = 1024**3


def processor(root: Path) -> Finding:
    cpu = hardware.cpu(root)
    physical = f", {cpu.physical} physical" if cpu.physical and cpu.physical != cpu.logical else ""
    message = f"{cpu.model}: {cpu.usable:g} cores usable"
    if cpu.limited_by:
        message += f" of {cpu.logical} ({cpu.limited_by})"
    data = {"model": cpu.model, "logical": cpu.logical, "physical": cpu.physical, "usable": cpu.usable}
    return Finding("cpu", "ok", message + physical, data=data)


def memory(root: Path) -> Finding:
    ram = hardware.memory(root)
    message = f"{gib(ram.available)} free of {gib(ram.limit)}"
    if ram.limited_by:
        message += f" ({ram.limited_by}; the machine has {gib(ram.total)})"
    data = {"limit_bytes": ram.limit, "available_bytes": ram.available, "total_bytes": ram.total}
    if ram.available < 2 * GIB:
        return Finding("ram", "warn", f"{message}: loading a model may be killed", "stop other programs", data)
    return Finding("ram", "ok", message, data=data)


def cards(seen: list[DetectedGpu]) -> list[Finding]:
    """One finding a GPU; none is no fault, since everything also runs on the CPU."""
    if not seen:
        message = "none; training runs on the CPU. To see what renting one costs: sojourn plan RUN"
        return [Finding("gpu", "ok", message, data={"count": 0})]
    return [_card(card) for card in seen]


def _card(card: DetectedGpu) -> Finding:
    parts = [f"{card.name}, {gib(card.memory_bytes)}"]
    if card.capability:
        parts.append(f"compute capability {card.capability[0]}.{card.capability[1]}")
    if card.driver:
        parts.append(f"driver {card.driver}" + (f" (CUDA {card.cuda[0]}.{card.cuda[1]})" if card.cuda else ""))
    try:
        row = find_gpu(card.name, card.memory_gib).name
        parts.append(f"catalogue: {row}")
    except UserError:
        row = None
        parts.append("not in the catalogue, so plans for it need your own row")
    data = {
        "index": card.index,
        "name": card.name,
        "memory_bytes": card.memory_bytes,
        "used_bytes": card.used_bytes,
        "capability": card.capability,
        "driver": card.driver,
        "driver_cuda": card.cuda,
        "catalogue": row,
    }
    name = f"gpu {card.index}"
    if card.used_bytes is not None and card.memory_bytes and card.used_bytes > 0.2 * card.memory_bytes:
        parts.append(f"{gib(card.used_bytes)} used by other processes")
        return Finding(name, "warn", ", ".join(parts), "nvidia-smi shows who holds it", data)
    return Finding(name, "ok", ", ".join(parts), data=data)
