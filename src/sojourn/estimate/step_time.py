"""How long a step takes: operations and bytes against what the card can do, part by part.

Multiplications by their shapes, attention by its context, pointwise work by its passes over memory, the optimizer, the
exchange between GPUs, and launching. Curves and shares are in fit.toml; operations and bytes follow from the code.
M tokens of a pass, K inputs, N outputs of a multiplication.
"""

from __future__ import annotations

from dataclasses import dataclass

from sojourn.catalog.gpus import Gpu
from sojourn.estimate.activations import block_parameters, inner
from sojourn.estimate.constants import constants
from sojourn.estimate.kernel_launch import SLOW_CPU, launch_seconds, shortens, step_seconds
from sojourn.estimate.memory import chunk_rows
from sojourn.estimate.model_states import ends_parameters, head_is_trained, quantised_bytes, trained_parameters
from sojourn.estimate.workload import LINEAR, Workload, layer_groups

WAITING = "waiting for launches"


@dataclass(frozen=True)
class Part:
    """Seconds of a whole step (all its passes)."""

    name: str
    seconds: float
    formula: str


@dataclass(frozen=True)
class StepTime:
    parts: tuple[Part, ...]
    step_seconds: float
    tokens: int  # of a step, over all GPUs

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds

    @property
    def waiting(self) -> float:
        """The share of a step in which the GPU waits for the CPU."""
        seconds = {part.name: part.seconds for part in self.parts}
        return seconds[WAITING] / sum(seconds.values())


def step_time(work: Workload, gpu: Gpu) -> StepTime:
    parts = _gpu_parts(work, gpu)
    busy = sum(part.seconds for part in parts)
    ends, update = parts[1].seconds, parts[-1].seconds
    forward = ends + (busy - ends - update) / (3 - work.uses_lora + (work.activation_checkpointing == "full"))
    waiting = step_seconds(work, forward / work.gradient_accumulation, busy - update, update) - busy
    what = "updates, and CUDA graph replays" if work.cuda_graphs else "launches of layers and updates"
    parts.append(Part(WAITING, waiting, f"{what}, where the GPU is faster"))
    parts.append(
        Part("exchange between GPUs", _exchange(work, gpu, busy), "bytes / link, what the backward cannot hide")
    )
    total = sum(part.seconds for part in parts)
    return StepTime(tuple(parts), total, work.tokens * work.gradient_accumulation * work.world_size)


def is_launch_bound(work: Workload, gpu: Gpu) -> bool:
    """Whether a slow CPU takes longer to launch forward and backward than the GPU to run them."""
    *passes, _ = _gpu_parts(work, gpu)
    return SLOW_CPU * launch_seconds(work) > sum(part.seconds for part in passes)


def _gpu_parts(work: Workload, gpu: Gpu) -> list[Part]:
    """What the GPU computes in a step; the optimizer comes last."""
    passes = work.gradient_accumulation
    return [
        Part("multiplications", passes * _multiplications(work, gpu), "sum over the layers' shapes"),
        Part("head and loss", passes * _head(work, gpu), "V·D multiplications and passes over the logits"),
        Part("attention", passes * _attention(work, gpu), "3.5·forward operations / share of the dense rate"),
        Part("pointwise", passes * _pointwise(work, gpu), "passes over memory / (share·bandwidth)"),
        Part("optimizer", _optimizer(work, gpu), "bytes of weights, gradients, moments / (share·bandwidth)"),
    ]


def has_rate(gpu: Gpu) -> bool:
    """Some vendors tell none; then nothing can be said of a run's time."""
    return any((gpu.bf16_tflops, gpu.fp16_tflops, gpu.fp32_tflops))


def rate(work: Workload, gpu: Gpu) -> float:
    """The card's dense rate in the numbers that are multiplied, operations a second."""
    known = {"bf16": gpu.bf16_tflops, "fp16": gpu.fp16_tflops, "fp32": gpu.tf32_tflops or gpu.fp32_tflops}
    tflops = known[work.precision] or gpu.fp16_tflops or gpu.fp32_tflops or 5.0
    if gpu.capability is not None and gpu.capability < (7, 0):
        tflops = gpu.fp32_tflops or tflops
    return 1e12 * tflops


