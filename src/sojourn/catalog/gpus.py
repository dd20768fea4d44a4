"""The GPUs of the catalogue, found by whatever people and drivers call them: "4090", "NVIDIA A100-SXM4-80GB"."""

import difflib
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from unicodedata import normalize

from sojourn.catalog.tables import load_rows, read_once, to_row, user_file
from sojourn.config.messages import printable
from sojourn.errors import UserError

_PCIE_LANE_GBS = {3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}  # one lane, one direction
_NOISE = re.compile(
    r"^(nvidia|geforce|tesla|quadro|apple|amd|instinct|huawei|ascend|昇腾|gpu|graphics|card|rtx|hbm\d?e?|sxm\d?"
    r"|generation|blackwell|server|workstation|edition|ac)$"
)
_MEMORY = re.compile(r"^(\d+)(gb|gib|g)$")
_COUNTED = (  # "2xT4", "2 × T4", "T4x2", "T4*2", "T4:2"
    re.compile(r"(?P<count>[1-9]\d{0,2})\s*[x×*]\s*(?P<name>[^\W_].*)", re.IGNORECASE),
    re.compile(r"(?P<name>.+?)\s*(?:[x×*:])\s*(?P<count>[1-9]\d{0,2})", re.IGNORECASE),
)
SUSTAINED = ("matmul_tflops", "attention_tflops", "copy_gbs", "launch_us", "allreduce_gbs", "disk_mbs")
RATES = ("measured", "published", "data sheet")  # how well a card's sustained rates are known


@dataclass(frozen=True)
class Gpu:
    """One GPU. TFLOP/s are dense with 32-bit accumulation; None where the hardware or the vendor gives none.

    Data sheets give the rates of the boost clock. What a card sustains (`matmul_tflops` and the five below it) stands
    beside them where somebody measured it; `rates` says who: "measured" is by us, "published" by others.
    """

    name: str
    memory_gib: float
    bandwidth_gbs: float
    source: str
    date: str
    usable_gib: float | None = None
    fp32_tflops: float | None = None
    tf32_tflops: float | None = None
    bf16_tflops: float | None = None
    fp16_tflops: float | None = None
    fp8_tflops: float | None = None
    capability: tuple[int, int] | None = None
    nvlink_gbs: float | None = None
    nvlink_peers: int | None = None
    pcie_gen: int | None = None
    pcie_lanes: int = 16
    unified: bool = False
    note: str = ""
    not_run: str = ""
    refused: str = ""
    watts: float | None = None
    matmul_tflops: float | None = None
    attention_tflops: float | None = None
    copy_gbs: float | None = None
    launch_us: float | None = None
    allreduce_gbs: float | None = None
    disk_mbs: float | None = None
    rates: str = "data sheet"
    rates_source: str = ""

    @property
    def plan_gib(self) -> float:
        """Memory a plan may count on: what torch sees, or 75 % of memory shared with the CPU."""
        if self.usable_gib is not None:
            return self.usable_gib
        return self.memory_gib * (0.75 if self.unified else 0.97)

    @property
    def pcie_gbs(self) -> float | None:
        """GB/s to the host or another card, one direction, as the bus could do it at most."""
        lane = _PCIE_LANE_GBS.get(self.pcie_gen or 0)
        return None if lane is None else lane * self.pcie_lanes


@read_once
def gpus(user: Path | None = None) -> tuple[Gpu, ...]:
    """Every GPU of the catalogue and of the user's own file."""
    return tuple(_gpu(name, row, f'{where}: gpu."{name}"') for name, (row, where) in load_rows("gpu", user).items())


def _gpu(name: str, row: dict[str, Any], where: str) -> Gpu:
    found = to_row(Gpu, {"name": name, **row}, where, "GPU")
    for key in ("memory_gib", "bandwidth_gbs", *SUSTAINED):
        if getattr(found, key) == 0:
            raise UserError(f"{where}: `{key}` is 0: no GPU has that")
    if found.usable_gib is not None and not 0 < found.usable_gib <= found.memory_gib:
        raise UserError(f"{where}: `usable_gib` is {found.usable_gib:g}: it must be between 0 and memory_gib")
    if found.rates not in RATES:
        raise UserError(f"{where}: `rates` is '{printable(found.rates)}': it must be {', '.join(RATES)}")
    if found.pcie_gen is not None and found.pcie_gen not in _PCIE_LANE_GBS:
        raise UserError(f"{where}: `pcie_gen` is {found.pcie_gen}: known are {', '.join(map(str, _PCIE_LANE_GBS))}")
    return found


