"""The memory of a step: the peak is the largest of several phases, each a list of named terms.

Phases follow the code that runs: train/step.py, model/loss.py, model/activation_checkpointing.py and
train/optim/optimizers.py. activations.py has what layers save, model_states.py what lives through the step.
T tokens of a micro batch, V vocabulary, D hidden size, F feed-forward size, e bytes of an element in matmuls, r bytes
of an element of the residual stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from sojourn.estimate.activations import (
    activations_outside_layers,
    layer_parameters,
    saved_activations,
    saved_weight_casts,
)
from sojourn.estimate.allocator import cublas_workspace, cuda_context, fragmentation
from sojourn.estimate.backward_buffers import backward_buffers
from sojourn.estimate.kernel_launch import muon_groups
from sojourn.estimate.model_states import (
    TEMPORARY,
    Term,
    embedding_and_head_parameters,
    gathered_parameters,
    gradients,
    keeps_gradients,
    lm_head_is_trained,
    optimizer_states,
    persistent_tensors,
    weights,
)
from sojourn.estimate.workload import Workload, layer_groups

# Bytes of a chunk of fp32 logits. A CPU's should stay near its cache.
LOGIT_CHUNK_BYTES = {"triton": 2**30, "cuda": 2**28, "cpu": 2**24}
SMALL_LOGIT_CHUNK_BYTES = 2**28  # at most, with activation_checkpointing=offload
MIN_CHUNK_TOKENS = 256  # smaller matmuls leave the device idle
_UPDATE = "optimizer step"
_LOGITS = "logits"  # a kind of terms
_TRANSIENT = ("activations", _LOGITS, TEMPORARY)
SAFE_SHARE = 0.97  # of the usable memory: a plan that says "fits" must be right
_NCCL_BYTES = 2**29  # for communication between GPUs; assumed, not measured
_AUTOTUNE_BYTES = 64 * 2**20  # Triton autotunes with a buffer as large as the L2 cache (measured: 60 MiB)
_GRAPH_SEGMENT_BYTES = 48 * 2**20  # CUDA graphs have allocator segments of their own


@dataclass(frozen=True)
class Phase:
    name: str
    terms: tuple[Term, ...]

    @property
    def bytes(self) -> float:
        return sum(term.bytes for term in self.terms)

    def by_kind(self) -> dict[str, float]:
        kinds: dict[str, float] = {}
        for term in self.terms:
            kinds[term.kind] = kinds.get(term.kind, 0.0) + term.bytes
        return kinds


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes. `allocated`: torch.cuda.max_memory_allocated(); `device`: with allocator fragmentation and CUDA context;
    `enough`: of the smallest GPU that the run is said to fit on."""

    phases: tuple[Phase, ...]
    cuda_context: int
    fragmentation: float
    margin: int = 0

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.bytes)

    @property
    def allocated(self) -> int:
        return int(self.peak.bytes)

    @property
    def device(self) -> int:
        return int(self.peak.bytes + self.fragmentation) + self.cuda_context

    @property
    def enough(self) -> int:
        return max(int(self.device / SAFE_SHARE), self.device + self.margin)


def memory_budget(free: float, ranks: int) -> float:
    """Bytes that a run may be planned into, of the free bytes of a GPU, where `ranks` share the run."""
    return SAFE_SHARE * free - (_NCCL_BYTES if ranks > 1 else 0)


@lru_cache(4096)  # GPUs of a generation have the same workloads
def memory(workload: Workload) -> MemoryEstimate:
    phases = [
        _loading(workload),
        _loss(workload),
        _last_layer(workload),
        _first_layer(workload),
        _end_of_backward(workload),
        _step(workload),
    ]
    if workload.with_evaluation:
        phases.append(_evaluation(workload))
    peak = max(phases, key=lambda phase: phase.bytes)
    transient = sum(term.bytes for term in peak.terms if term.kind in _TRANSIENT)
    fragmented, margin = fragmentation(persistent_tensors(workload), transient), _AUTOTUNE_BYTES
    if workload.graph_memory:
        fragmented, margin = fragmented + _graph_overhead(workload, phases), margin + _GRAPH_SEGMENT_BYTES
    return MemoryEstimate(tuple(phases), cuda_context(workload), fragmented, margin)


def _graph_overhead(workload: Workload, phases: list[Phase]) -> float:
    """A captured graph keeps its memory through the optimizer step, whose buffers come on top. Offloaded optimizer
    states are freed late, since they are copied in another stream, so that twice as many are there."""
    passes = max(phase.bytes for phase in phases if phase.name != _UPDATE)
    most = max(phase.bytes for phase in phases)
    return max(0.0, passes + 2 * sum(term.bytes for term in _update_buffers(workload)) - most)


def chunk_rows(workload: Workload, trains: bool = True) -> int:
    """Target tokens whose logits exist at a time. Evaluation does not use the Triton kernel."""
    uses_triton = workload.device_type == "cuda" and workload.has_triton and trains
    kind = "triton" if uses_triton else "cpu" if workload.device_type == "cpu" else "cuda"
    return logit_chunk_rows(workload.model.vocab, kind, workload.activation_checkpointing == "offload")


