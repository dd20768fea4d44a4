"""Precision, and the kernels that it allows: fused forwards, FP8, Hopper kernels, CPU kernels."""

from __future__ import annotations

from collections.abc import Iterable

from sojourn.catalog.fused_families import FUSED_FAMILIES, FUSED_MIXTURES, LAYERS_LIKE_LLAMA
from sojourn.catalog.models import ModelSpec
from sojourn.config.attention_backends import ATTENTION_BACKENDS
from sojourn.config.schema import RunConfig
from sojourn.resolve.attention import attention_unsupported_reason, choose_attention
from sojourn.resolve.cuda_graphs import cuda_graphs_unsupported_reason
from sojourn.resolve.device_spec import HOPPER_PACKAGES, DeviceSpec
from sojourn.resolve.resolved import Resolved, Unsupported

_FP8_CAPABILITY = (8, 9)


def _names(families: Iterable[str]) -> str:
    return " and ".join(", ".join(FUSED_FAMILIES[one] for one in families).rsplit(", ", 1))


_FAMILIES = _names(FUSED_FAMILIES)


def resolve_precision(resolved: Resolved, device: DeviceSpec, started: RunConfig | None) -> None:
    """On a CPU `auto` rests on a measurement, which may vary: there a run keeps the precision that it started with."""
    train, kind = resolved.config.train, device.device_type
    if train.device == "auto":
        resolved.choose("train", "device", kind, "the fastest device that works here")
    elif train.device != kind:
        raise Unsupported(f"train.device: {train.device} given, but this is {kind}; use auto")
    if train.precision == "fp16" and kind != "cuda":
        raise Unsupported(f"train.precision: fp16 needs a CUDA GPU, but this run is on {kind}; use auto")
    if train.precision == "auto":
        _choose_precision(resolved, device, started)
    precision, masters = resolved.config.train.precision, train.master_weights
    if masters != "fp32" and precision != "bf16":
        raise Unsupported(
            f"train.master_weights: {masters} needs train.precision=bf16, but here it is {precision}; use fp32"
        )
    if train.optimizer_in_backward == "on" and precision == "fp16":
        raise Unsupported("train.optimizer_in_backward: on needs train.precision=bf16 or fp32, but here it is fp16")


def _choose_precision(resolved: Resolved, device: DeviceSpec, started: RunConfig | None) -> None:
    kind = device.device_type
    if started is not None and started.train.device == kind == "cpu" and started.train.precision != "auto":
        resolved.choose("train", "precision", started.train.precision, "as the run started")
    else:
        resolved.choose("train", "precision", device.precision, device.precision_reason)


def resolve_attention(resolved: Resolved, model: ModelSpec, device: DeviceSpec) -> None:
    train = resolved.config.train
    best = choose_attention(model, str(train.precision), device)
    if train.attention == "auto":
        resolved.choose("train", "attention", best, "the fastest backend for packed documents on this device")
        return
    backend = ATTENTION_BACKENDS[train.attention]
    reason = attention_unsupported_reason(backend, model, str(train.precision), device)
    if reason is not None:
        raise Unsupported(f"train.attention: {train.attention} {reason}; use {best} or auto")


def resolve_forwards(resolved: Resolved, model: ModelSpec, device: DeviceSpec) -> None:
    """Fused forwards, FP8, and the loss in chunks."""
    train, advanced = resolved.config.train, resolved.config.advanced
    has_fused = model.family in FUSED_FAMILIES | FUSED_MIXTURES
    if advanced.fused_forwards == "auto":
        reason = (
            f"{model.family} has fused RMSNorm, RoPE and MLP activation" if has_fused else f"only {_FAMILIES} have them"
        )
        resolved.choose("advanced", "fused_forwards", "on" if has_fused else "off", reason)
    elif advanced.fused_forwards == "on" and not has_fused:
        names = ", ".join(FUSED_FAMILIES | FUSED_MIXTURES)
        raise Unsupported(f"advanced.fused_forwards: {model.family} has no fused forwards ({names} have); use auto")
    if train.fp8 != "off":
        no_fp8 = fp8_unsupported_reason(device, str(train.precision), resolved.config.advanced.fused_forwards == "on")
        if no_fp8 is not None:
            raise Unsupported(f"train.fp8: {no_fp8}; leave it off")
    no_graphs = cuda_graphs_unsupported_reason(device) if train.cuda_graphs == "on" else None
    if no_graphs is not None:
        raise Unsupported(f"train.cuda_graphs: {no_graphs}; leave it off")
    if advanced.chunked_loss == "auto":
        resolved.choose("advanced", "chunked_loss", "on", "the logits of all tokens never exist at once")


