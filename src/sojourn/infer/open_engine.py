"""Opens the engine over a loaded model, with what this machine has."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from sojourn.errors import UserError
from sojourn.estimate.serving import MAX_ROWS, QUANTIZATIONS, kv_memory
from sojourn.infer.engine.engine import DecodeLoop, Engine, EngineOptions, blocks_for
from sojourn.infer.engine.ops_torch import Ops, TorchOps
from sojourn.infer.load import LoadedModel, context_length
from sojourn.infer.read_decoder import is_nf4, model_unsupported_reason, read_decoder
from sojourn.infer.transformers_forward import open_transformers_loop
from sojourn.model.kernels.triton_support import supports_triton

_MOST_TOKENS = {"cuda": 2048, "cpu": 256}  # of a step


@dataclass(frozen=True)
class EngineSettings:
    """`max_rows`: requests at a time. `context`: None is the model's. `quantization`: of the matrices; None leaves
    them as they are. `kv_bytes`: memory of the KV cache; None: most of what is free."""

    max_rows: int = MAX_ROWS
    context: int | None = None
    quantization: str | None = None
    kv_bytes: int | None = None
    draft_tokens: int = 0


def unsupported_reason(loaded: LoadedModel) -> str | None:
    """None where the engine runs this model on its device."""
    device = torch.device(loaded.device).type
    if device not in QUANTIZATIONS or (device == "cuda" and not supports_triton()):
        return f"there are no kernels for {device}" + (" without Triton" if device == "cuda" else "")
    if device == "cuda" and loaded.model.dtype == torch.float32:
        return "there are no kernels for fp32 on CUDA"
    return model_unsupported_reason(loaded.model)


def open_loop(loaded: LoadedModel, max_rows: int) -> DecodeLoop:
    """The engine; where it cannot run the model, transformers in the same loop, with a note. Takes the weights. The KV
    cache has half of the memory that is free."""
    memory, reason = _free_memory(loaded.device) // 2, unsupported_reason(loaded)
    if reason is None:
        return open_engine(loaded, EngineSettings(max_rows, kv_bytes=memory))
    loop = open_transformers_loop(loaded.model, max_rows, context_length(loaded.model), memory)
    alone = ", and one prompt at a time" if max_rows > loop.options.max_rows else ""
    note = f"note: {loaded.path}: the builtin engine cannot run it ({reason}); transformers does, slower{alone}"
    print(note, file=sys.stderr, flush=True)
    return loop


def open_engine(loaded: LoadedModel, settings: EngineSettings) -> Engine:
    """The engine takes the weights: the loaded model cannot be used afterwards."""
    reason = unsupported_reason(loaded)
    if reason is not None:
        raise UserError(f"{loaded.path}: the builtin engine cannot run it: {reason}; try: --engine vllm")
    device = torch.device(loaded.device).type
    keeps_nf4 = device == "cuda" and not settings.quantization and any(map(is_nf4, loaded.model.parameters()))
    ops = choose_ops(device, "nf4" if keeps_nf4 else settings.quantization)
    pack_rest = choose_ops(device, None).pack if keeps_nf4 else None
    most = context_length(loaded.model)
    context = min(settings.context or most, most)
    dtype = torch.float32 if device == "cpu" else None
    with torch.no_grad():
        decoder = read_decoder(loaded.model, ops.pack, context, dtype, pack_rest)
    memory = settings.kv_bytes or kv_memory(_free_memory(device), device)
    blocks = blocks_for(decoder.kv_bytes_per_token, memory, settings.max_rows, context)
    options = EngineOptions(settings.max_rows, _MOST_TOKENS.get(device, 256), context, blocks, settings.draft_tokens)
    return Engine(decoder, ops, options)


def choose_ops(device: str, quantization: str | None) -> Ops:
    """The fastest backend that works here."""
    if quantization is not None and quantization not in QUANTIZATIONS.get(device, ()):
        there = ", ".join(QUANTIZATIONS.get(device, ())) or "none"
        raise UserError(f"--quantize {quantization}: the builtin engine has on {device}: {there}")
    if device == "cuda":
        from sojourn.infer.engine.cuda.ops import CudaOps

        return CudaOps(quantization)
    if device == "cpu":
        from sojourn.infer.engine.cpu.smoke_test import open_cpu_ops

        ops = open_cpu_ops("int8" if quantization == "int8" else None)
        if ops is not None:
            return ops
        if quantization is not None:
            raise UserError(
                f"--quantize {quantization} needs the engine's C kernels, which gcc must compile; leave it out"
            )
    return TorchOps()


def _free_memory(device: str) -> int:
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info()[0])
    import psutil

    return int(psutil.virtual_memory().available)
