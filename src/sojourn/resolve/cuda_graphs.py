"""Whether forward+backward is captured as a CUDA graph and replayed: where a slow CPU may take longer to launch kernels
than the GPU to run them."""

from __future__ import annotations

from dataclasses import replace

from sojourn.catalog.fused_families import FUSED_FAMILIES
from sojourn.config.schema import RunConfig
from sojourn.estimate.step_time import is_launch_bound
from sojourn.estimate.workload import Workload
from sojourn.resolve.device_spec import DeviceSpec


def cuda_graphs_unsupported_reason(device: DeviceSpec) -> str | None:
    return None if device.device_type == "cuda" else f"needs a CUDA GPU, but this run is on {device.device_type}"


def can_capture(config: RunConfig, workload: Workload) -> bool:
    """One rank, rows of one shape, and a model that capturing was tested with."""
    model = workload.model
    alone = workload.device_type == "cuda" and workload.world_size == 1 and workload.engine == "single"
    alone = alone and not workload.optimizer_in_backward
    tested = model.family in FUSED_FAMILIES and model.experts is None
    recomputes_dropout = workload.lora_dropout > 0 and workload.activation_checkpointing != "off"
    same_shapes = config.data.packing != "off" and workload.attention_backend.varlen
    return alone and tested and same_shapes and not recomputes_dropout and workload.precision != "fp16"


def choose_cuda_graphs(config: RunConfig, workload: Workload, device: DeviceSpec) -> tuple[bool, str]:
    """Whether `auto` captures this workload, and why."""
    if device.device_type != "cuda":
        return False, "CUDA graphs need a CUDA GPU"
    if config.train.deterministic == "on":
        return False, "a captured graph may round differently, which train.deterministic rules out"
    if device.gpu is None:
        return False, "the catalogue does not have this GPU's speed; set on to try"
    if workload.model.attention_dropout or not can_capture(config, workload):
        return (
            False,
            "for one rank and packed or padded rows, without recomputed dropout, fp16 or updates in the backward",
        )
    if not is_launch_bound(workload, device.gpu):
        return False, "the GPU takes longer for its kernels than a slow CPU for launching them"
    return True, "launching kernels one by one might take the CPU longer than the GPU needs for them"


def with_cuda_graphs(config: RunConfig, workload: Workload, device: DeviceSpec) -> Workload:
    """The workload with a CUDA graph, where the setting or `auto` captures one. Where `auto` captures none because the
    GPU is busy enough, its memory is counted all the same: on another CPU it may, and what fits must fit there too."""
    setting = config.train.cuda_graphs
    excluded = setting == "off" or (setting == "auto" and config.train.deterministic == "on")
    if excluded or not can_capture(config, workload):
        return workload
    captured = setting == "on" or choose_cuda_graphs(config, workload, device)[0]
    return replace(workload, cuda_graphs=captured, graph_memory=True)
