"""A user's DeepSpeed file held against the run's own settings: what DeepSpeed is given, and what the user is told.

A run is what its settings say, with every engine. So a file may say `auto` or the same in other words; where it says
something else, nobody could tell which of the two was meant, and the run is refused in one line. How ZeRO shares memory
is the file's own business. Fields are known by their dotted names, each in one of the tables of `ds_fields.py`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from sojourn.config.schema import RunConfig, TrainConfig
from sojourn.config.words import closest, shown
from sojourn.errors import UserError
from sojourn.train.distributed.ds_fields import (
    DROPPED,
    FIXED,
    KEPT,
    KNOWN,
    OFFLOADED,
    OURS,
    REFUSED,
    SCHEDULES,
    TOGETHER,
    Fields,
)
from sojourn.train.distributed.ds_file import flag_of, flat, is_equal, is_off, number_of, read, said

_OR_AUTO = 'or write "auto" in the file'
_QUIET = 10**12  # steps between two lines of DeepSpeed's own


def filled(path: Path, config: RunConfig, processes: int) -> tuple[dict[str, Any], list[str]]:
    """What DeepSpeed is given for this file, and what the user should hear. `config` has no `auto` left."""
    name, train = shown(path, 200), config.train
    fields = dict(flat(read(path, name)))
    _optimizer(name, fields, train)
    notes = _schedule(name, fields, train)
    given: dict[str, Any] = {}
    dropped: dict[str, list[str]] = {}
    for field, value in fields.items():
        at = f"{name}: {field}"
        if field in REFUSED:
            if not is_off(value):
                raise UserError(f"{at} {REFUSED[field]}; remove it")
        elif field in DROPPED:
            if not is_off(value):
                dropped.setdefault(DROPPED[field], []).append(field)
        elif field in OURS:
            _same(at, value, OURS[field], train)
        elif field in FIXED:
            if value != "auto" and not is_equal(at, value, FIXED[field]):
                raise UserError(f"{at} is {said(value)}, but here it is always {said(FIXED[field])}; write that")
        elif field in KEPT:
            _keep(given, at, field, value)
        elif field not in TOGETHER:
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
    stage = 3 if "offload_param" in OFFLOADED[config.train.offload] else 2
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


def _unknown(name: str, field: str, value: Any) -> UserError:
    inside = next((known for known in KNOWN if known.startswith(f"{field}.")), None)
    outside = next((known for known in KNOWN if field.startswith(f"{known}.")), None)
    if inside is not None:
        example = inside.removeprefix(f"{field}.").split(".")[0]
        return UserError(f'{name}: {field}: {said(value)} given; it takes an object, such as {{"{example}": …}}')
    if outside is not None:
        return UserError(f"{name}: {outside}: an object given; it takes one value; remove the braces")
    return UserError(f"{name}: {shown(field)} is no field that is known here{closest(field, KNOWN) or '; remove it'}")


def _same(at: str, value: Any, key: str, train: TrainConfig) -> None:
    """`auto`, or what our key says."""
    ours = getattr(train, key)
    if value != "auto" and not is_equal(at, value, ours):
        number = number_of(at, value)
        if isinstance(ours, int) and not isinstance(number, int):
            raise UserError(f"{at}: {said(value)} given, but train.{key} is {ours}; it takes a whole number")
        raise UserError(f"{at} is {number}, but train.{key} is {ours}; type train.{key}={number}, {_OR_AUTO}")


def _keep(given: dict[str, Any], at: str, field: str, value: Any) -> None:
    kind = KEPT[field]
    if value == "auto":
        if field.startswith("zero_optimization.") and kind in ("size", "count"):
            return  # DeepSpeed's own default holds
        raise UserError(f'{at}: "auto" given, but no setting of the run says it; write a value, or remove the field')
    if kind == "flag":
        value = flag_of(at, value)
    elif isinstance(kind, tuple):
        value = number_of(at, value) if isinstance(kind[0], int) else value
        if value not in kind:
            raise UserError(f"{at}: {said(value)} given; allowed: {', '.join(map(str, kind))}")
    else:
        value = number_of(at, value)
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
            f"{name}: optimizer.type is {said(kind)}, but train.optimizer is {train.optimizer}; "
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
        raise UserError(f"{at}: {said(betas)} given; it takes two numbers, such as [0.9, 0.95]")
    if not (is_equal(at, betas[0], train.beta1) and is_equal(at, betas[1], train.beta2)):
        first, second = (number_of(at, beta) for beta in betas)
        raise UserError(
            f"{at} are {first} and {second}, but train.beta1 is {train.beta1} and train.beta2 {train.beta2}; "
            f"type train.beta1={first} train.beta2={second}, {_OR_AUTO}"
        )


def _schedule(name: str, fields: Fields, train: TrainConfig) -> list[str]:
    """The loop sets the rate, so another shape in the file is a note; its numbers are compared like all others."""
    kind = fields.get("scheduler.type")
    if kind is None:
        return []
    if kind not in tuple(SCHEDULES):
        raise UserError(
            f"{name}: scheduler.type is {said(kind)}, but train.schedule is {train.schedule}; "
            f"allowed: {', '.join(SCHEDULES)}; or remove scheduler"
        )
    other = {key: value for key, value in SCHEDULES[kind].items() if getattr(train, key) != value}
    if not other:
        return []
    ours = " and ".join(f"train.{key} is {getattr(train, key)}" for key in other)
    words = " ".join(f"train.{key}={value}" for key, value in other.items())
    return [f"{name}: scheduler.type is {kind}, but {ours}, and that is used; to follow the file, type {words}"]


def _precision(name: str, fields: Fields, train: TrainConfig) -> None:
    switches = {kind: fields.get(f"{kind}.enabled", "auto") for kind in ("fp16", "bf16")}
    flags = {kind: flag_of(f"{name}: {kind}.enabled", value) for kind, value in switches.items() if value != "auto"}
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
    times = number_of(at, value)
    if not isinstance(times, int) or times < 1:
        raise UserError(f"{at}: {said(value)} given; it takes a whole number, 1 or more")
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
        number = number_of(at, value)
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
    stage, wanted = zero.get("stage", 0), OFFLOADED[train.offload]
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
