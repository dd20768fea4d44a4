"""Which Python of a box's image we build on, and what is pinned so that its torch stays as it is."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sojourn.errors import UserError
from sojourn.machine.probe_software import PYTHON, REQUIRED, satisfies
from sojourn.remote.box_facts import BoxFacts
from sojourn.remote.hosts import Host

# torch, and what is built for exactly one torch or one CUDA
_PINNED = (
    "torch", "torchvision", "torchaudio", "torchao", "triton", "pytorch-triton", "xformers", "flash-attn", "apex",
    "transformer-engine",
)  # fmt: skip
_PINNED_PREFIXES = ("nvidia-", "cuda-", "flash-attn-", "pytorch-triton-", "transformer-engine-")
_NEW_PYTHON = "3.12"
_TORCH_SIZE = "downloads about 3 GB and takes about 8 GB of disk"
_CUDA_13_DRIVER = 580
_LAST_CUDA_12_TORCH = "torch<2.11"


@dataclass(frozen=True)
class ImagePython:
    """`python`: None where one has to be made by `make_python`. `row`: the probe's. `torch`: None where it is missing.
    `parents`: site-packages of a venv that ours cannot see by itself; `system`: whether that venv sees those of the
    Python that it was made with."""

    python: str | None
    row: Mapping[str, Any]
    torch: Mapping[str, Any] | None
    make_python: dict[str, str] | None = None
    parents: tuple[str, ...] = ()
    system: bool = True
    constraints: tuple[str, ...] = field(default=())

    def describe(self) -> str:
        if self.python is None or self.torch is None:
            return "torch will be installed"
        built = f"CUDA {self.torch['cuda']}" if self.torch.get("cuda") else "without CUDA"
        version = ".".join(map(str, self.row["version"]))
        return f"Python {version} with torch {self.torch['version']} ({built}) at {self.python}"


def choose_python(facts: BoxFacts, host: Host, install_torch: bool = False) -> ImagePython:
    """The image's Python with a torch that we can use; else one line that says what to do."""
    supported = [row for row in facts.pythons if PYTHON[0] <= tuple(row["version"][:2]) <= PYTHON[1]]
    with_torch = [row for row in supported if row["torch"] and satisfies(row["torch"]["version"], REQUIRED["torch"])]
    if with_torch:
        row = next((row for row in with_torch if row["path"] == host.python), with_torch[0])
        pins = _pins(row["packages"])
        return ImagePython(row["path"], row, row["torch"], None, *_parents(row), pins)
    limits = tuple(_limits(facts))
    if supported and install_torch:
        row = supported[0]
        return ImagePython(row["path"], row, None, None, *_parents(row), limits)
    tool = next(
        ({"name": n, "path": facts.found[n], "version": _NEW_PYTHON} for n in ("uv", "conda") if facts.found[n]), None
    )
    if install_torch and tool is not None:
        row = {
            "version": [*map(int, _NEW_PYTHON.split(".")), 0],
            "packages": {},
            "platform": f"linux-{facts.found['machine']}",
        }
        return ImagePython(None, row, None, make_python=tool, constraints=limits)
    raise UserError(f"{host.name}: {_what_is_missing(facts, supported, install_torch, tool)}")


def is_complete(needs: Sequence[str], row: Mapping[str, Any]) -> bool:
    """Whether the image has all of them already; in doubt not, and pip decides."""
    for need in needs:
        try:
            here = for_box(need, row)
        except ImportError:
            return False
        if here is None:
            continue
        name, bounds = re.fullmatch(r"([\w.-]+)\s*(.*)", here).groups()  # type: ignore[union-attr]
        version = row["packages"].get(re.sub(r"[-_.]+", "-", name).lower())
        if (
            version is None
            or not re.fullmatch(r"((>=|<)[\d.]+,?)*", bounds)
            or (bounds and not satisfies(version, bounds))
        ):
            return False
    return True


def for_box(requirement: str, row: Mapping[str, Any]) -> str | None:
    """Without its marker if that holds on the box, which is not where this runs; None if it does not."""
    need, _, marker = requirement.partition(";")
    if not marker.strip():
        return requirement
    try:
        markers: Any = importlib.import_module("packaging.markers")
    except ImportError:
        markers = importlib.import_module("pip._vendor.packaging.markers")
    version = ".".join(map(str, row["version"]))
    machine = str(row["platform"]).partition("-")[2]
    there = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "platform_machine": machine}
    there.update(python_version=".".join(version.split(".")[:2]), python_full_version=version, extra="")
    return need.strip() if markers.Marker(marker.strip()).evaluate(there) else None


def _what_is_missing(facts: BoxFacts, supported: list[dict[str, Any]], install_torch: bool, tool: Any) -> str:
    old = [row for row in supported if row["torch"]]
    if old:
        version = old[0]["torch"]["version"]
        why = f"its torch is {version} ({old[0]['path']}), but Sojourn needs {REQUIRED['torch'].lstrip('>=')} or newer"
        return f"{why}: rent it with a newer PyTorch image, or add --install-torch ({_TORCH_SIZE})"
    if supported:
        where = ", ".join(row["path"] for row in supported[:3])
        why = f"none of its Pythons has torch ({where})"
        return f"{why}: rent it with a PyTorch image, or add --install-torch ({_TORCH_SIZE})"
    seen = ", ".join(".".join(map(str, row["version"][:2])) for row in facts.pythons) or "none"
    low, high = (".".join(map(str, version)) for version in PYTHON)
    why = f"Sojourn needs Python {low} to {high}, and this image has: {seen}; rent it with a newer image"
    if install_torch or tool is None:
        return f"{why}, or make one there: conda create -y -n sojourn python={_NEW_PYTHON}"
    return f"{why}, or add --install-torch: {tool['name']} makes Python {_NEW_PYTHON} and torch ({_TORCH_SIZE})"


def _parents(row: Mapping[str, Any]) -> tuple[tuple[str, ...], bool]:
    if row["prefix"] == row["base_prefix"]:
        return (), True
    own = tuple(site for site in row["site"] if site.startswith(row["prefix"]))
    return own, len(own) < len(row["site"])


def _pins(packages: Mapping[str, str]) -> tuple[str, ...]:
    names = [name for name in sorted(packages) if name in _PINNED or name.startswith(_PINNED_PREFIXES)]
    return tuple(f"{name}=={packages[name]}" for name in names)


def _limits(facts: BoxFacts) -> list[str]:
    """torch from PyPI is built with CUDA 13 from 2.11 on, which older drivers do not run."""
    drivers = [str(gpu.get("driver", "")).partition(".")[0] for gpu in facts.gpus]
    is_old = any(driver.isdigit() and int(driver) < _CUDA_13_DRIVER for driver in drivers)
    return [_LAST_CUDA_12_TORCH] if is_old else []