def matmul(gpu: Gpu, peak: float, m: float, k: float, n: float, e: int, slowness: float | None = None) -> float:
    """Seconds of one multiplication."""
    curve = constants()["matmul"]
    least = e * (m * k + k * n + m * n) / (constants()["traffic"]["share"] * 1e9 * gpu.bandwidth_gbs)
    return float(max((slowness or curve["slowness"]) * 2 * m * k * n / peak, least) + curve["start"])


def layer_shapes(work: Workload) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of a block's linear layers, as one token meets them."""
    shape = work.model
    d, q, k, wide = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, inner(work)
    return {"q_proj": (d, q), "k_proj": (d, k), "v_proj": (d, k), "o_proj": (q, d), "gate_proj": (d, wide),
            "up_proj": (d, wide), "down_proj": (wide, d)}  # fmt: skip


def _multiplications(work: Workload, gpu: Gpu) -> float:
    """Of all blocks: forward, gradient of inputs, gradient of weights where they are trained, and again what is
    recomputed (all but the last layer, whose result nobody needs)."""
    return sum(count * _multiplications_of(kind, gpu) for kind, count in layer_groups(work, work.model.layers))


def _multiplications_of(work: Workload, gpu: Gpu) -> float:
    (peak, slowness), m, e = _rate_and_slowness(work, gpu), work.tokens, work.compute_bytes
    ahead, slower = (rate(work, gpu), None) if work.fp8 == "backward" else (peak, slowness)
    total = 0.0
    for name, (k, n) in _joined(work).items():
        forward = matmul(gpu, ahead, m, k, n, e, slower)
        again = forward if work.activation_checkpointing == "full" and name != "down_proj" else 0.0
        own = 0.0 if work.uses_lora else matmul(gpu, peak, k, m, n, e, slowness)
        total += forward + again + matmul(gpu, peak, m, n, k, e, slowness) + own
    return total + _small(work)


def _small(work: Workload) -> float:
    """Kernels of a block's adapters and 4-bit weights, and for the gradients of norms of queries and keys, which take
    their time however little there is to do. What more tokens cost is counted as passes over memory."""
    costs, how = constants()["small"], "compiled" if work.compiled else "eager"
    if not work.uses_lora:
        return float(1e-6 * costs["norms_eager_us"] * (work.model.qk_norm and not work.compiled))
    adapted = sum(map(work.has_adapter, LINEAR))
    each = costs[f"adapter_{how}_us"] * adapted + costs[f"quantised_{how}_us"] * (work.method == "qlora")
    return float(1e-6 * each * (1.0 if work.activation_checkpointing == "off" else costs["again"]))


def _joined(work: Workload) -> dict[str, tuple[int, int]]:
    """Layers that read the same are one multiplication in fused blocks whose weights are trained."""
    shapes = layer_shapes(work)
    if not (work.fused_forwards and work.has_triton) or work.uses_lora:
        return shapes
    together = [("gate_proj", "up_proj")] + ([] if work.model.qk_norm else [("q_proj", "k_proj", "v_proj")])
    for first, *others in together:
        inputs, outputs = shapes[first]
        shapes[first] = inputs, outputs + sum(shapes.pop(name)[1] for name in others)
    return shapes


def _rate_and_slowness(work: Workload, gpu: Gpu) -> tuple[float, float | None]:
    """Of multiplications in the numbers that the run asks for, and how much slower they are; None: as is usual."""
    if work.fp8 != "off" and gpu.fp8_tflops:
        return 1e12 * gpu.fp8_tflops, constants()["matmul"]["fp8_slowness"]
    return rate(work, gpu), None


