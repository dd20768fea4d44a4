"""The Workload of a resolved configuration. Nothing is decided here."""

from __future__ import annotations

from sojourn.catalog.models import ModelSpec
from sojourn.config.schema import MethodConfig, RunConfig
from sojourn.estimate.workload import LINEAR, Workload
from sojourn.expand_user import expand_user
from sojourn.resolve.device_spec import DeviceSpec
from sojourn.resolve.ds_config import zero_from_file

USUAL_DOCUMENT = 480  # tokens of a chat in usual data sets


def workload_of(config: RunConfig, model: ModelSpec, device: DeviceSpec) -> Workload:
    """One rank's work, without a CUDA graph (see `with_cuda_graphs`). What is still `auto` counts as its first value: a
    micro batch of 1, no activation checkpointing, the engine of one rank."""
    train, method, parallel = config.train, config.method, config.parallel
    micro_batch = train.micro_batch if isinstance(train.micro_batch, int) else 1
    engine = "single" if parallel.engine == "auto" else parallel.engine
    zero_stage, offload = _zero(config) if engine == "deepspeed" else (2, train.offload)
    return Workload(
        model=model,
        method=method.kind,
        micro_batch=micro_batch,
        sequence_length=config.data.max_length,
        gradient_accumulation=accumulation_steps(train.global_batch, micro_batch, device.ranks),
        document_length=usual_document_length(config),
        device_type=device.device_type,
        compute_capability=device.compute_capability or (0, 0),
        precision=str(train.precision),
        fused_forwards=config.advanced.fused_forwards == "on",
        compiled=train.compile == "on",
        has_triton=device.has_triton,
        attention=train.attention,
        activation_checkpointing="off" if train.activation_checkpointing == "auto" else train.activation_checkpointing,
        full_logits=config.advanced.chunked_loss == "off",
        fp8=train.fp8,
        async_step=config.advanced.async_step == "on",
        optimizer=train.optimizer,
        master_weights=train.master_weights,
        optimizer_in_backward=train.optimizer_in_backward == "on",
        offload=offload,
        lora_rank=method.rank,
        lora_targets=_lora_targets(method),
        adapts_experts="experts" in method.targets,
        lora_dropout=method.dropout,
        modules_to_save=tuple(method.modules_to_save),
        quant_bits=method.bits,
        double_quant=method.double_quant,
        engine=engine,
        world_size=device.ranks,
        nodes=parallel.nodes,
        zero_stage=zero_stage,
        reshard_after_forward=config.advanced.reshard_after_forward,
    )


def _lora_targets(method: MethodConfig) -> tuple[str, ...]:
    """All, too, where other families have other names."""
    if method.targets == ["experts"]:
        return ()
    return tuple(name for name in method.targets if name in LINEAR) or LINEAR


def accumulation_steps(global_batch: int, micro_batch: int, ranks: int) -> int:
    return max(1, -(-global_batch // (micro_batch * ranks)))


def usual_document_length(config: RunConfig) -> int | None:
    """Tokens of a usual document, where several share a row."""
    if config.data.packing == "off" or config.method.kind == "pretrain":
        return None
    return min(USUAL_DOCUMENT, config.data.max_length)


def _zero(config: RunConfig) -> tuple[int, str]:
    """ZeRO's stage, and what it offloads to the host: by the DeepSpeed file, or by default."""
    offload: str = config.train.offload
    if config.parallel.deepspeed is None:
        return (3 if offload == "all" else 2), offload
    return zero_from_file(expand_user(config.parallel.deepspeed), config)
