"""Probes of the hardware: CPU cores and memory as usable here, and every GPU with its place in the catalogue."""

from pathlib import Path

from sojourn.catalog.gpus import find_gpu
from sojourn.errors import UserError
from sojourn.machine import hardware
from sojourn.machine.finding import Finding, gib
from sojourn.machine.gpus import GpuSeen

GIB = 1024**3


def processor(root: Path) -> Finding:
    cpu = hardware.cpu(root)
    physical = f", {cpu.physical} physical" if cpu.physical and cpu.physical != cpu.logical else ""
    says = f"{cpu.model}: {cpu.usable:g} cores usable"
    if cpu.limited_by:
        says += f" of {cpu.logical} ({cpu.limited_by})"
    data = {"model": cpu.model, "logical": cpu.logical, "physical": cpu.physical, "usable": cpu.usable}
    return Finding("cpu", "ok", says + physical, data=data)


def memory(root: Path) -> Finding:
    ram = hardware.memory(root)
    says = f"{gib(ram.available)} free of {gib(ram.limit)}"
    if ram.limited_by:
        says += f" ({ram.limited_by}; the machine has {gib(ram.total)})"
    data = {"limit_bytes": ram.limit, "available_bytes": ram.available, "total_bytes": ram.total}
    if ram.available < 2 * GIB:
        return Finding("ram", "warn", f"{says}: loading a model may be killed", "end what else is running", data)
    return Finding("ram", "ok", says, data=data)


def cards(seen: list[GpuSeen]) -> list[Finding]:
    """One finding a GPU; none is no fault, since everything also runs on the CPU."""
    if not seen:
        says = "none; training runs on the CPU. To see what renting one costs: sojourn plan RUN"
        return [Finding("gpu", "ok", says, data={"count": 0})]
    return [_card(card) for card in seen]


def _card(card: GpuSeen) -> Finding:
    says = [f"{card.name}, {gib(card.memory_bytes)}"]
    if card.capability:
        says.append(f"compute capability {card.capability[0]}.{card.capability[1]}")
    if card.driver:
        says.append(f"driver {card.driver}" + (f" (CUDA {card.cuda[0]}.{card.cuda[1]})" if card.cuda else ""))
    try:
        row = find_gpu(card.name, card.memory_gib).name
        says.append(f"catalogue: {row}")
    except UserError:
        row = None
        says.append("not in the catalogue, so plans for it need your own row")
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
        says.append(f"{gib(card.used_bytes)} of it taken by other processes")
        return Finding(name, "warn", ", ".join(says), "nvidia-smi shows who holds it", data)
    return Finding(name, "ok", ", ".join(says), data=data)
