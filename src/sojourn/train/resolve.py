"""Fills every `auto` that the machine decides, with the reason of each; what came out is kept in the run folder."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from sojourn.catalog.fused_families import FUSED_FAMILIES
from sojourn.catalog.gpus import Gpu, find_gpu
from sojourn.catalog.models import ModelSpec
from sojourn.config.schema import RunConfig
from sojourn.errors import UserError
from sojourn.estimate.kernel_launch import recordable
from sojourn.estimate.memory import SAFE, memory, room_in
from sojourn.estimate.step_time import has_rate, speed
from sojourn.estimate.workload import Place, Work, work_of
from sojourn.machine.precision import choose_device, choose_precision
from sojourn.machine.probe_software import importable
from sojourn.model import attention
from sojourn.model.adapter import resolve_lora_alpha
from sojourn.model.kernels.triton_support import supports_triton
from sojourn.resolve.micro_batch import WORTH, Cut, cut, ways_of
from sojourn.train.faults.oom_fallback import further
from sojourn.train.subject import Subject, subject_of

_CPU_TOKENS = 4096
_COMPILE_FLOPS = 2e14  # a second's work on a good card
_WORTH_COMPILING = 120.0


@dataclass
class Resolved:
    config: RunConfig
    reasons: dict[str, str] = field(default_factory=dict)

    def choose(self, section: str, key: str, value: Any, reason: str) -> None:
        old = getattr(self.config, section)
        self.config = self.config.model_copy(update={section: old.model_copy(update={key: value})})
        self.reasons[f"{section}.{key}"] = f"{value}: {reason}"


def resolve(
    config: RunConfig, begun: RunConfig | None = None, rung: dict[str, Any] | None = None, processes: int = 1
) -> Resolved:
    """`begun`: what this run decided when it began, if it is continued; `rung`: what memory has made it give up."""
    found, subject = Resolved(config), subject_of(config)
    if config.model.base is None:
        _sizes(found, subject.shape)
        if config.data.template == "auto":
            found.choose("data", "template", "chatml", "a new tokenizer has ChatML's marks")
    elif subject.positions is not None and config.data.max_length > subject.positions:
        raise UserError(
            f"data.max_length: {config.data.max_length} given, but this model holds {subject.positions} tokens; "
            f"use data.max_length={subject.positions}"
        )
    _method(found, subject)
    if config.log.tensorboard == "auto":
        there = find_spec("tensorboard") is not None
        found.choose(
            "log", "tensorboard", "on" if there else "off", f"tensorboard is {'' if there else 'not '}installed"
        )
    _numbers(found, begun)
    _attention(found, subject)
    _engine(found, subject, processes)
    _memory(found, subject, processes, told=not rung)
    for key, value in (rung or {}).items():
        section, name = key.split(".")
        if further(key, value, getattr(getattr(found.config, section), name)):
            found.choose(section, name, value, "memory ran out with more (ladder.json)")
    if config.train.compile == "auto":
        found.choose("train", "compile", *_compile(found.config, subject))
    _hopper(found)
    if found.config.train.cuda_graphs == "auto":
        found.choose("train", "cuda_graphs", *_recording(found.config, subject, processes))
    return found


def _engine(found: Resolved, subject: Subject, processes: int) -> None:
    """The fastest that fits: whole weights everywhere where there is room for them, else cut."""
    config = found.config
    engine = config.parallel.engine
    if engine == "single" and processes > 1:
        raise UserError(f"parallel.engine: single is for one process, and {processes} were started; use auto")
    if config.train.offload == "all" and engine not in ("auto", "fsdp", "deepspeed"):
        raise UserError(f"train.offload: all needs parallel.engine=fsdp or deepspeed, not {engine}; use optimizer")
    if engine != "auto":
        return
    if config.parallel.deepspeed is not None:
        found.choose("parallel", "engine", "deepspeed", f"{config.parallel.deepspeed} is given")
    elif config.train.offload == "all":
        found.choose("parallel", "engine", "fsdp", "train.offload=all has weights in the host's memory")
    elif processes == 1:
        found.choose("parallel", "engine", "single", "one process")
    elif config.train.device != "cuda" or config.train.optimizer != "adamw":
        found.choose("parallel", "engine", "ddp", f"{processes} processes")
    else:
        import torch

        free = torch.cuda.mem_get_info()[0]
        fits = memory(work_here(config, subject, 1, "full", processes, "ddp")).device <= room_in(free, processes)
        engine = "ddp" if fits else "fsdp"
        room = f"{free / 2**30:.0f} GiB free on a GPU"
        found.choose(
            "parallel", "engine", engine, f"all weights {'fit into' if fits else 'are too much for'} the {room}"
        )


def _sizes(found: Resolved, shape: ModelSpec) -> None:
    """Of a new model; a dial becomes the sizes that it means."""
    model = found.config.model
    dials = {key: getattr(model, key) for key in ("params", "depth")}
    asked = [f"model.{key} {value}" for key, value in dials.items() if value is not None]
    for key, value in (
        ("d_model", shape.hidden),
        ("num_layers", shape.layers),
        ("num_heads", shape.heads),
        ("num_kv_heads", shape.kv_heads),
        ("ffn_size", shape.ffn),
        ("tie_embeddings", shape.tied),
    ):
        if getattr(model, key) == "auto":
            found.choose("model", key, value, f"the usual choice at width {shape.hidden}")
        elif getattr(model, key) is None:
            found.choose("model", key, value, f"what {asked[0]} comes to")
    # The sizes stand written out now; beside them the dial would say the same thing twice.
    written = found.config.model.model_copy(update=dict.fromkeys(dials))
    found.config = found.config.model_copy(update={"model": written})


def _method(found: Resolved, subject: Subject) -> None:
    config = found.config
    kind = config.method.kind
    if kind in ("lora", "qlora") and config.method.alpha == "auto":
        found.choose("method", "alpha", resolve_lora_alpha(config.method), "twice the rank")
    if config.train.lr == "auto":
        width = subject.shape.hidden
        if kind in ("lora", "qlora"):
            found.choose("train", "lr", 2e-4, "usual for adapters")
        elif config.model.base is None:
            found.choose("train", "lr", round(min(3e-3, 0.6 / width), 6), f"0.6 over d_model {width}, at most 3e-3")
        else:
            rate = 1e-5 if width >= 2048 else 2e-5
            found.choose("train", "lr", rate, f"usual for all weights of a trained model of width {width}")


def _numbers(found: Resolved, begun: RunConfig | None) -> None:
    train = found.config.train
    if train.device == "auto":
        found.choose("train", "device", choose_device(), "the fastest device that works here")
    else:
        choose_device(train.device)
    device = found.config.train.device
    if train.precision == "auto":
        precision, reason = choose_precision(device)
        if begun is not None and begun.train.device == device == "cpu" and begun.train.precision != "auto":
            # There the choice rests on a measurement, which may waver; a run keeps what it began with.
            precision, reason = begun.train.precision, "as the run began"
        found.choose("train", "precision", precision, reason)
    elif train.precision == "fp16" and device != "cuda":
        raise UserError(f"train.precision: fp16 needs a CUDA GPU, but this run is on {device}; use auto")


def _attention(found: Resolved, subject: Subject) -> None:
    train, advanced = found.config.train, found.config.advanced
    facts = (str(train.device), train.precision != "fp32", subject.shape.head_dim, subject.softcap, subject.dropout)
    if train.attention == "auto":
        chosen = attention.choose(*facts)
        found.choose("train", "attention", chosen, "the fastest that keeps packed documents apart on this machine")
    else:
        wrong = attention.fault(train.attention, *facts)
        if wrong is not None:
            best = attention.choose(*facts)
            raise UserError(f"train.attention: {train.attention} {wrong}; use {best} or auto")
    known = subject.family in FUSED_FAMILIES
    if advanced.fused_forwards == "auto":
        reason = f"{subject.family} has fused norms, rotations and gates" if known else "made for Llama, Qwen, Mistral"
        found.choose("advanced", "fused_forwards", "on" if known else "off", reason)
    elif advanced.fused_forwards == "on" and not known:
        raise UserError(
            f"advanced.fused_forwards: {subject.family} has none ({', '.join(FUSED_FAMILIES)} have); use auto"
        )
    if train.fp8 != "off":
        wrong = fp8_fault(str(train.device), str(train.precision), found.config.advanced.fused_forwards == "on")
        if wrong is not None:
            raise UserError(f"train.fp8: {wrong}; leave it off")
    wrong = graphs_fault(str(train.device)) if train.cuda_graphs == "on" else None
    if wrong is not None:
        raise UserError(f"train.cuda_graphs: {wrong}; leave it off")
    if advanced.chunked_loss == "auto":
        found.choose("advanced", "chunked_loss", "on", "logits of all tokens never exist at once")


def _hopper(found: Resolved) -> None:
    advanced, wrong = found.config.advanced, hopper_fault(found.config)
    if advanced.hopper_kernels == "on" and wrong is not None:
        raise UserError(f"advanced.hopper_kernels: {wrong}; use auto")
    if advanced.hopper_kernels == "auto" and wrong is not None:
        found.choose("advanced", "hopper_kernels", "off", wrong)
    elif advanced.hopper_kernels == "auto" and found.config.train.compile == "off":
        found.choose(
            "advanced", "hopper_kernels", "off", "making their kernels costs more than it wins on so short a run"
        )
    elif advanced.hopper_kernels == "auto":
        found.choose("advanced", "hopper_kernels", "on", "quack and FlashAttention-4 are installed")


def hopper_fault(config: RunConfig) -> str | None:
    """Why a run cannot have the kernels of model/kernels/hopper.py, or None."""
    train = config.train
    if config.advanced.fused_forwards != "on":
        return "only the fused forwards of Llama, Qwen2, Qwen3 and Mistral have kernels for Hopper"
    if config.method.kind in ("lora", "qlora"):
        return f"for runs that train all weights, but method.kind is {config.method.kind}"
    if train.device != "cuda":
        return f"needs an H100 or H200, but this run is on {train.device}"
    import torch

    if torch.cuda.get_device_capability()[0] != 9:
        return f"needs an H100 or H200, but this is an {torch.cuda.get_device_name()}"
    if train.fp8 != "off":
        return f"computes in 16 bits, but train.fp8 is {train.fp8}"
    if train.precision != "bf16":
        return f"computes in bf16, but train.precision is {train.precision}"
    if train.deterministic == "on":
        return "does not add up in the same order every time, as train.deterministic wants"
    if config.parallel.engine not in ("single", "ddp"):
        return f"needs whole weights, but parallel.engine is {config.parallel.engine}"
    missing = [package for package in ("quack", "flash_attn.cute") if not importable(package)]
    return "needs packages that are not installed: pip install 'sojourn[hopper]'" if missing else None


def graphs_fault(device: str) -> str | None:
    """Why passes cannot be recorded here, or None."""
    return None if device == "cuda" else f"needs a CUDA GPU, but this run is on {device}"


def fp8_fault(device: str, precision: str, fused: bool) -> str | None:
    """Why linear layers cannot multiply in 8 bits here, or None."""
    if not fused:
        return "only the fused forwards of Llama, Qwen2, Qwen3 and Mistral multiply in 8 bits"
    if device != "cuda":
        return f"needs a CUDA GPU, but this run is on {device}"
    import torch

    if torch.cuda.get_device_capability() < (8, 9):
        return "needs a GPU of compute capability 8.9 (RTX 40, L4, H100) or newer"
    if precision != "bf16":
        return f"the rest must be in bf16, but train.precision is {precision}"
    return None


def _memory(found: Resolved, subject: Subject, processes: int, told: bool = True) -> None:
    """Micro batch and recomputation together, the fastest by its plan of what fits; `told`, where the settings leave
    memory unused that would make the run faster."""
    train = found.config.train
    length, batch = found.config.data.max_length, -(-train.global_batch // processes)
    if train.device != "cuda":
        if train.activation_checkpointing == "auto":
            found.choose("train", "activation_checkpointing", "off", "activations are kept; set full to save memory")
        if train.micro_batch == "auto":
            rows = max([n for n in range(1, batch + 1) if batch % n == 0 and n * length <= _CPU_TOKENS], default=1)
            found.choose("train", "micro_batch", rows, f"about {_CPU_TOKENS} tokens at a time suit a CPU")
        return
    import torch

    free, config, card = torch.cuda.mem_get_info()[0], found.config, card_here()
    asked = train.micro_batch if isinstance(train.micro_batch, int) else None
    ways = ways_of(train.activation_checkpointing)

    def work(rows: int, how: str) -> Work:
        return work_here(config, subject, rows, how, processes)

    def fitting(ways: tuple[str, ...], asked: int | None) -> Cut | None:
        return cut(work, batch, length, room_in(free, processes), ways, asked, card)

    chosen = fitting(ways, asked)
    rows, how = (chosen.work.rows, chosen.work.recompute) if chosen else (1, ways[-1])
    into = f"planned into {SAFE:.0%} of the {free / 2**30:.0f} GiB free"
    if train.activation_checkpointing == "auto":
        found.choose("train", "activation_checkpointing", how, f"{into} with {rows} rows at a time")
    if asked is None:
        found.choose("train", "micro_batch", rows, into)
    freely = fitting(ways_of("auto"), None)
    if told and chosen is not None and freely is not None and card is not None and has_rate(card):
        gain = speed(freely.work, card).tokens_per_second / speed(chosen.work, card).tokens_per_second
        if gain >= WORTH:
            words = f"train.micro_batch={freely.work.rows} train.activation_checkpointing={freely.work.recompute}"
            print(f"note: the same result {gain - 1:.0%} sooner, by its plan, in the memory here: {words}", flush=True)


def work_here(
    config: RunConfig, subject: Subject, rows: int, how: str | None, processes: int, engine: str | None = None
) -> Work:
    """What this process is to do, as plans see it. On a GPU every choice but compiling is made by now."""
    import torch

    train = config.train
    capability = torch.cuda.get_device_capability() if train.device == "cuda" else None
    place = Place(str(train.device), capability, str(train.precision))
    return work_of(config, subject.shape, place, rows, how, processes, engine)


def _compile(config: RunConfig, subject: Subject) -> tuple[str, str]:
    """Worth its minute only where the run is long."""
    train = config.train
    if train.device != "cuda":
        return "off", "compiling is for GPUs"
    if not supports_triton():
        return "off", "triton is not installed, or not made for so old a GPU"
    steps = train.steps or (train.tokens or 0) / (train.global_batch * config.data.max_length)
    tokens = float(steps * train.global_batch * config.data.max_length)
    seconds = subject.shape.flops_per_token(config.data.max_length) * tokens / _COMPILE_FLOPS
    if steps and seconds < _WORTH_COMPILING:
        return "off", "compiling costs more than it wins on so short a run"
    return "on", "blocks are compiled once and run faster from then on"


def card_here() -> Gpu | None:
    """As the catalogue has it, if it has it."""
    import torch

    with suppress(UserError):
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        return find_gpu(found.name, found.total_memory / 2**30)
    return None


def _recording(config: RunConfig, subject: Subject, processes: int) -> tuple[str, str]:
    """Where a GPU might wait for the CPU, as plans see it."""
    train = config.train
    if train.device != "cuda":
        return "off", "recordings are for GPUs"
    card = card_here()
    if card is None:
        return "off", "the catalogue does not know this GPU: set on to try"
    work = work_here(config, subject, int(train.micro_batch), str(train.activation_checkpointing), processes)
    if subject.dropout or not recordable(work):
        return "off", "for one process and whole rows, without recomputed dropout, sliding windows or fp16"
    if not speed(work, card).recorded:
        return "off", "the GPU has more to do than any CPU"
    return "on", "launching its kernels one by one might take the CPU longer than the GPU needs for them"
