"""The time of a step: FLOPs and bytes of each part over what the GPU reaches.

Matmuls by their shapes, attention by its context length, elementwise kernels by the bytes they move, the optimizer
step, communication between GPUs, and kernel launch overhead. fit.toml has the measured curves; FLOPs and bytes follow
from the code. M tokens of a micro batch, K inputs, N outputs of a matmul.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sojourn.catalog.gpus import Gpu
from sojourn.estimate.activations import layer_parameters
from sojourn.estimate.ceilings import attention_rate, fp8_rate, link_rate, matmul_rate, memory_rate
from sojourn.estimate.constants import constants
from sojourn.estimate.kernel_launch import SLOW_CPU, fuses_clipping, launch_seconds, step_seconds
from sojourn.estimate.memory import chunk_rows
from sojourn.estimate.model_states import (
    embedding_and_head_parameters,
    lm_head_is_trained,
    low_memory_state_bytes,
    streams_states,
)
from sojourn.estimate.uncertainty import ATTENTION, COMMUNICATION, LAUNCH_OVERHEAD, spread
from sojourn.estimate.workload import LINEAR, Workload, layer_groups

_BACKWARD_SHARE = 0.6  # of forward+backward


@dataclass(frozen=True)
class Part:
    """Seconds of a whole step, with all its micro batches."""

    name: str
    seconds: float
    formula: str


@dataclass(frozen=True)
class StepTime:
    """`spread`: the share of it by which a step may be shorter or longer."""

    parts: tuple[Part, ...]
    step_seconds: float
    tokens: int  # of a step, of all ranks
    spread: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds

    @property
    def launch_share(self) -> float:
        """The share of a step in which the GPU waits for kernel launches."""
        seconds = {part.name: part.seconds for part in self.parts}
        return seconds[LAUNCH_OVERHEAD] / sum(seconds.values())


def step_time(workload: Workload, gpu: Gpu) -> StepTime:
    if gpu.launch_us is not None and workload.cpu_slowness == 1.0:
        workload = replace(workload, cpu_slowness=gpu.launch_us / float(constants()["launch"]["usual_us"]))
    parts = _gpu_parts(workload, gpu)
    busy = sum(part.seconds for part in parts)
    head, update = parts[1].seconds, parts[-1].seconds
    forward = head + (busy - head - update) / (3 - workload.uses_lora + (workload.recomputes_layers))
    waiting = step_seconds(workload, forward / workload.gradient_accumulation, busy - update, update) - busy
    if workload.offloads_inputs:
        late = _late_inputs(workload, gpu, forward)
        parts.append(Part(COMMUNICATION, late, "layer inputs that the host's link brings later than they are needed"))
    launched = "CUDA graph replays and updates" if workload.cuda_graphs else "layers and updates"
    parts.append(Part(LAUNCH_OVERHEAD, waiting, f"launching {launched}, where the GPU waits for the CPU"))
    parts.append(
        Part(
            COMMUNICATION,
            _communication(workload, gpu, busy),
            "bytes / link, without what overlaps; and what overlaps takes memory bandwidth",
        )
    )
    total = sum(part.seconds for part in parts)
    tokens = workload.tokens * workload.gradient_accumulation * workload.world_size
    return StepTime(tuple(parts), total, tokens, spread({part.name: part.seconds for part in parts}, gpu))


def is_launch_bound(workload: Workload, gpu: Gpu) -> bool:
    """Whether a slow CPU takes longer to launch forward and backward than the GPU to run them."""
    *passes, _ = _gpu_parts(workload, gpu)
    return SLOW_CPU * launch_seconds(workload) > sum(part.seconds for part in passes)


def _gpu_parts(workload: Workload, gpu: Gpu) -> list[Part]:
    """Kernels of a step; the optimizer step comes last."""
    passes = workload.gradient_accumulation
    parts = [
        Part("matmuls", passes * _matmuls(workload, gpu), "sum over the linear layers"),
        Part("LM head and loss", passes * _lm_head(workload, gpu), "matmuls of V·D, and passes over the logits"),
        Part(ATTENTION, passes * _attention(workload, gpu), "3.5·FLOPs of the forward / sustained rate"),
        Part("elementwise kernels", passes * _elementwise(workload, gpu), "bytes / (share·bandwidth)"),
    ]
    backward = _BACKWARD_SHARE * sum(part.seconds for part in parts)
    update = (
        _low_memory_optimizer(workload, gpu, backward) if workload.low_memory_optimizer else _optimizer(workload, gpu)
    )
    formula = "bytes of weights, gradients, optimizer states / (share·bandwidth)"
    return [*parts, Part("optimizer step", update, formula)]


def matmul(gpu: Gpu, rate: float, m: float, k: float, n: float, e: int) -> float:
    """Seconds of one matmul, of a card that sustains so many FLOP/s."""
    least = e * (m * k + k * n + m * n) / memory_rate(gpu)
    return float(max(2 * m * k * n / rate, least) + constants()["matmul"]["start"])


def linear_shapes(workload: Workload) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of a layer's linear layers, of the experts that one token visits."""
    model = workload.model
    d, wide = model.hidden, model.active_ffn
    gate = {"gate_proj": (d, wide)} if model.gated else {}
    return {**model.attention_shapes, **gate, "up_proj": (d, wide), "down_proj": (wide, d)}


