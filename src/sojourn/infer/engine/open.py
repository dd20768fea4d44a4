"""Opens the engine over a loaded model, with what this machine has."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sojourn.errors import UserError
from sojourn.estimate.serving import MAX_ROWS, QUANTIZATIONS, kv_memory
from sojourn.infer.engine.decoder import Decoder, engine_unsupported_reason, read_decoder
from sojourn.infer.engine.engine import Engine, EngineOptions, blocks_for
from sojourn.infer.engine.ops_torch import Ops, TorchOps
from sojourn.infer.load import LoadedModel, context_length
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
    return engine_unsupported_reason(loaded.model)


def open_engine(loaded: LoadedModel, settings: EngineSettings) -> Engine:
    """The engine takes the weights: the loaded model cannot be used afterwards."""
    reason = unsupported_reason(loaded)
    if reason is not None:
        raise UserError(f"{loaded.path}: the builtin engine cannot run it: {reason}; try: --engine vllm")
    device = torch.device(loaded.device).type
    ops = choose_ops(device, settings.quantization)
    most = context_length(loaded.model)
    context = min(settings.context or most, most)
    with torch.inference_mode():
        decoder = read_decoder(loaded.model, ops.pack, context, torch.float32 if device == "cpu" else None)
    blocks = blocks_for(
        decoder.kv_bytes_per_token, settings.kv_bytes or _kv_memory(decoder), settings.max_rows, context
    )
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


def _kv_memory(decoder: Decoder) -> int:
    if decoder.device.type == "cuda":
        return kv_memory(torch.cuda.mem_get_info()[0], "cuda")
    import psutil

    return kv_memory(psutil.virtual_memory().available, "cpu")