def fp8_unsupported_reason(device: DeviceSpec, precision: str, fused: bool) -> str | None:
    """Why linear layers cannot compute in FP8, or None."""
    if not fused:
        return f"only the fused forwards of {_FAMILIES} have FP8 matmuls"
    if device.device_type != "cuda":
        return f"needs a CUDA GPU, but this run is on {device.device_type}"
    if (device.compute_capability or (0, 0)) < _FP8_CAPABILITY:
        return "needs a GPU of compute capability 8.9 (RTX 40, L4, H100) or newer"
    if precision != "bf16":
        return f"needs train.precision=bf16 for the rest, but it is {precision}"
    return None


def resolve_hopper(resolved: Resolved, model: ModelSpec, device: DeviceSpec) -> None:
    setting = resolved.config.advanced.hopper_kernels
    reason = hopper_unsupported_reason(resolved.config, device, model.family)
    if setting == "on" and reason is not None:
        raise Unsupported(f"advanced.hopper_kernels: {reason}; use auto")
    if setting != "auto":
        return
    if reason is not None:
        resolved.choose("advanced", "hopper_kernels", "off", reason)
    elif resolved.config.train.compile == "off":
        resolved.choose(
            "advanced", "hopper_kernels", "off", "compiling their kernels costs more than it saves on so short a run"
        )
    else:
        resolved.choose("advanced", "hopper_kernels", "on", "quack and FlashAttention-4 are installed")


def hopper_unsupported_reason(config: RunConfig, device: DeviceSpec, family: str) -> str | None:
    """Why a run cannot use the kernels of model/kernels/hopper.py, or None."""
    train = config.train
    if config.advanced.fused_forwards != "on" or family not in LAYERS_LIKE_LLAMA:
        return f"only the fused forwards of {_names(LAYERS_LIKE_LLAMA)} have Hopper kernels"
    if config.method.kind in ("lora", "qlora"):
        return f"for runs that train all weights, but method.kind is {config.method.kind}"
    if device.device_type != "cuda":
        return f"needs an H100 or H200, but this run is on {device.device_type}"
    if (device.compute_capability or (0, 0))[0] != 9:
        return f"needs an H100 or H200, but this is an {device.name}"
    if train.fp8 != "off":
        return f"computes in bf16, but train.fp8 is {train.fp8}"
    if train.precision != "bf16":
        return f"computes in bf16, but train.precision is {train.precision}"
    if train.activation_checkpointing == "offload":
        return "computes whole layers, but train.activation_checkpointing is offload"
    if train.deterministic == "on":
        return "does not sum in the same order every time, as train.deterministic asks for"
    if config.parallel.engine not in ("single", "ddp"):
        return f"needs whole weights, but parallel.engine is {config.parallel.engine}"
    if not device.packages >= HOPPER_PACKAGES:
        return "needs packages that are not installed: pip install 'sojourn[hopper]'"
    return None


def resolve_cpu_kernels(resolved: Resolved, device: DeviceSpec) -> None:
    setting, reason = resolved.config.advanced.cpu_kernels, cpu_kernels_unsupported_reason(resolved.config, device)
    if setting == "on" and reason is not None:
        raise Unsupported(f"advanced.cpu_kernels: {reason}; use auto")
    if setting == "auto":
        why = reason or "gcc compiles them in a second, and layers run faster from then on"
        resolved.choose("advanced", "cpu_kernels", "on" if reason is None else "off", why)


def cpu_kernels_unsupported_reason(config: RunConfig, device: DeviceSpec) -> str | None:
    """Why a run cannot use the kernels of model/kernels/cpu/, or None."""
    if device.device_type != "cpu":
        return f"for CPUs, but this run is on {device.device_type}"
    if config.advanced.fused_forwards != "on":
        return f"only the fused forwards of {_FAMILIES} have CPU kernels"
    if config.method.kind in ("lora", "qlora"):
        return f"for runs that train all weights, but method.kind is {config.method.kind}"
    if config.train.precision != "fp32":
        return f"computes in fp32, but train.precision is {config.train.precision}"
    if config.parallel.engine not in ("single", "ddp"):
        return f"needs whole weights, but parallel.engine is {config.parallel.engine}"
    if config.train.compile == "on":
        return "train.compile=on makes kernels of its own"
    if not device.has_gcc:
        return "needs gcc, on Linux"
    return None
