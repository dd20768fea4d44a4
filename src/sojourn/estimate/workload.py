"""The work of one rank in one step, as far as memory and time depend on it. `resolve/workload.py` makes it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from sojourn.catalog.models import ModelSpec
from sojourn.config.attention_backends import ATTENTION_BACKENDS, AttentionBackend

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EXPERTS = ("gate_proj", "up_proj", "down_proj")
_UNPACKED_EXPERTS = ("llama4", "llama4_text")  # experts in a form of their own, which stay as they are
_NF4_BLOCK, _NF4_GROUP = 64, 256  # weights per scale, and scales per second scale (double quantization)


@dataclass(frozen=True)
class Workload:
    """`micro_batch` rows of `sequence_length` tokens, `gradient_accumulation` times for each optimizer step.

    document_length   tokens of a usual document, where rows are packed with several; None where one fills the row
    has_triton        torch can compile kernels for the device
    full_logits       the logits of all tokens exist at once, instead of chunk by chunk
    cuda_graphs       forward+backward is captured as a CUDA graph and replayed
    graph_memory      the memory of a CUDA graph is counted: where one is captured, and where `auto` may capture one
    master_weights    `train.master_weights`
    optimizer_in_backward  parameters are updated in the backward, and their gradients freed
    async_step        `advanced.async_step`: the next step is launched before the last one's loss is read
    with_evaluation   the run evaluates, too
    in_training_loop  with what a run does between steps: reading rows, logging, watching the clock
    cpu_slowness      time to launch a kernel, over that of a usual CPU
    network_gbs       GB/s of one machine's links to the others, in one direction; None: those of rented ones
    """

    model: ModelSpec
    method: str = "pretrain"
    micro_batch: int = 1
    sequence_length: int = 1024
    gradient_accumulation: int = 1
    document_length: int | None = None
    device_type: str = "cuda"
    compute_capability: tuple[int, int] = (9, 0)
    precision: str = "bf16"
    fused_forwards: bool = True
    compiled: bool = True
    has_triton: bool = True
    attention: str = "varlen"
    activation_checkpointing: str = "off"
    full_logits: bool = False
    fp8: str = "off"
    cuda_graphs: bool = False
    graph_memory: bool = False
    async_step: bool = True
    optimizer: str = "adamw"
    master_weights: str = "fp32"
    optimizer_in_backward: bool = False
    offload: str = "off"
    lora_rank: int = 16
    lora_targets: tuple[str, ...] = LINEAR
    adapts_experts: bool = False
    lora_dropout: float = 0.0
    modules_to_save: tuple[str, ...] = ()
    quant_bits: int = 4
    double_quant: bool = True
    engine: str = "single"
    world_size: int = 1
    nodes: int = 1
    zero_stage: int = 2
    reshard_after_forward: bool = True
    with_evaluation: bool = True
    in_training_loop: bool = True
    cpu_slowness: float = 1.0
    network_gbs: float | None = None

    @property
    def tokens(self) -> int:
        """Tokens of one micro batch."""
        return self.micro_batch * self.sequence_length

    @property
    def uses_lora(self) -> bool:
        return self.method in ("lora", "qlora")

    @property
    def compute_bytes(self) -> int:
        """Bytes of an element of a matmul's operands."""
        return 4 if self.precision == "fp32" else 2

    @property
    def trained_bytes(self) -> int:
        """Bytes of an element of trained weights and of their gradients; adapters are fp32."""
        return 4 if self.master_weights == "fp32" else 2

    @property
    def low_memory_optimizer(self) -> bool:
        """Whether train/optim/low_memory_adamw.py updates: paged states are then in pinned host memory."""
        return self.master_weights != "fp32" or self.optimizer_in_backward

    @property
    def residual_bytes(self) -> int:
        """Bytes of an element of the residual stream: 2 in fused bf16 forwards and on a frozen 16-bit base; else
        autocast leaves it in the embedding's fp32."""
        if self.precision == "fp32":
            return 4
        has_bf16_weights = self.uses_lora or self.master_weights != "fp32"
        return 2 if has_bf16_weights or (self.precision == "bf16" and self.fused_forwards) else 4

    @property
    def recomputes_layers(self) -> bool:
        """Whether the backward computes layers again, from their inputs."""
        return self.activation_checkpointing in ("full", "offload")

    @property
    def offloads_inputs(self) -> bool:
        """Whether layer inputs wait in host memory (model/offloaded_layers.py)."""
        return self.activation_checkpointing == "offload" and self.device_type == "cuda"

    @property
    def is_packed(self) -> bool:
        return self.document_length is not None and self.document_length < self.sequence_length

    @property
    def is_sharded(self) -> bool:
        return self.engine in ("fsdp", "deepspeed") and self.world_size > 1

    @property
    def attention_backend(self) -> AttentionBackend:
        return ATTENTION_BACKENDS[self.attention]

    @cached_property
    def trainable_parameters(self) -> int:
        model, whole = self.model, self.modules_to_save
        if not self.uses_lora:
            return model.parameters
        embedding, head = "embed_tokens" in whole, "lm_head" in whole
        copies = (embedding or head) if model.tied else embedding + head
        return self.lora_parameters + copies * model.embedding_parameters

    @cached_property
    def lora_parameters(self) -> int:
        """Parameters of the LoRA adapters of all layers."""
        model = self.model
        q, k, d = model.heads * model.head_dim, model.kv_heads * model.head_dim, model.hidden
        sizes = {"q_proj": d + q, "k_proj": d + k, "v_proj": d + k, "o_proj": q + d}
        sizes |= dict.fromkeys(EXPERTS, d + model.ffn)
        linear = model.layers * sum(size for name, size in sizes.items() if self.has_adapter(name))
        each = 2 * d + 3 * (model.expert_ffn or 0)  # gate and up are one matrix
        experts = model.sparse_layers * (model.experts or 0) * each if self.adapts_experts else 0
        return self.lora_rank * (linear + experts)

    @property
    def largest_parameter(self) -> int:
        """Elements of the largest trained tensor."""
        model = self.model
        if self.uses_lora:
            experts = (model.experts or 0) * max(2 * (model.expert_ffn or 0), model.hidden) * self.adapts_experts
            return self.lora_rank * max(model.ffn, model.hidden, model.heads * model.head_dim, experts)
        return max(model.embedding_parameters, model.hidden * model.ffn)

    @property
    def quantized_bytes(self) -> float:
        """Bytes of one quantized weight of the base, scales included."""
        if self.quant_bits == 8:
            return 1.0 + 4 / self.model.hidden
        scale = (1 + 4 / _NF4_GROUP) if self.double_quant else 4
        return 0.5 + scale / _NF4_BLOCK

    def has_adapter(self, name: str) -> bool:
        """Whether this linear layer has a LoRA adapter. Experts are no linear layers: see `adapts_experts`."""
        adaptable = self.model.experts is None or name not in EXPERTS
        return self.uses_lora and adaptable and name in self.lora_targets

    @property
    def quantizes_experts(self) -> bool:
        """NF4 only: bitsandbytes' int8 is for linear layers."""
        known = self.model.experts is not None and self.model.family not in _UNPACKED_EXPERTS
        return known and self.method == "qlora" and self.quant_bits == 4

    @property
    def expert_weight(self) -> int:
        """Elements of the larger weight of one layer's experts: gate and up."""
        return 2 * (self.model.experts or 0) * (self.model.expert_ffn or 0) * self.model.hidden

    def has_plain_lora(self, *names: str) -> bool:
        """Whether linear layers and their adapters are functions of model/kernels/lora_linear.py."""
        eager = self.fused_forwards and not self.compiled and self.precision != "fp16" and not self.lora_dropout
        eager = eager and self.activation_checkpointing != "selective"
        dense = self.method == "lora" or (self.device_type == "cuda" and self.quant_bits == 4)
        return eager and dense and all(self.has_adapter(name) for name in names)

    def saves_input(self, name: str) -> bool:
        """Whether this linear layer's input is saved for a gradient of weights."""
        return not self.uses_lora or self.has_adapter(name)


def layer_groups(workload: Workload, layers: int) -> list[tuple[Workload, int]]:
    """The first `layers` layers, grouped by how they compute, with the size of each group: with
    `fp8=except_last_layer` the last layer is a group of its own."""
    if workload.fp8 != "except_last_layer" or layers < workload.model.layers:
        return [(workload, layers)]
    return [(workload, layers - 1), (replace(workload, fp8="off"), 1)]
