"""Fills every `auto` that the machine decides, with the reason of each; what came out is kept in the run folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from sojourn.config.schema import RunConfig
from sojourn.errors import UserError
from sojourn.machine.precision import choose_device, choose_precision
from sojourn.plan.estimate import memory
from sojourn.plan.shape import scratch_shape

_CPU_TOKENS = 4096
_GPU_SHARE = 0.6


@dataclass
class Resolved:
    config: RunConfig
    reasons: dict[str, str] = field(default_factory=dict)

    def choose(self, section: str, key: str, value: Any, reason: str) -> None:
        old = getattr(self.config, section)
        self.config = self.config.model_copy(update={section: old.model_copy(update={key: value})})
        self.reasons[f"{section}.{key}"] = f"{value}: {reason}"


def resolve(config: RunConfig, begun: RunConfig | None = None) -> Resolved:
    """`begun`: what this run decided when it began, if it is being continued."""
    found = Resolved(config)
    train = config.train
    shape = scratch_shape(config.model, int(config.data.vocab_size))
    for key, value in (
        ("num_heads", shape.num_heads),
        ("num_kv_heads", shape.num_kv_heads),
        ("ffn_size", shape.ffn_size),
        ("tie_embeddings", shape.tied),
    ):
        if getattr(config.model, key) == "auto":
            found.choose("model", key, value, f"the usual choice at width {shape.d_model}")
    if config.data.template == "auto":
        found.choose("data", "template", "chatml", "a new tokenizer has ChatML's marks")
    if config.log.tensorboard == "auto":
        there = find_spec("tensorboard") is not None
        found.choose(
            "log", "tensorboard", "on" if there else "off", f"tensorboard is {'' if there else 'not '}installed"
        )
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
    if train.lr == "auto":
        width = config.model.d_model or 4096
        found.choose("train", "lr", round(min(3e-3, 0.6 / width), 6), f"0.6 over d_model {width}, at most 3e-3")
    if train.attention == "auto":
        found.choose("train", "attention", "sdpa", "torch's own attention, with the packed documents' mask")
    if train.checkpointing == "auto":
        found.choose("train", "checkpointing", "off", "activations are kept; set full to save memory")
    if train.compile == "auto":
        found.choose("train", "compile", "off", "compiling costs more than it wins on short runs")
    if train.micro_batch == "auto":
        rows, reason = _micro_batch(found.config)
        found.choose("train", "micro_batch", rows, reason)
    if config.parallel.engine == "auto":
        found.choose("parallel", "engine", "single", "one device")
    return found


def _micro_batch(config: RunConfig) -> tuple[int, str]:
    """The largest divisor of the global batch whose tokens fit: in cache on a CPU, in free memory on a GPU."""
    length, batch = config.data.max_length, config.train.global_batch
    divisors = [n for n in range(1, batch + 1) if batch % n == 0]
    if config.train.device == "cuda":
        import torch

        free = torch.cuda.mem_get_info()[0]
        shape = scratch_shape(config.model, int(config.data.vocab_size))
        wide = config.train.precision == "fp32"
        fitting = [n for n in divisors if memory(shape, config, n, wide).total <= _GPU_SHARE * free]
        return max(fitting, default=1), f"planned into {_GPU_SHARE:.0%} of the {free / 2**30:.0f} GiB free"
    return max(
        [n for n in divisors if n * length <= _CPU_TOKENS], default=1
    ), f"about {_CPU_TOKENS} tokens at a time suit a CPU"
