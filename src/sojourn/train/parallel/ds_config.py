"""A user's DeepSpeed file held against the run's own settings: what DeepSpeed is given, and what the user is told.

A run is what its settings say, with every engine. So a file may say `auto` or the same in other words; where it says
something else, nobody could tell which of the two was meant, and the run is refused in one line. How ZeRO shares memory
is the file's own business. Fields are known by their dotted names, each in one of the tables below.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NoReturn

from sojourn.config.schema import RunConfig, TrainConfig
from sojourn.config.words import closest, shown
from sojourn.errors import UserError

Fields = dict[str, Any]
Kind = Literal["flag", "size", "count", "number"] | tuple[int, ...] | tuple[str, ...]

_NUMBERS = ("fp32", "fp16", "bf16")
_DEVICES = ("none", "cpu", "nvme")
_OR_AUTO = 'or write "auto" in the file'

# Said by one key of ours.
_OURS = {
    "train_batch_size": "global_batch",
    "train_micro_batch_size_per_gpu": "micro_batch",
    "gradient_clipping": "clip",
    "optimizer.params.lr": "lr",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "lr",
    "scheduler.params.cos_min_ratio": "min_lr",
}
# Said by several keys or fields together: each has a function below.
_TOGETHER = (
    "gradient_accumulation_steps",
    "fp16.enabled",
    "bf16.enabled",
    "optimizer.type",
    "optimizer.params.betas",
    "scheduler.type",
    "scheduler.params.warmup_num_steps",
    "scheduler.params.total_num_steps",
)
# Not to be chosen here.
_FIXED: Fields = {
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "gradient_predivide_factor": 1,
    "optimizer.legacy_fusion": False,
    "optimizer.params.eps": 1e-8,
    "optimizer.params.adam_w_mode": True,
    "optimizer.params.bias_correction": True,
    "optimizer.params.amsgrad": False,
    "scheduler.params.warmup_min_lr": 0,
    "scheduler.params.warmup_min_ratio": 0,
    "scheduler.params.warmup_type": "linear",
    "scheduler.params.last_batch_iteration": -1,
    "zero_optimization.zero_hpz_partition_size": 1,
    "zero_optimization.compute_grad_norm": True,
    "zero_optimization.offload_optimizer.ratio": 1,
}


def _listed(groups: dict[Any, str], above: str = "") -> dict[str, Any]:
    """A table from what fields have in common and their names."""
    return {above + field: shared for shared, fields in groups.items() for field in fields.split()}


# The file's own business: DeepSpeed is given these as they stand.
_KEPT: dict[str, Kind] = {
    **_listed({_NUMBERS: "communication_data_type data_types.grad_accum_dtype"}),
    **_listed(
        {
            "number": "fp16.loss_scale",
            "size": "fp16.initial_scale_power",
            "count": "fp16.loss_scale_window fp16.hysteresis fp16.min_loss_scale",
            "flag": "fp16.consecutive_hysteresis bf16.immediate_grad_update",
        }
    ),
    **_listed(
        {
            (0, 1, 2, 3): "stage",
            _DEVICES: "offload_optimizer.device offload_param.device",
            "count": "reduce_bucket_size sub_group_size",
            "size": "allgather_bucket_size stage3_prefetch_bucket_size stage3_param_persistence_threshold "
            "stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance "
            "stage3_module_granularity_threshold offload_optimizer.buffer_count offload_param.buffer_count "
            "offload_param.buffer_size offload_param.max_in_cpu",
            "flag": "contiguous_gradients overlap_comm reduce_scatter use_multi_rank_bucket_allreduce "
            "allgather_partitions round_robin_gradients ignore_unused_parameters memory_efficient_linear "
            "stage3_use_all_reduce_for_fetch_params stage3_gather_16bit_weights_on_model_save "
            "offload_optimizer.pin_memory offload_param.pin_memory",
        },
        "zero_optimization.",
    ),
}
# Left out, and the user is told: the run comes out the same without them.
_DROPPED: dict[str, str] = {
    **_listed(
        {
            "log.every_steps and log.trackers say what is shown": "steps_per_print log_level dump_state tensorboard "
            "wandb comet csv_monitor",
            "sojourn measures time and memory itself": "wall_clock_breakdown memory_breakdown timers comms_logger "
            "flops_profiler",
            "train.checkpointing says what is recomputed": "activation_checkpointing",
            "rows are read as data and train say": "dataloader_drop_last",
            "checkpoints are written as save says": "checkpoint datastates",
            "the run has its own AdamW": "optimizer.params.torch_adam",
            "it is for NVMe only": "aio",
        }
    ),
    **_listed(
        {
            "checkpoints are written as save says": "elastic_checkpoint load_from_fp32_weights "
            "stage3_gather_fp16_weights_on_model_save",
            "it is for NVMe only": "offload_optimizer.nvme_path offload_optimizer.fast_init "
            "offload_optimizer.pipeline_read offload_optimizer.pipeline_write offload_param.nvme_path",
        },
        "zero_optimization.",
    ),
}
# Left out only where they are off: what they ask for would change the run, or would not happen.
_REFUSED: dict[str, str] = {
    **_listed(
        {
            "would narrow numbers a second time; train.precision says which are used": "amp torch_autocast "
            "fp16.auto_cast",
            "is an old name; write bf16 instead": "bfloat16",
            "counts micro batches, which the run does itself": "managed_gradient_accumulation",
            "changes how gradients are averaged, which the run does itself": "prescale_gradients "
            "gradient_allreduce_op sparse_gradients disable_allgather",
            "cuts the model into parts, which is not supported": "pipeline tensor_parallel autotp expert_parallel",
            "is not supported; train.attention says how the model attends": "sparse_attention",
            "is not supported; train.compile says whether the model is compiled": "compile",
            "would change the batch; train.global_batch and train.micro_batch say how large it is": "elasticity "
            "autotuning",
            "would change the order of rows, which train.seed decides": "curriculum_learning data_efficiency",
            "is not supported; a run trains the model as it is": "progressive_layer_drop compression_training "
            "quantize_training weight_quantization eigenvalue hybrid_engine",
            "keeps in 16 bits what a run keeps in 32": "fp16.fp16_master_weights_and_grads "
            "bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states",
            "would skip steps; train.on_nan says what happens to bad ones": "bf16.check_grad_overflow",
        }
    ),
    **_listed(
        {
            "rounds what GPUs send each other, and losses would no longer be comparable": "zero_quantized_weights "
            "zero_quantized_nontrainable_weights zero_quantized_gradients zeropp_loco_param",
            "updates weights late, and losses would no longer be comparable": "zenflow",
            "is not supported; ZeRO shares over all processes": "mics_shard_size mics_hierarchical_params_gather",
            "is an old name; write offload_optimizer or offload_param instead": "cpu_offload cpu_offload_params "
            "cpu_offload_param cpu_offload_use_pin_memory",
            "is no longer in DeepSpeed": "legacy_stage1",
            "needs DeepSpeed's own Adam, but the run has its own": "offload_optimizer.super_offload",
        },
        "zero_optimization.",
    ),
}
_KNOWN = (*_OURS, *_TOGETHER, *_KEPT, *_FIXED, *_DROPPED, *_REFUSED)

# What a scheduler comes to here, in keys of `train`.
_SCHEDULES: dict[str, Fields] = {
    "WarmupLR": {"schedule": "constant"},
    "WarmupDecayLR": {"schedule": "linear", "min_lr": 0},
    "WarmupCosineLR": {"schedule": "cosine"},
}
_OFFLOADED: dict[str, tuple[str, ...]] = {
    "off": (),
    "optimizer": ("offload_optimizer",),
    "all": ("offload_optimizer", "offload_param"),
}
_QUIET = 10**12  # steps between two lines of DeepSpeed's own


def filled(path: Path, config: RunConfig, processes: int) -> tuple[dict[str, Any], list[str]]:
    """What DeepSpeed is given for this file, and what the user should hear. `config` has no `auto` left."""
    name, train = shown(path, 200), config.train
    fields = dict(_flat(_read(path, name)))
    _optimizer(name, fields, train)
    notes = _schedule(name, fields, train)
    given: dict[str, Any] = {}
    dropped: dict[str, list[str]] = {}
    for field, value in fields.items():
        at = f"{name}: {field}"
        if field in _REFUSED:
            if not _off(value):
                raise UserError(f"{at} {_REFUSED[field]}; remove it")
        elif field in _DROPPED:
            if not _off(value):
                dropped.setdefault(_DROPPED[field], []).append(field)
        elif field in _OURS:
            _same(at, value, _OURS[field], train)
        elif field in _FIXED:
            if value != "auto" and not _equal(at, value, _FIXED[field]):
                raise UserError(f"{at} is {_said(value)}, but here it is always {_said(_FIXED[field])}; write that")
        elif field in _KEPT:
            _keep(given, at, field, value)
        elif field not in _TOGETHER:
            raise _unknown(name, field, value)
    _precision(name, fields, train)
    _rows(name, fields, train, processes)
    notes += _length(name, fields, train)
    notes += [f"{name}: {', '.join(names)}: left out, since {reason}" for reason, names in dropped.items()]
    given["zero_optimization"] = _zero(f"{name}: zero_optimization", given.get("zero_optimization", {}), train)
    summed = fields.get("data_types.grad_accum_dtype", train.precision)
    if given["zero_optimization"]["stage"] == 0 and summed != train.precision:
        raise UserError(
            f"{name}: data_types.grad_accum_dtype is {summed}, but train.precision is {train.precision}, and DeepSpeed "
            "takes both only with ZeRO; remove it, or write zero_optimization.stage 1, 2 or 3"
        )
    return _finished(given, train, processes), notes


def usual(config: RunConfig, processes: int) -> dict[str, Any]:
    """What DeepSpeed is given where there is no file: ZeRO-2, or 3 where weights leave the GPU too."""
    stage = 3 if "offload_param" in _OFFLOADED[config.train.offload] else 2
    zero = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
    return _finished({"zero_optimization": _zero("parallel.engine", zero, config.train)}, config.train, processes)


def _finished(given: dict[str, Any], train: TrainConfig, processes: int) -> dict[str, Any]:
    """Together with what DeepSpeed must not do, because the run's own loop does it."""
    if train.optimizer != "adamw":
        raise UserError(
            f"train.optimizer: {train.optimizer} given, but ZeRO cuts weights into pieces, which only AdamW can update "
            "one by one; use train.optimizer=adamw, or another parallel.engine"
        )
    numbers = {kind: {**given.get(kind, {}), "enabled": train.precision == kind} for kind in ("fp16", "bf16")}
    return {
        **given,
        **numbers,
        # The loop counts micro batches itself and marks the last one.
        "train_batch_size": processes,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": train.clip,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": _QUIET,
    }