def _head(work: Workload, gpu: Gpu) -> float:
    m, e, shape, trained = work.tokens, work.compute_bytes, work.model, head_is_trained(work)
    narrow = work.fp8 == "on" and trained
    peak, slowness = _rate_and_slowness(work, gpu) if narrow else (rate(work, gpu), None)
    each = matmul(gpu, peak, m, shape.hidden, shape.vocab, e, slowness)
    times = 3 if trained else 2
    if work.full_logits:
        passes = 2 + 6 + 12 + 12 + 8  # logits, widened, logarithms, their gradient, narrowed
    elif work.has_triton:
        passes = 2 * e + 2 * e + 2 * e
    else:
        passes = 10 * 4
    if narrow:
        passes += 4
    return times * each + _traffic(gpu, m * shape.vocab * passes + _ends_bytes(work))


def _ends_bytes(work: Workload) -> float:
    """Of embedding and head in one pass, where they are trained: casting, gradients and adding them up, of the head
    once for each chunk of logits."""
    if not head_is_trained(work):
        return 0.0
    chunks = 1 if work.full_logits else -(-work.tokens // chunk_rows(work))
    each = 6 + 10 * chunks + 8 + 4 + (12 if work.model.tied else 0)
    return float(each * work.model.vocab * work.model.hidden)


def _attention(work: Workload, gpu: Gpu) -> float:
    """A document looks back at itself alone; a dense mask computes what it then hides."""
    shape, curve, m = work.model, constants()["attention"], work.tokens
    seen = float(work.document_length if work.is_packed and work.document_length else work.sequence_length)
    masked = work.is_packed and work.attention_backend.mask == "dense"
    if masked:
        seen = 2.0 * work.sequence_length
    windows = shape.sliding_window
    full = shape.full_layers if windows is not None and windows < seen else shape.layers
    near = min(seen, 2.0 * (windows or seen))
    share = curve["peak"] * seen / (seen + curve["half"]) * (min(128, shape.head_dim) / 128) ** curve["narrow"]
    if work.is_packed and work.attention_backend.varlen:
        share *= curve["varlen"]
    context = (full * seen + (shape.layers - full) * near) / shape.layers
    forward = 2.0 * m * context * shape.heads * shape.head_dim
    times = 3.5 + (0.8 if work.activation_checkpointing == "full" else 0.0)  # the forward is the faster part
    seconds = shape.layers * times * forward / (share * rate(work, gpu))
    if work.attention == "math":
        seconds += _traffic(gpu, shape.layers * m * work.sequence_length * shape.heads * 4 * 12)
    return float(seconds)


def _pointwise(work: Workload, gpu: Gpu) -> float:
    """Passes over memory in the blocks of one forward and backward, and what weights cost beside multiplications."""
    shape, e, r, m = work.model, work.compute_bytes, work.residual_bytes, work.tokens
    d, q, wide = shape.hidden, shape.heads * shape.head_dim, inner(work)
    heads = q + 2 * shape.kv_heads * shape.head_dim
    repeated = 2 * (q - shape.kv_heads * shape.head_dim) if shape.kv_heads < shape.heads else 0
    forward = 9 * d * r + (2 * heads + repeated + 3 * wide) * e
    backward = 14 * d * r + (2 * heads + 2 * repeated + 5 * wide) * e
    if shape.qk_norm:
        turned = q + shape.kv_heads * shape.head_dim
        forward, backward = forward + 2 * turned * e, backward + 3 * turned * e
    adapted = [size for name, size in layer_shapes(work).items() if work.has_adapter(name)]
    forward += e * sum(k + 3 * n for k, n in adapted)
    backward += e * sum(2 * k + 3 * n for k, n in adapted)
    if work.lora_dropout:
        forward += e * 2 * sum(k for k, _ in adapted)
        backward += e * 2 * sum(k for k, _ in adapted)
    if work.fp8 != "off":
        backward += 4 * 3 * (d + wide) + 6 * (q + heads + d)  # both ways; six where the largest is not known already
    again = {"off": 0.0, "selective": 0.6, "full": 1.0}[work.activation_checkpointing]
    tokens = shape.layers * m * (forward * (1 + again) + backward) * _passes(work)
    return _traffic(gpu, tokens + shape.layers * _weight_bytes(work))


def _passes(work: Workload) -> float:
    """Against compiled blocks."""
    if work.compiled:
        return 1.0
    return float(constants()["traffic"]["eager_fused" if work.fused_forwards else "eager_plain"])


def _weight_bytes(work: Workload) -> float:
    """Of a block, in one pass: casting, widening 4-bit weights for each use, and summing up gradients."""
    count = block_parameters(work)
    if work.model.experts is not None:  # all experts are read, whoever visits them
        reads = (3 if work.activation_checkpointing == "full" else 2) * work.compute_bytes * work.model.ffn_parameters()
        return reads + (0 if work.uses_lora else 12 * count)
    if work.method == "qlora":
        uses = 2 + (1 if work.activation_checkpointing == "full" else 0)
        return uses * count * (quantised_bytes(work) + 2)
    if work.uses_lora:
        return 0.0
    cast = 6 if work.compute_bytes == 2 and work.engine not in ("fsdp", "deepspeed") else 0
    cast *= 2 if work.activation_checkpointing != "off" else 1
    summed = (6 if work.compute_bytes == 2 else 0) + (12 if work.gradient_accumulation > 1 else 0)
    return count * (cast + summed)


def _optimizer(work: Workload, gpu: Gpu) -> float:
    """Weights and gradients read and written, moments too; moments on the host travel over the bus both ways."""
    count = trained_parameters(work) / (work.world_size if work.is_sharded else 1)
    norm = 4 if shortens(work) else 12  # only AdamW of torch shortens gradients on its way
    moments = {"adamw_8bit": 4, "paged_adamw_8bit": 4, "muon": 8}.get(work.optimizer, 16)
    slow = 1 / float(constants()["update"]["share_8bit"]) if "8bit" in work.optimizer else 1.0
    seconds = _traffic(gpu, count * (slow * (4 + 8 + moments) + norm))
    if work.optimizer == "muon" and not work.uses_lora:
        rounds = 5 * 6.0 * work.model.hidden * (count - ends_parameters(work))
        seconds += rounds / (0.5 * rate(work, gpu))
    bus = float(constants()["links"]["host"]) * 1e9 * (gpu.pcie_gbs or 16.0)
    if work.offload != "off":
        seconds += 16 * count / bus
    if work.offload == "all":
        seconds += work.gradient_accumulation * 2 * 2 * work.model.parameters / bus
    return seconds


def link_bytes(work: Workload, gpu: Gpu) -> float:
    """Bytes a second of one card to the others, one direction, as collectives reach it. A ring is as fast as its
    slowest link."""
    links = constants()["links"]
    if work.nodes > 1:
        return 1e9 * min(float(links["network_gbs"]), float(links["pcie"]) * (gpu.pcie_gbs or 8.0))
    if gpu.nvlink_gbs is not None and (gpu.nvlink_peers or 0) >= work.world_size and (gpu.nvlink_peers or 0) > 2:
        return float(links["nvlink"]) * 1e9 * gpu.nvlink_gbs / 2
    return float(links["pcie"]) * 1e9 * (gpu.pcie_gbs or 8.0)


def _exchange(work: Workload, gpu: Gpu, busy: float) -> float:
    """Gradients go around once a step; weights that are cut are gathered in every pass."""
    if work.world_size == 1:
        return 0.0
    share = (work.world_size - 1) / work.world_size
    sent = 2 * share * 4 * trained_parameters(work)
    if work.is_sharded:
        whole = work.compute_bytes if work.method != "qlora" else quantised_bytes(work)
        gathers = (2 if work.reshard_after_forward else 1) * whole * work.model.parameters
        sent = share * work.gradient_accumulation * (gathers + (4 * trained_parameters(work)))
    seconds, hidden = sent / link_bytes(work, gpu), float(constants()["links"]["hidden"])
    return max(0.05 * seconds, seconds - hidden * busy)


def _traffic(gpu: Gpu, size: float) -> float:
    return float(size / (constants()["traffic"]["share"] * 1e9 * gpu.bandwidth_gbs))
