"""The kinds of quantization: one record each, and whether this machine runs it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec

from sojourn.config.messages import did_you_mean, printable
from sojourn.errors import UserError
from sojourn.infer.runtimes.managed_environment import LLM_COMPRESSOR


@dataclass(frozen=True)
class Kind:
    """`format`: in `export/formats.py`. `library`: the package that quantizes. `capability`: the least compute
    capability of a GPU; None where a CPU runs it too."""

    name: str
    format: str
    library: str
    capability: tuple[int, int] | None = None


KINDS: dict[str, Kind] = {
    one.name: one
    for one in (
        Kind("int8", "quantized", "torchao"),
        Kind("int8-dynamic", "quantized", "torchao"),
        Kind("fp8", "quantized", "torchao", (8, 9)),
        Kind("int4", "quantized", "torchao", (8, 0)),
        Kind("nf4", "quantized", "bitsandbytes"),
        Kind("gptq", "compressed-tensors", "llmcompressor"),
        Kind("awq", "compressed-tensors", "llmcompressor"),
        Kind("fp8-vllm", "compressed-tensors", "llmcompressor"),
    )
}


def find_kind(name: str) -> Kind:
    known = name.lower()
    if known not in KINDS:
        raise UserError(
            f"--to: no quantization is called “{printable(name)}”{did_you_mean(known, list(KINDS))}; "
            f"there are: {', '.join(KINDS)}"
        )
    return KINDS[known]


def refuse_kind(kind: Kind) -> None:
    """One line where this machine cannot quantize so, before anything is loaded."""
    reason = why_not_here(kind)
    if reason:
        others = [one.name for one in KINDS.values() if one.name != kind.name and not why_not_here(one)]
        here = f"; works here: {', '.join(others)}" if others else ""
        raise UserError(f"--to {kind.name}: {reason}{here}")


def why_not_here(kind: Kind) -> str:
    """Empty, or what it needs."""
    if kind.capability is not None and not has_capability(kind.capability):
        need = f"{kind.capability[0]}.{kind.capability[1]}"
        return f"needs a GPU of compute capability {need} or newer; {_gpu_here()}"
    if kind.library == "llmcompressor":
        return _why_no_llm_compressor()
    if kind.library == "bitsandbytes" and sys.platform != "linux":
        return "needs Linux (bitsandbytes)"
    return _why_no_package(kind.library)


def _why_no_package(name: str) -> str:
    shown = name.replace("_", "-")
    return "" if find_spec(name) is not None else f"needs the package {shown}; run: pip install {shown}"


def _why_no_llm_compressor() -> str:
    """It quantizes in an environment of its own; what it wrote is replayed in transformers here."""
    reason = LLM_COMPRESSOR.why_unavailable()
    return reason or _why_no_package("compressed_tensors")


def has_capability(least: tuple[int, int]) -> bool:
    import torch

    return bool(torch.cuda.is_available() and torch.cuda.get_device_capability() >= least)


def _gpu_here() -> str:
    import torch

    if not torch.cuda.is_available():
        return "here is none"
    return "here: {}.{}".format(*torch.cuda.get_device_capability())