def logit_chunk_rows(vocab_size: int, kind: str, small: bool) -> int:
    """`kind`: triton, cuda or cpu; `small`: as small as is efficient."""
    size = min(LOGIT_CHUNK_BYTES[kind], SMALL_LOGIT_CHUNK_BYTES) if small else LOGIT_CHUNK_BYTES[kind]
    return max(MIN_CHUNK_TOKENS, size // (4 * vocab_size))


def _model_states(
    workload: Workload, with_gradients: bool, backward: bool = False, computing: bool = True
) -> list[Term]:
    """Weights, optimizer states, gradients; where they are sharded, what is gathered at a time."""
    terms = [
        *weights(workload),
        *optimizer_states(workload),
        *(gathered_parameters(workload, backward) if computing else ()),
    ]
    terms.append(Term(TEMPORARY, "cuBLAS workspace", cublas_workspace(workload), "by architecture"))
    return [*terms, gradients(workload)] if with_gradients else terms


def _activations(workload: Workload, layers: int, in_backward: bool = False) -> list[Term]:
    """Of so many layers, and outside of layers. Of the final norm's in the backward only offloaded runs are known to
    need none."""
    t, freed = workload.tokens, in_backward and workload.offloads_inputs
    outside = activations_outside_layers(workload)
    ends = sum(row.bytes for row in outside if not (freed and row.name.startswith("final norm")))
    terms = [term for kind, count in layer_groups(workload, layers) for term in _activations_of(kind, count)]
    return [*terms, Term("activations", "outside of layers", t * ends, f"T·{ends:g}")]


def _activations_of(workload: Workload, layers: int) -> list[Term]:
    t = workload.tokens
    terms = [
        Term(
            "activations", row.name, t * row.bytes * layers, f"T·{layers}·{row.formula} = {t:,}·{layers}·{row.bytes:g}"
        )
        for row in saved_activations(workload)
    ]
    if workload.activation_checkpointing == "off" and saved_weight_casts(workload):
        width = 1 if workload.fp8 != "off" and not workload.uses_lora else 2
        terms.append(
            Term(
                "activations",
                "weights in the compute dtype",
                layers * saved_weight_casts(workload),
                f"{layers}·{width}·layer",
            )
        )
    return terms


def _loss(workload: Workload) -> Phase:
    """The loss of the last chunks: all activations are saved, and logits exist."""
    held = _model_states(workload, keeps_gradients(workload))
    layers = workload.model.layers
    terms = [*held, *_activations(workload, layers), *_logits(workload)]
    by_autocast = workload.compute_bytes == 2 and not (workload.fused_forwards and workload.precision == "bf16")
    if workload.activation_checkpointing != "off" and by_autocast and not workload.compiled:
        kept = layers * saved_weight_casts(workload)
        terms.append(
            Term("activations", "weights in the compute dtype, until autocast ends", kept, f"{layers}·2·trained")
        )
    return Phase("loss, at the end of the forward", tuple(terms))


def _logits(workload: Workload) -> list[Term]:
    model, e, t = workload.model, workload.compute_bytes, workload.tokens
    v, d = model.vocab, model.hidden
    hidden = Term(_LOGITS, "hidden states of targets and their gradient", 2 * t * d * e, "2·T·D·e")
    if workload.full_logits:
        return [
            hidden,
            Term(_LOGITS, "logits of all tokens", 12 * t * v, "T·V·(4 + 4 + 4): log-softmax and two gradients"),
        ]
    rows = min(t, chunk_rows(workload))
    several = t > rows
    # The Triton kernel writes the gradient over the logits. A chunk's logits still exist while the next chunk's are
    # computed, but not while it is cast to FP8.
    after = min(rows, t - rows)
    if workload.device_type == "cuda" and workload.has_triton:
        fp8 = rows if workload.fp8 == "on" and lm_head_is_trained(workload) else 0
        size, formula = e * (rows + max(after, fp8)), "(chunk + the next, or its two FP8 casts)·V·e"
    else:
        size, formula = (4 + 2 * e) * rows + e * after, "(chunk·(4 + 2e) + the next·e)·V"
    terms = [hidden, Term(_LOGITS, "logits of a chunk", size * v, f"{formula} = {size:,}·{v:,}")]
    if lm_head_is_trained(workload):
        own = workload.trained_bytes
        terms.append(Term(_LOGITS, "gradient of the LM head, accumulated", own * v * d, f"{own}·V·D"))
        # Two chunks' gradients exist with one chunk's logits, then one with two; both are counted, since runs were
        # proven to fit into that.
        if own == 4:  # bf16 gradients are summed in the matmul
            chunks = 2 if several else 1
            terms.append(Term(_LOGITS, "gradient of the LM head, of a chunk", chunks * e * v * d, "2·V·D·e"))
        if e < own:
            terms.append(Term(_LOGITS, "LM head in the compute dtype", e * v * d, "V·D·e"))
        if workload.fp8 == "on":
            terms.append(Term(_LOGITS, "LM head in FP8, twice", 2 * v * d, "2·V·D"))
    return terms


def _loss_buffers(workload: Workload, at_start: bool) -> list[Term]:
    """Gradients that the loss hands on. `at_start` of the backward the LM head's is not among the gradients yet, and a
    tied one is not until the backward ends."""
    if workload.offloads_inputs:  # they are freed before a layer's buffers are at their largest
        return []
    t, model = workload.tokens, workload.model
    terms = [Term(_LOGITS, "gradient of hidden states", t * model.hidden * workload.compute_bytes, "T·D·e")]
    # Of fp32 weights it is counted in all phases: runs were proven to fit into that.
    counted = at_start or model.tied or not workload.low_memory_optimizer
    if lm_head_is_trained(workload) and not workload.full_logits and counted:
        held = workload.trained_bytes * model.vocab * model.hidden
        terms.append(Term(_LOGITS, "gradient of the LM head, from the loss", held, f"{workload.trained_bytes}·V·D"))
    return terms


def _last_layer(workload: Workload) -> Phase:
    layers = workload.model.layers
    held = _model_states(workload, keeps_gradients(workload), backward=True)
    from_loss = _loss_buffers(workload, at_start=not workload.optimizer_in_backward)  # else applied by now
    terms = [*held, *_activations(workload, layers, in_backward=True), *from_loss, *backward_buffers(workload)]
    return Phase("backward of the last layer", tuple(terms))


def _first_layer(workload: Workload) -> Phase:
    """All gradients exist but the embedding's and this layer's."""
    held, whole = _model_states(workload, False, backward=True), gradients(workload)
    missing = whole.bytes if workload.optimizer_in_backward else 0.0
    if not (missing or keeps_gradients(workload) or workload.uses_lora):
        share = embedding_and_head_parameters(workload) if workload.model.tied else workload.model.embedding_parameters
        missing = whole.bytes * (share + layer_parameters(workload)) / workload.model.parameters
    grads = Term(whole.kind, whole.name, whole.bytes - missing, whole.formula)
    terms = [*held, grads, *_activations(workload, 1, in_backward=True)]
    return Phase("backward of the first layer", (*terms, *_loss_buffers(workload, False), *backward_buffers(workload)))


def _end_of_backward(workload: Workload) -> Phase:
    """The embedding's gradient is added; where it is tied, to the LM head's."""
    terms = [*_model_states(workload, True, backward=True), *_loss_buffers(workload, False)]
    if not workload.uses_lora:
        size = workload.trained_bytes * workload.model.embedding_parameters
        again = size if workload.model.tied or keeps_gradients(workload) else 0
        terms.append(Term(TEMPORARY, "gradient of the embedding, before it is added", again, "4·V·D"))
    return Phase("end of the backward", tuple(terms))


def _step(workload: Workload) -> Phase:
    terms = _model_states(workload, True, computing=False)
    return Phase(_UPDATE, (*terms, *_update_buffers(workload)))


def _update_buffers(workload: Workload) -> list[Term]:
    """Buffers of the optimizer step."""
    matrix = workload.largest_parameter if workload.uses_lora else workload.model.hidden * workload.model.ffn
    terms = []
    if workload.offload == "optimizer" and workload.engine != "deepspeed" and not workload.low_memory_optimizer:
        fetched = 2 * 4 * (workload.largest_parameter + matrix)
        terms.append(
            Term(
                TEMPORARY,
                "optimizer states of two parameters, fetched from the host",
                fetched,
                "2·4·(largest + matrix)",
            )
        )
    if workload.optimizer == "muon":
        matrices = max(elements for elements, _ in muon_groups(workload))
        most = max(8 * matrices, 4 * workload.largest_parameter)
        terms.append(
            Term(TEMPORARY, "Newton-Schulz of a group, or the largest parameter's update", most, "8·n·D·F or 4·V·D")
        )
    return terms


def _evaluation(workload: Workload) -> Phase:
    """The forward alone; logits in fp32."""
    e, t, v = workload.compute_bytes, workload.tokens, workload.model.vocab
    rows = min(t, chunk_rows(workload, trains=False))
    each = 8 + e if t > rows else 8
    layer = workload.tokens * (3 * workload.model.active_ffn + 4 * workload.model.hidden) * e
    terms = [
        *_model_states(workload, workload.engine == "ddp"),
        Term("activations", "forward of a layer", layer, "T·(3F + 4D)·e"),
        Term(_LOGITS, "logits of a chunk in fp32", rows * v * each, f"chunk·V·{each}"),
    ]
    return Phase("evaluation", tuple(terms))


def _loading(workload: Workload) -> Phase:
    """The weights, and one tensor as it is read and cast."""
    each = workload.trained_bytes
    loading = 2 * each * workload.largest_parameter
    terms = [*weights(workload), Term(TEMPORARY, "tensor being loaded", loading, f"2·{each}·largest")]
    if workload.quantizes_experts:  # one by one, stacked, and gate and up concatenated
        size = 3 * workload.compute_bytes * workload.expert_weight
        terms.append(Term(TEMPORARY, "experts of a layer, before they are quantized", size, "3·e·experts·2·F·D"))
    return Phase("loading", tuple(terms))
