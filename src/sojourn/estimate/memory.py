"""How much memory a step needs: the peak is the largest of several moments, each a list of named terms.

Moments follow the code that runs: train/step.py, model/loss.py, model/layers.py, train/optim/optimizers.py. What a
layer keeps is in activations.py, what stays through the step in model_states.py.
T tokens of a pass, V vocabulary, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

from sojourn.estimate.activations import block_keeps, block_parameters, inner, kept_between, kept_casts, outside_blocks
from sojourn.estimate.allocator import context, lost, workspace
from sojourn.estimate.kernel_launch import together
from sojourn.estimate.model_states import (
    Term,
    always_gradients,
    ends_parameters,
    gathered,
    gradients,
    head_is_trained,
    largest_parameter,
    optimizer,
    tensors,
    weights,
)
from sojourn.estimate.workload import Workload, layer_groups

LOGIT_CHUNK_BYTES = {
    "triton": 2**30,
    "cuda": 2**28,
    "cpu": 2**24,
}  # of a chunk of logits in fp32; model/loss.py uses it
MIN_CHUNK_TOKENS = 256
_UPDATE = "optimizer's step"
_CHANGING = ("activations", "loss", "temporary")
SAFE = 0.97  # of the usable memory: a plan that says "fits" must be right
_TALKING = 2**29  # what GPUs may take to talk to each other; not measured
_TUNED_WITH = 64 * 2**20  # kernels are tuned with a scratch as large as the cache of the GPU (seen: 60 MiB)
_RECORDED_IN = 48 * 2**20  # recordings have segments of their own


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
class Memory:
    """`allocated` is what torch counts at the peak; `device` what the card then lacks; a card that has `enough` is the
    smallest that the run is said to fit on."""

    phases: tuple[Phase, ...]
    context: int
    lost: float
    margin: int = 0

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.bytes)

    @property
    def allocated(self) -> int:
        return int(self.peak.bytes)

    @property
    def device(self) -> int:
        return int(self.peak.bytes + self.lost) + self.context

    @property
    def enough(self) -> int:
        return max(int(self.device / SAFE), self.device + self.margin)


def room_in(free: float, count: int) -> float:
    """What of a card's free bytes a run may be planned into, where `count` GPUs share it."""
    return SAFE * free - (_TALKING if count > 1 else 0)


def memory(work: Workload) -> Memory:
    phases = [_loading(work), _loss(work), _last_block(work), _first_block(work), _end_of_backward(work), _step(work)]
    if work.with_evaluation:
        phases.append(_evaluation(work))
    peak = max(phases, key=lambda phase: phase.bytes)
    changing = sum(term.bytes for term in peak.terms if term.kind in _CHANGING)
    loses, margin = lost(tensors(work), changing), _TUNED_WITH
    if work.graph_memory:
        loses, margin = loses + _beside(work, phases), margin + _RECORDED_IN
    return Memory(tuple(phases), context(work), loses, margin)


def _beside(work: Workload, phases: list[Phase]) -> float:
    """A recording keeps its memory through the update, which has its own beside it. Visitors from the host leave late,
    since they travel in another stream, so that there are twice as many."""
    passes = max(phase.bytes for phase in phases if phase.name != _UPDATE)
    most = max(phase.bytes for phase in phases)
    return max(0.0, passes + 2 * sum(term.bytes for term in _visitors(work)) - most)