def _matmuls(workload: Workload, gpu: Gpu) -> float:
    """Of all layers: the forward, gradients of inputs, gradients of trained weights, and the recomputed forward
    (without `down_proj`, whose output the backward does not read)."""
    return sum(count * _matmuls_of(kind, gpu) for kind, count in layer_groups(workload, workload.model.layers))


def _matmuls_of(workload: Workload, gpu: Gpu) -> float:
    rate, m, e = _layer_rate(workload, gpu), workload.tokens, workload.compute_bytes
    forward_rate = matmul_rate(workload.precision, gpu) if workload.fp8 == "backward" else rate
    total = 0.0
    for name, (k, n) in _fused_shapes(workload).items():
        forward = matmul(gpu, forward_rate, m, k, n, e)
        again = forward if workload.recomputes_layers and name != "down_proj" else 0.0
        of_weights = 0.0 if workload.uses_lora else matmul(gpu, rate, k, m, n, e)
        total += forward + again + matmul(gpu, rate, m, n, k, e) + of_weights
    return total + _small_kernels(workload)


def _small_kernels(workload: Workload) -> float:
    """The least time of a layer's small kernels: of adapters, of NF4 weights, of the gradients of query and key norms.
    What more tokens cost is counted as bytes."""
    costs, mode = constants()["small"], "compiled" if workload.compiled else "eager"
    if not workload.uses_lora:
        return float(1e-6 * costs["norms_eager_us"] * (workload.model.qk_norm and not workload.compiled))
    adapted = sum(map(workload.has_adapter, LINEAR))
    each = costs[f"adapter_{mode}_us"] * adapted + costs[f"quantised_{mode}_us"] * (workload.method == "qlora")
    return float(1e-6 * each * (1.0 if workload.activation_checkpointing == "off" else costs["again"]))


def _fused_shapes(workload: Workload) -> dict[str, tuple[int, int]]:
    """Fused forwards with trained weights compute linear layers of one input as one matmul."""
    shapes = linear_shapes(workload)
    if not (workload.fused_forwards and workload.has_triton) or workload.uses_lora:
        return shapes
    groups = [("gate_proj", "up_proj")] + ([] if workload.model.qk_norm else [("q_proj", "k_proj", "v_proj")])
    for first, *others in [group for group in groups if set(group) <= set(shapes)]:
        inputs, outputs = shapes[first]
        shapes[first] = inputs, outputs + sum(shapes.pop(name)[1] for name in others)
    return shapes


def _layer_rate(workload: Workload, gpu: Gpu) -> float:
    """FLOP/s of the layers' matmuls."""
    in_fp8 = workload.fp8 != "off" and gpu.fp8_tflops
    return fp8_rate(gpu) if in_fp8 else matmul_rate(workload.precision, gpu)


def _lm_head(workload: Workload, gpu: Gpu) -> float:
    m, e, model, trained = workload.tokens, workload.compute_bytes, workload.model, lm_head_is_trained(workload)
    in_fp8 = workload.fp8 == "on" and trained
    rate = _layer_rate(workload, gpu) if in_fp8 else matmul_rate(workload.precision, gpu)
    each = matmul(gpu, rate, m, model.hidden, model.vocab, e)
    times = 3 if trained else 2
    if workload.full_logits:
        passes = 2 + 6 + 12 + 12 + 8  # logits, in fp32, log-softmax, its gradient, cast back
    elif workload.has_triton:
        passes = 2 * e + 2 * e + 2 * e
    else:
        passes = 10 * 4
    if in_fp8:
        passes += 4
    return times * each + _traffic(gpu, m * model.vocab * passes + _embedding_and_head_bytes(workload))


