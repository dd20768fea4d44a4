"""Probes of the installation: Python, Sojourn, the libraries for training, and what else may be there."""

import importlib.metadata
import importlib.util
import re
import shutil
import sys

from sojourn import __version__
from sojourn.machine.finding import Finding

PYTHON = ((3, 10), (3, 13))

# The floors of the [train] extra that a training run cannot do without. pyproject.toml has the same; a test compares.
REQUIRED = {
    "torch": ">=2.6",
    "transformers": ">=5.3,<6",
    "peft": ">=0.17",
    "safetensors": ">=0.4.5",
    "tokenizers": ">=0.21",
    "numpy": ">=1.26",
}


def python() -> Finding:
    here = sys.version_info[:2]
    message = f"{sys.version.split()[0]} ({sys.executable})"
    if PYTHON[0] <= here <= PYTHON[1]:
        return Finding("python", "ok", message, data={"version": sys.version.split()[0]})
    low, high = (".".join(map(str, v)) for v in PYTHON)
    return Finding(
        "python", "fail", f"{message}: Sojourn is made for {low} to {high}", f"conda create -n sojourn python={high}"
    )


def sojourn() -> Finding:
    return Finding("sojourn", "ok", __version__, data={"version": __version__})


def installed(name: str) -> str | None:
    """A distribution's version, if it is installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def satisfies(version: str, bounds: str) -> bool:
    """Whether a version lies in a range like ">=5.3,<6"; local tags and pre-release letters are ignored."""
    for bound in bounds.split(","):
        sign, number = re.match(r"(>=|<)\s*(.+)", bound.strip()).groups()  # type: ignore[union-attr]
        if (_numbers(version) >= _numbers(number)) != (sign == ">="):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    digits = re.match(r"[\d.]*", version.partition("+")[0])
    parts = [int(part) for part in (digits[0] if digits else "").split(".") if part]
    return tuple(parts + [0] * (4 - len(parts)))[:4]


def libraries(torch_here: bool) -> Finding:
    """Versions of what training needs, torch apart. Installing the missing never touches the torch that is there."""
    required = {name: bounds for name, bounds in REQUIRED.items() if name != "torch"}
    versions = {name: installed(name) for name in required}
    wrong = [n for n, v in versions.items() if v is None or not satisfies(v, required[n])]
    seen = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    data = {"versions": versions, "wrong": wrong}
    if not wrong:
        return Finding("libraries", "ok", seen, data=data)
    if not torch_here:
        return Finding(
            "libraries", "warn", f"{seen}; enough to plan, not to train", "pip install 'sojourn[train]'", data
        )
    needs = [f"'{name}{required[name]}'" for name in wrong]
    keep = f"'torch=={installed('torch')}' " if installed("torch") else ""
    return Finding("libraries", "fail", seen, f"pip install {keep}{' '.join(needs)}", data)


def extras() -> Finding:
    """DeepSpeed and vLLM by presence: the one is optional, the other lives in an environment of its own."""
    versions = {name: installed(name) for name in ("deepspeed", "vllm")}
    listed = [f"{name} {version}" if version else f"no {name}" for name, version in versions.items()]
    message = f"{', '.join(listed)} (both optional"
    message += "; vllm belongs in an environment of its own)" if versions["vllm"] else ")"
    return Finding("extras", "ok", message, data={"versions": versions})


def importable(name: str) -> bool:
    """Not where only others put things into a folder of that name, as FlashAttention-4 does into `flash_attn`."""
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return found is not None and found.origin is not None


def find_gcc() -> str | None:
    """The compiler of our CPU kernels, which share torch's OpenMP runtime of Linux, libgomp."""
    return shutil.which("gcc") if sys.platform == "linux" else None