@lru_cache(1000)
def _parts(name: str) -> tuple[str, float | None, bool]:
    """The model as one word, the memory if the name has it, and whether it has PCIe."""
    model, memory, pcie = [], None, False
    name = normalize("NFKC", name).lower()  # full-width letters and digits are ordinary ones
    for word in re.split(r"[\s\-_/()]+", re.sub("(rtx|昇腾|ascend)", r"\1 ", name)):
        if found := _MEMORY.match(word):
            memory = float(found[1])
        elif word == "pcie":
            pcie = True
        elif word and not _NOISE.match(word):
            model.append(word)
    if len(model) > 1 and re.fullmatch(r"\d{1,3}", model[-1]) and memory is None:  # "a100 80", "4060 Ti 16"
        memory = float(model.pop())
    return "".join(model), memory, pcie


def find_gpu(name: str, memory_gib: float | None = None, user: Path | None = None) -> Gpu:
    """The catalogue's row for a GPU; `memory_gib`, as the driver reports it, settles names sold in two sizes.

    Apple rows name the largest configuration; a smaller one is the same chip with its own memory.
    """
    catalogue = gpus(user)
    model, said_gib, pcie = _parts(name)
    same = [row for row in catalogue if _parts(row.name)[0] == model]
    if not same:
        raise UserError(_unknown(name, model, catalogue))
    form = [row for row in same if _parts(row.name)[2] == pcie] or same
    if said_gib is not None:
        form = [row for row in form if _is_sold_as(said_gib, row)]
    if memory_gib is not None:
        form = [row for row in form if row.unified or 0.85 <= memory_gib / row.memory_gib <= 1.05]
    if len(form) > 1 and said_gib is memory_gib is None:  # without a size, the row that names none is meant
        form = [row for row in form if _parts(row.name)[1] is None] or form
    if len(form) == 1:
        row, given = form[0], said_gib or memory_gib
        return replace(row, memory_gib=min(given, row.memory_gib)) if given and row.unified else row
    if form:
        sizes = " or ".join(f"'{row.name}'" for row in form)
        raise UserError(f"'{printable(name)}' is made in more than one size: say {sizes}")
    sizes = ", ".join(f"'{row.name}' ({row.memory_gib:g} GiB)" for row in same)
    raise UserError(
        f"the catalogue has no '{printable(name)}' of that memory size, only {sizes}; add yours to {user_file()}"
    )


def split_count(text: str) -> tuple[str, int | None]:
    """A GPU's name and how many of it are meant, if the text says: `2xT4`, `T4x2`, `2 × RTX 4090`."""
    text = normalize("NFKC", text).strip()
    for pattern in _COUNTED:
        if found := pattern.fullmatch(text):
            return found["name"].strip(), int(found["count"])
    return text, None


def is_same_model(one: Gpu, other: Gpu) -> bool:
    """Whether two rows are one card on different boards (PCIe, SXM)."""
    return _parts(one.name)[:2] == _parts(other.name)[:2]


def _is_sold_as(said_gib: float, row: Gpu) -> bool:
    """B200 is called 180, 186 and 192 GB; no card is sold in two sizes that near to each other."""
    if row.unified:
        return said_gib <= row.memory_gib
    return abs(row.memory_gib - said_gib) <= max(1.0, row.memory_gib / 15)


def _unknown(name: str, model: str, catalogue: tuple[Gpu, ...]) -> str:
    """Suggests names of the same kind: an Apple chip only for what looks like one."""
    apple = "apple" in name.casefold() or re.match(r"m\d", model) is not None
    known = {_parts(row.name)[0]: row.name for row in catalogue if row.unified == apple and not row.refused}
    close = difflib.get_close_matches(model[:60], known, n=3, cutoff=0.6)
    close = close or [one for one in known if len(model) > 1 and model in one][:3]
    guess = (
        f"did you mean {' or '.join(known[c] for c in close)}?"
        if close
        else "it knows cards like RTX 4090 or A100 80GB."
    )
    return f"no GPU called '{printable(name)}' in the catalogue; {guess} Your own cards go into {user_file()}"


def peak_flops(gpu_name: str, precision: str, memory_gib: float | None = None) -> float | None:
    """The most FLOP/s of a GPU as torch names it, in bf16 or fp16 (dense); None where the catalogue cannot tell."""
    try:
        row = find_gpu(gpu_name, memory_gib)
    except UserError:
        return None
    tflops = {"bf16": row.bf16_tflops, "fp16": row.fp16_tflops}.get(precision)
    return None if tflops is None else 1e12 * tflops