def _embedding_and_head_bytes(workload: Workload) -> float:
    """Bytes of trained embedding and LM head in one micro batch: casts, gradients and their accumulation, of the LM
    head once per chunk of logits."""
    if not lm_head_is_trained(workload):
        return 0.0
    chunks = 1 if workload.full_logits else -(-workload.tokens // chunk_rows(workload))
    each = 6 + 10 * chunks + 8 + 4 + (12 if workload.model.tied else 0)
    return float(each * workload.model.vocab * workload.model.hidden)


def _attention(workload: Workload, gpu: Gpu) -> float:
    """A token attends to its own document; a dense mask computes the scores that it hides."""
    model, m = workload.model, workload.tokens
    seen = float(
        workload.document_length if workload.is_packed and workload.document_length else workload.sequence_length
    )
    masked = workload.is_packed and workload.attention_backend.mask == "dense"
    if masked:
        seen = 2.0 * workload.sequence_length
    windows = model.sliding_window
    full = model.full_layers if windows is not None and windows < seen else model.layers
    near = min(seen, 2.0 * (windows or seen))
    context = (full * seen + (model.layers - full) * near) / model.layers
    forward = 2.0 * m * context * model.heads * model.head_dim
    times = 3.5 + (0.8 if workload.recomputes_layers else 0.0)  # the forward is faster than the backward
    seconds = model.layers * times * forward / attention_rate(workload, gpu, seen)
    if workload.attention_backend.saves_scores:
        seconds += _traffic(gpu, model.layers * m * workload.sequence_length * model.heads * 4 * 12)
    return float(seconds)


def _elementwise(workload: Workload, gpu: Gpu) -> float:
    """Elementwise kernels of one forward and backward, and what weights cost besides matmuls."""
    model, e, r, m = workload.model, workload.compute_bytes, workload.residual_bytes, workload.tokens
    d, q, wide = model.hidden, model.heads * model.head_dim, workload.model.active_ffn
    heads = q + 2 * model.kv_heads * model.head_dim
    repeated = 2 * (q - model.kv_heads * model.head_dim) if model.kv_heads < model.heads else 0
    forward = 9 * d * r + (2 * heads + repeated + 3 * wide) * e
    backward = 14 * d * r + (2 * heads + 2 * repeated + 5 * wide) * e
    if model.qk_norm:
        normed = q + model.kv_heads * model.head_dim
        forward, backward = forward + 2 * normed * e, backward + 3 * normed * e
    if model.experts is not None:
        sorted_rows = (model.active_experts or 1) * d * e * model.sparse_layers // model.layers
        forward, backward = forward + 3 * sorted_rows, backward + 3 * sorted_rows
    adapted = [size for name, size in linear_shapes(workload).items() if workload.has_adapter(name)]
    forward += e * sum(k + 3 * n for k, n in adapted)
    backward += e * sum(2 * k + 3 * n for k, n in adapted)
    if workload.lora_dropout:
        forward += e * 2 * sum(k for k, _ in adapted)
        backward += e * 2 * sum(k for k, _ in adapted)
    if workload.fp8 != "off":
        backward += 4 * 3 * (d + wide) + 6 * (
            q + heads + d
        )  # row-major and transposed; six where amax must be computed
    again = {"off": 0.0, "selective": 0.6}.get(workload.activation_checkpointing, 1.0)
    tokens = model.layers * m * (forward * (1 + again) + backward) * _eager_factor(workload)
    return _traffic(gpu, tokens + model.layers * _weight_bytes(workload))


def _eager_factor(workload: Workload) -> float:
    """Bytes moved, over those of compiled layers."""
    if workload.compiled:
        return 1.0
    return float(constants()["traffic"]["eager_fused" if workload.fused_forwards else "eager_plain"])


def _weight_bytes(workload: Workload) -> float:
    """Bytes of one layer's weights in one micro batch: casts, NF4 dequantization per use, gradient accumulation."""
    count = layer_parameters(workload)
    if workload.model.experts is not None:  # all experts are read
        times = 3.0 if workload.recomputes_layers else 2.0
        each = float(workload.compute_bytes)
        if workload.quantizes_experts:
            each, times = each + workload.quantized_bytes + 2, times - (times - 2) / 3  # down is not recomputed
        return times * each * workload.model.ffn_parameters() + (0 if workload.uses_lora else 12 * count)
    if workload.method == "qlora":
        uses = 2 + (1 if workload.recomputes_layers else 0)
        return uses * count * (workload.quantized_bytes + 2)
    if workload.uses_lora:
        return 0.0
    cast = 6 if workload.compute_bytes == 2 and workload.engine not in ("fsdp", "deepspeed") else 0
    cast = cast if workload.trained_bytes == 4 else 4  # bf16 weights that share a matmul are concatenated
    cast *= 2 if workload.activation_checkpointing != "off" else 1
    summed = (6 if workload.compute_bytes == 2 else 0) + (12 if workload.gradient_accumulation > 1 else 0)
    return count * (cast + summed)


def _optimizer(workload: Workload, gpu: Gpu) -> float:
    """Weights, gradients and optimizer states are read and written; offloaded states cross the PCIe bus both ways."""
    count = workload.trainable_parameters / (workload.world_size if workload.is_sharded else 1)
    norm = 4 if fuses_clipping(workload) else 12  # without fused clipping gradients are read and written once more
    states = {"adamw_8bit": 4, "paged_adamw_8bit": 4, "muon": 8}.get(workload.optimizer, 16)
    slow = 1 / float(constants()["update"]["share_8bit"]) if "8bit" in workload.optimizer else 1.0
    seconds = _traffic(gpu, count * (slow * (4 + 8 + states) + norm))
    if workload.optimizer == "muon" and not workload.uses_lora:
        newton_schulz = 5 * 6.0 * workload.model.hidden * (count - embedding_and_head_parameters(workload))
        dense = float(constants()["matmul"]["slowness"]) * matmul_rate(workload.precision, gpu)
        seconds += newton_schulz / (0.5 * dense)
    bus = _host_link(gpu)
    if workload.offload != "off":
        seconds += 16 * count / bus
    if workload.offload == "all":
        seconds += workload.gradient_accumulation * 2 * 2 * workload.model.parameters / bus
    return seconds


def _low_memory_optimizer(workload: Workload, gpu: Gpu, backward: float) -> float:
    """Of train/optim/low_memory_adamw.py. States in host memory travel both ways at once; in the backward, what takes
    longer than it remains."""
    count, states = workload.trainable_parameters, low_memory_state_bytes(workload)
    slow = 1 / float(constants()["update"]["share_8bit"]) if "8bit" in workload.optimizer else 1.0
    seconds = _traffic(gpu, count * (4 * workload.trained_bytes + slow * 2 * states))
    if not streams_states(workload):
        return seconds
    travelling = states * count / _host_link(gpu)
    return seconds + max(0.0, travelling - (backward if workload.optimizer_in_backward else 0.0))


def _host_link(gpu: Gpu) -> float:
    """Bytes a second between GPU and host memory, in one direction."""
    return float(constants()["links"]["host"]) * 1e9 * (gpu.pcie_gbs or 16.0)


def _late_inputs(workload: Workload, gpu: Gpu, forward: float) -> float:
    """Seconds of a step: a layer's input is sent during its forward, and fetched during another's backward."""
    model = workload.model
    moved = workload.gradient_accumulation * workload.tokens * model.hidden * workload.residual_bytes
    return 2 * model.layers * max(0.0, moved / _host_link(gpu) - forward / model.layers)


def communicated_bytes(workload: Workload) -> float:
    """Bytes that one GPU sends in a step: gradients once per step; sharded weights in every micro batch."""
    if workload.world_size == 1:
        return 0.0
    share = (workload.world_size - 1) / workload.world_size
    if not workload.is_sharded:
        return 2 * share * workload.trained_bytes * workload.trainable_parameters
    whole = workload.compute_bytes if workload.method != "qlora" else workload.quantized_bytes
    gathers = (2 if workload.reshard_after_forward else 1) * whole * workload.model.parameters
    return share * workload.gradient_accumulation * (gathers + 4 * workload.trainable_parameters)


def _communication(workload: Workload, gpu: Gpu, busy: float) -> float:
    """What does not overlap with other work, and what it costs that work: packing, NCCL's buffers and unpacking take
    the memory bandwidth that other kernels run on, and the SMs."""
    links, sent = constants()["links"], communicated_bytes(workload)
    beside = busy if workload.is_sharded else float(links["backward"]) * busy / workload.gradient_accumulation
    exposed = max(0.0, sent / link_rate(workload, gpu) - float(links["hidden"]) * beside)
    return exposed + _traffic(gpu, float(links["copies"]) * sent)


def _traffic(gpu: Gpu, size: float) -> float:
    return size / memory_rate(gpu)