def _read(path: Path, name: str) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{name}: no such file; correct parallel.deepspeed, or remove it for ZeRO-2") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 text (byte {error.start}); save the file as UTF-8") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{name}: cannot be read: {shown(getattr(error, 'strerror', None) or error)}") from None

    def constant(word: str) -> NoReturn:
        raise UserError(f"{name}: {word} is no number that JSON knows; write a finite one")

    def section(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise UserError(f'{name}: "{shown(key)}" stands twice in the same braces; keep one')
        return {key: value for key, value in pairs if value is not None}  # null: as if it were not there

    try:
        tree = json.loads(text, object_pairs_hook=section, parse_constant=constant)
    except json.JSONDecodeError as error:
        raise UserError(f"{name}:{error.lineno}:{error.colno}: not valid JSON: {_mistake(error)}") from None
    except (RecursionError, ValueError):
        raise UserError(f"{name}: nested too deeply, or a number of thousands of digits; write it simpler") from None
    if not isinstance(tree, dict):
        raise UserError(f'{name}:1:1: {_said(tree)} given; a DeepSpeed file is an object, such as {{"bf16": …}}')
    return tree


def _mistake(error: json.JSONDecodeError) -> str:
    """The parser's complaint, in words that say what to do."""
    before, after = error.doc[: error.pos].rstrip(), error.doc[error.pos :].lstrip()
    if not after:
        return "it ends too early; close every brace and quote" if before else "the file is empty; write at least {}"
    if after.startswith(("//", "/*", "#")):
        return "JSON has no comments; remove it"
    if after.startswith(("}", "]")) and before.endswith(","):
        return f"a comma before {after[0]}; remove the comma"
    if after.startswith(","):
        return "a comma too many; remove it"
    if after.startswith(("'", "True", "False", "None")):
        return 'this is Python; JSON writes "text", true, false and null'
    return f"{error.msg.removesuffix(' at')} before {shown(after, 20)}; correct it there"


def _flat(tree: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Every field by its dotted name; sections that are left out or refused stay whole."""
    for key, value in tree.items():
        field = above + key
        if isinstance(value, dict) and field not in _DROPPED and field not in _REFUSED:
            yield from _flat(value, field + ".")
        else:
            yield field, value


def _off(value: Any) -> bool:
    if isinstance(value, dict):
        return value.get("enabled") is False or all(inner is False for inner in value.values())
    return value is False


def _unknown(name: str, field: str, value: Any) -> UserError:
    inside = next((known for known in _KNOWN if known.startswith(f"{field}.")), None)
    outside = next((known for known in _KNOWN if field.startswith(f"{known}.")), None)
    if inside is not None:
        example = inside.removeprefix(f"{field}.").split(".")[0]
        return UserError(f'{name}: {field}: {_said(value)} given; it takes an object, such as {{"{example}": …}}')
    if outside is not None:
        return UserError(f"{name}: {outside}: an object given; it takes one value; remove the braces")
    return UserError(f"{name}: {shown(field)} is no field that is known here{closest(field, _KNOWN) or '; remove it'}")


# --- values ---


def _said(value: Any) -> str:
    return shown(json.dumps(value, ensure_ascii=False))


def _number(at: str, value: Any) -> int | float:
    """Whichever way it is written: 2e8 is a whole number, and "1" is one too."""
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            if isinstance(value, int):
                return value
            return int(number) if number.is_integer() else number
    raise UserError(f"{at}: {_said(value)} given; it takes a number, such as 1 or 2e-5")


def _flag(at: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise UserError(f"{at}: {_said(value)} given; it takes true or false, without quotes")
    return value


def _equal(at: str, value: Any, ours: Any) -> bool:
    if isinstance(ours, bool):
        return _flag(at, value) is ours
    if isinstance(ours, str):
        return bool(value == ours)
    return math.isclose(_number(at, value), ours, rel_tol=1e-9)


def _same(at: str, value: Any, key: str, train: TrainConfig) -> None:
    """`auto`, or what our key says."""
    ours = getattr(train, key)
    if value != "auto" and not _equal(at, value, ours):
        number = _number(at, value)
        if isinstance(ours, int) and not isinstance(number, int):
            raise UserError(f"{at}: {_said(value)} given, but train.{key} is {ours}; it takes a whole number")
        raise UserError(f"{at} is {number}, but train.{key} is {ours}; type train.{key}={number}, {_OR_AUTO}")


def _keep(given: dict[str, Any], at: str, field: str, value: Any) -> None:
    kind = _KEPT[field]
    if value == "auto":
        if field.startswith("zero_optimization.") and kind in ("size", "count"):
            return  # DeepSpeed's own default holds
        raise UserError(f'{at}: "auto" given, but no setting of the run says it; write a value, or remove the field')
    if kind == "flag":
        value = _flag(at, value)
    elif isinstance(kind, tuple):
        value = _number(at, value) if isinstance(kind[0], int) else value
        if value not in kind:
            raise UserError(f"{at}: {_said(value)} given; allowed: {', '.join(map(str, kind))}")
    else:
        value = _number(at, value)
        whole = "" if kind == "number" else "whole "
        least = 1 if kind == "count" else 0
        if value < least or (whole and not isinstance(value, int)):
            raise UserError(f"{at}: {value} given; it takes a {whole}number, {least} or more")
    *sections, last = field.split(".")
    for section in sections:
        given = given.setdefault(section, {})
    given[last] = value


# --- fields that are judged together ---


def _optimizer(name: str, fields: Fields, train: TrainConfig) -> None:
    """Looked at first: the fields of other optimizers would only be called unknown."""
    kind = fields.get("optimizer.type", "AdamW")
    if not isinstance(kind, str) or kind.lower() not in ("adam", "adamw"):
        raise UserError(
            f"{name}: optimizer.type is {_said(kind)}, but train.optimizer is {train.optimizer}; "
            "allowed: Adam or AdamW, with train.optimizer=adamw"
        )
    if "optimizer.type" in fields and train.optimizer != "adamw":
        raise UserError(
            f"{name}: optimizer.type is {kind}, but train.optimizer is {train.optimizer}; type train.optimizer=adamw"
        )
    at, betas = f"{name}: optimizer.params.betas", fields.get("optimizer.params.betas", "auto")
    if betas == "auto":
        return
    if not isinstance(betas, list) or len(betas) != 2:
        raise UserError(f"{at}: {_said(betas)} given; it takes two numbers, such as [0.9, 0.95]")
    if not (_equal(at, betas[0], train.beta1) and _equal(at, betas[1], train.beta2)):
        first, second = (_number(at, beta) for beta in betas)
        raise UserError(
            f"{at} are {first} and {second}, but train.beta1 is {train.beta1} and train.beta2 {train.beta2}; "
            f"type train.beta1={first} train.beta2={second}, {_OR_AUTO}"
        )


def _schedule(name: str, fields: Fields, train: TrainConfig) -> list[str]:
    """The loop sets the rate, so another shape in the file is a note; its numbers are compared like all others."""
    kind = fields.get("scheduler.type")
    if kind is None:
        return []
    if kind not in tuple(_SCHEDULES):
        raise UserError(
            f"{name}: scheduler.type is {_said(kind)}, but train.schedule is {train.schedule}; "
            f"allowed: {', '.join(_SCHEDULES)}; or remove scheduler"
        )
    other = {key: value for key, value in _SCHEDULES[kind].items() if getattr(train, key) != value}
    if not other:
        return []
    ours = " and ".join(f"train.{key} is {getattr(train, key)}" for key in other)
    words = " ".join(f"train.{key}={value}" for key, value in other.items())
    return [f"{name}: scheduler.type is {kind}, but {ours}, and that is used; to follow the file, type {words}"]


def _precision(name: str, fields: Fields, train: TrainConfig) -> None:
    switches = {kind: fields.get(f"{kind}.enabled", "auto") for kind in ("fp16", "bf16")}
    flags = {kind: _flag(f"{name}: {kind}.enabled", value) for kind, value in switches.items() if value != "auto"}
    on = [kind for kind, flag in flags.items() if flag]
    if len(on) > 1:
        raise UserError(f'{name}: fp16.enabled and bf16.enabled are both true; write "auto" in both')
    if on and on != [train.precision]:
        says, kind = "true", on[0]
    elif not on and train.precision in flags:
        says, kind = "false", str(train.precision)
    else:
        return
    use = on[0] if on else "fp32"
    raise UserError(
        f"{name}: {kind}.enabled is {says}, but train.precision is {train.precision}; "
        f"type train.precision={use}, {_OR_AUTO}"
    )


def _rows(name: str, fields: Fields, train: TrainConfig, processes: int) -> None:
    """After the micro batch, which must be ours by then."""
    value = fields.get("gradient_accumulation_steps", "auto")
    if value == "auto":
        return
    at, micro = f"{name}: gradient_accumulation_steps", int(train.micro_batch)
    times = _number(at, value)
    if not isinstance(times, int) or times < 1:
        raise UserError(f"{at}: {_said(value)} given; it takes a whole number, 1 or more")
    rows = micro * times * processes
    if rows != train.global_batch:
        come = (
            f"{times} × train.micro_batch {micro} × {processes} process{'es' * (processes > 1)} is {rows} rows a step"
        )
        raise UserError(
            f"{at} is {times}, and {come}, but train.global_batch is {train.global_batch}; "
            f"type train.global_batch={rows}, {_OR_AUTO}"
        )


def _length(name: str, fields: Fields, train: TrainConfig) -> list[str]:
    """Of the run and of its warm-up, in steps; only a note where they are not known before the data are read."""
    share, warmup = train.warmup < 1, None
    if not share or train.steps is not None:
        warmup = math.ceil(train.warmup * (train.steps or 0)) if share else int(train.warmup)
    notes = []
    for field, key, ours in (("warmup_num_steps", "warmup", warmup), ("total_num_steps", "steps", train.steps)):
        at, value = f"{name}: scheduler.params.{field}", fields.get(f"scheduler.params.{field}", "auto")
        if value == "auto":
            continue
        number = _number(at, value)
        if ours is None:
            says = "train.epochs or train.tokens" if key == "steps" else f"train.warmup, a share of {train.warmup},"
            notes.append(f"{at} is {number}, but {says} is used; to follow the file, type train.{key}={number}")
        elif number != ours:
            of = f" ({ours} steps)" if key == "warmup" and share else ""
            raise UserError(
                f"{at} is {number}, but train.{key} is {getattr(train, key)}{of}; type train.{key}={number}, {_OR_AUTO}"
            )
    return notes


def _zero(at: str, zero: dict[str, Any], train: TrainConfig) -> dict[str, Any]:
    """With `train.offload` where it says nothing of that, and without what DeepSpeed would silently not do."""
    stage, wanted = zero.get("stage", 0), _OFFLOADED[train.offload]
    for part, least in (("offload_optimizer", 1), ("offload_param", 3)):
        asked = zero.get(part, {})
        device = asked.get("device", "cpu" if part in wanted else "none")
        if device == "nvme":
            raise UserError(f"{at}.{part}.device is nvme, which is not supported; write cpu or none")
        if device == "none" and part in wanted:
            raise UserError(
                f"{at}.{part}.device is none, but train.offload is {train.offload}; "
                "type train.offload=off, or write cpu in the file"
            )
        if device == "cpu" and stage < least:
            why = f"train.offload={train.offload}" if part in wanted else part
            raise UserError(f"{at}.stage is {stage}, but {why} needs {least} or above; change one of them")
        if device == "cpu" and "device" not in asked:
            zero = {**zero, part: {"device": "cpu", "pin_memory": True, **asked}}
    return {"stage": stage, **zero}