def chunk_rows(work: Workload, trains: bool = True) -> int:
    """Target tokens whose logits exist at a time, as model/loss.py cuts them; evaluation has no kernel for them."""
    on_gpu = work.device_type == "cuda"
    kind = "triton" if on_gpu and work.has_triton and trains else "cpu" if work.device_type == "cpu" else "cuda"
    return int(max(MIN_CHUNK_TOKENS, LOGIT_CHUNK_BYTES[kind] // (4 * work.model.vocab)))


def _held(work: Workload, with_gradients: bool, backward: bool = False, computing: bool = True) -> list[Term]:
    """What stays through the step, and where it is cut, what of it is gathered just now."""
    terms = [*weights(work), *optimizer(work), *(gathered(work, backward) if computing else ())]
    terms.append(Term("temporary", "cuBLAS' workspace", workspace(work), "by architecture"))
    return [*terms, gradients(work)] if with_gradients else terms


def _activations(work: Workload, layers: int) -> list[Term]:
    """Of so many blocks, and of the ends."""
    t = work.tokens
    ends = sum(row.bytes for row in outside_blocks(work))
    terms = [term for kind, count in layer_groups(work, layers) for term in _activations_of(kind, count)]
    return [*terms, Term("activations", "the ends of the model", t * ends, f"T·{ends:g}")]


def _activations_of(work: Workload, layers: int) -> list[Term]:
    t = work.tokens
    terms = [
        Term(
            "activations", row.name, t * row.bytes * layers, f"T·{layers}·{row.formula} = {t:,}·{layers}·{row.bytes:g}"
        )
        for row in kept_between(work)
    ]
    if work.activation_checkpointing == "off" and kept_casts(work):
        width = 1 if work.fp8 != "off" and not work.uses_lora else 2
        terms.append(Term("activations", "weights, cast", layers * kept_casts(work), f"{layers}·{width}·block"))
    return terms


def _loss(work: Workload) -> Phase:
    """The forward is over, and the loss at its last chunks: everything is kept, and logits are there."""
    held = _held(work, always_gradients(work))
    layers = work.model.layers
    terms = [*held, *_activations(work, layers), *_logits(work)]
    by_autocast = work.compute_bytes == 2 and not (work.fused_forwards and work.precision == "bf16")
    if work.activation_checkpointing != "off" and by_autocast and not work.compiled:
        kept = layers * kept_casts(work)
        terms.append(Term("activations", "weights, cast, until autocast ends", kept, f"{layers}·2·what is trained"))
    return Phase("end of the forward, in the loss", tuple(terms))


def _logits(work: Workload) -> list[Term]:
    shape, e, t = work.model, work.compute_bytes, work.tokens
    v, d = shape.vocab, shape.hidden
    hidden = Term("loss", "hidden states of targets, and their gradient", 2 * t * d * e, "2·T·D·e")
    if work.full_logits:
        return [
            hidden,
            Term("loss", "logits of all tokens", 12 * t * v, "T·V·(4 + 4 + 4): their logarithms, two gradients"),
        ]
    rows = min(t, chunk_rows(work))
    several = t > rows
    # With a kernel the logits become their own gradient; a chunk's are still there while the next one's are made, and
    # gone when its own 8-bit versions are.
    after = min(rows, t - rows)
    if work.device_type == "cuda" and work.has_triton:
        narrow = rows if work.fp8 == "on" and head_is_trained(work) else 0
        size, says = e * (rows + max(after, narrow)), "(chunk + the next, or 8 bits of it both ways)·V·e"
    else:
        size, says = (4 + 2 * e) * rows + e * after, "(chunk·(4 + 2e) + the next·e)·V"
    terms = [hidden, Term("loss", "logits of a chunk", size * v, f"{says} = {size:,}·{v:,}")]
    if head_is_trained(work):
        terms.append(Term("loss", "the head's gradient, summed up", 4 * v * d, "4·V·D"))
        # Of several chunks two parts are there with one chunk's logits, then one with two; both are counted, since
        # that is what runs were proven to fit into.
        terms.append(Term("loss", "a chunk's part of it", (2 if several else 1) * e * v * d, "2·V·D·e"))
        if e < 4:
            terms.append(Term("loss", "the head, cast", e * v * d, "V·D·e"))
        if work.fp8 == "on":
            terms.append(Term("loss", "the head in 8 bits, both ways", 2 * v * d, "2·V·D"))
    return terms


def _head_held(work: Workload) -> list[Term]:
    """The loss keeps its gradients until the backward is over; what is handed on is a copy."""
    t, shape = work.tokens, work.model
    terms = [Term("loss", "gradient of hidden states", t * shape.hidden * work.compute_bytes, "T·D·e")]
    if head_is_trained(work) and not work.full_logits:
        held = 4 * shape.vocab * shape.hidden
        terms.append(Term("loss", "the head's gradient, held by the loss", held, "4·V·D"))
    return terms


def _within(work: Workload) -> list[Term]:
    """What a block's backward makes beside what was kept: at its largest in the feed-forward."""
    shape, e, t, wide = work.model, work.compute_bytes, work.tokens, inner(work)
    # Not compiled, gate and up turn into their gradients in place, and what is used up goes at once.
    apart = work.compiled or not (work.fused_forwards and work.has_triton and work.device_type == "cuda")
    wides = (2 if apart else 0) + (2 if work.has_adapter("down_proj") else 1)
    streams, stream = (2 if apart else 1), t * shape.hidden * work.residual_bytes
    terms = [
        Term("temporary", "gradients in the feed-forward", t * wide * e * wides, f"T·F·e·{wides}"),
        Term("temporary", "gradients of the residual stream", stream * streams, f"{streams}·T·D·r"),
    ]
    if work.activation_checkpointing != "off":
        kept, again = kept_between(work), block_keeps(work)
        made = max(0.0, sum(row.bytes for row in again) - sum(row.bytes for row in kept))
        terms.append(Term("activations", "one block, made again", t * made, f"T·{made:g}"))
        terms.append(Term("activations", "its weights, cast", kept_casts(work), "as wide as is multiplied"))
        if work.compiled and work.uses_lora:
            sides = _adapted_outputs(work) * e
            terms.append(Term("temporary", "adapters' results, before they are added", t * sides, f"T·{sides:g}"))
    if not work.uses_lora and not work.is_sharded:
        times = 4 if work.compiled else 4 / 3  # compiled blocks hand over all gradients of their weights at once
        own = times * block_parameters(work)
        terms.append(
            Term("temporary", "gradients of a block's weights", own, "4·block, of the largest alone if not compiled")
        )
    return terms


def _adapted_outputs(work: Workload) -> int:
    shape = work.model
    q, k, wide = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, inner(work)
    sizes = {"q_proj": q, "k_proj": k, "v_proj": k, "o_proj": shape.hidden, "gate_proj": wide, "up_proj": wide,
             "down_proj": shape.hidden}  # fmt: skip
    return sum(size for name, size in sizes.items() if work.has_adapter(name))


def _last_block(work: Workload) -> Phase:
    layers = work.model.layers
    held = _held(work, always_gradients(work), backward=True)
    terms = [*held, *_activations(work, layers), *_head_held(work), *_within(work)]
    return Phase("backward of the last block", tuple(terms))


def _first_block(work: Workload) -> Phase:
    """All other gradients are there, the embedding's is not yet."""
    held, whole = _held(work, False, backward=True), gradients(work)
    missing = 0.0
    if not always_gradients(work) and not work.uses_lora:
        share = ends_parameters(work) if work.model.tied else work.model.embedding_parameters
        missing = whole.bytes * (share + block_parameters(work)) / work.model.parameters
    terms = [*held, Term(whole.kind, whole.name, whole.bytes - missing, whole.formula), *_activations(work, 1)]
    return Phase("backward of the first block", (*terms, *_head_held(work), *_within(work)))


def _end_of_backward(work: Workload) -> Phase:
    """The embedding's gradient arrives; where it is tied to the head, beside the head's, and then their sum."""
    terms = [*_held(work, True, backward=True), *_head_held(work)]
    if not work.uses_lora:
        size = 4 * work.model.embedding_parameters
        again = size if work.model.tied or always_gradients(work) else 0
        terms.append(Term("temporary", "the embedding's gradient, before it is added", again, "4·V·D"))
    return Phase("end of the backward", tuple(terms))


def _step(work: Workload) -> Phase:
    terms = _held(work, True, computing=False)
    return Phase(_UPDATE, (*terms, *_visitors(work)))


def _visitors(work: Workload) -> list[Term]:
    """What the update makes and lets go."""
    matrix = largest_parameter(work) if work.uses_lora else work.model.hidden * work.model.ffn
    terms = []
    if work.offload == "optimizer" and work.engine != "deepspeed":
        visiting = 2 * 4 * (largest_parameter(work) + matrix)
        terms.append(Term("temporary", "moments of two parameters on their visit", visiting, "2·4·(largest + matrix)"))
    if work.optimizer == "muon":
        matrices = max(numbers for numbers, _ in together(work))
        most = max(8 * matrices, 4 * largest_parameter(work))
        terms.append(Term("temporary", "matrices made orthogonal, or the largest's step", most, "8·n·D·F or 4·V·D"))
    return terms


def _evaluation(work: Workload) -> Phase:
    """Forward alone; `score` widens its chunks of logits."""
    e, t, v = work.compute_bytes, work.tokens, work.model.vocab
    rows = min(t, chunk_rows(work, trains=False))
    each = 8 + e if t > rows else 8
    block = work.tokens * (3 * inner(work) + 4 * work.model.hidden) * e
    terms = [
        *_held(work, work.engine == "ddp"),
        Term("activations", "a block's forward", block, "T·(3F + 4D)·e"),
        Term("loss", "logits of a chunk, in 32 bits", rows * v * each, f"chunk·V·{each}"),
    ]
    return Phase("evaluation", tuple(terms))


def _loading(work: Workload) -> Phase:
    """Weights as they stay, and one tensor on its way."""
    way = 2 * 4 * largest_parameter(work)
    return Phase("loading", (*weights(work), Term("temporary", "a tensor on its way", way, "2·4·largest")))
