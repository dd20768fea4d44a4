"""Checks a user's DeepSpeed file against the run's settings, and makes the configuration that DeepSpeed gets.

A field that a setting of the run decides (batch, learning rate, precision …) must be `auto` or equal to that setting;
otherwise the run is refused in one line. Fields that decide how ZeRO uses memory are passed through. Every field, by
its dotted name, stands in one of the tables of `ds_fields.py`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from sojourn.config.messages import did_you_mean, printable
from sojourn.config.schema import RunConfig, TrainConfig
from sojourn.errors import UserError
from sojourn.resolve.ds_fields import (
    COMPARED_TOGETHER,
    FIXED,
    IGNORED,
    KNOWN,
    OFFLOAD_SECTIONS,
    PASSED_THROUGH,
    REFUSED,
    SCHEDULES,
    TRAIN_KEYS,
    Fields,
)
from sojourn.resolve.ds_file import flatten, format_value, is_equal, is_off, parse_flag, parse_number, read

_OR_AUTO = 'or write "auto" in the file'
_NEVER = 10**12  # steps between two progress lines of DeepSpeed


def config_from_file(path: Path, config: RunConfig, world_size: int) -> tuple[dict[str, Any], list[str]]:
    """The configuration for DeepSpeed and notes for the user. `config` has no `auto` left."""
    name, train = printable(path, 200), config.train
    fields = dict(flatten(read(path, name)))
    _optimizer(name, fields, train)
    notes = _schedule(name, fields, train)
    settings: dict[str, Any] = {}
    ignored: dict[str, list[str]] = {}
    for field, value in fields.items():
        at = f"{name}: {field}"
        if field in REFUSED:
            if not is_off(value):
                raise UserError(f"{at} {REFUSED[field]}; remove it")
        elif field in IGNORED:
            if not is_off(value):
                ignored.setdefault(IGNORED[field], []).append(field)
        elif field in TRAIN_KEYS:
            _check_equal(at, value, TRAIN_KEYS[field], train)
        elif field in FIXED:
            if value != "auto" and not is_equal(at, value, FIXED[field]):
                raise UserError(
                    f"{at} is {format_value(value)}, but here it is always {format_value(FIXED[field])}; write that"
                )
        elif field in PASSED_THROUGH:
            _pass_through(settings, at, field, value)
        elif field not in COMPARED_TOGETHER:
            raise _unknown(name, field, value)
    _precision(name, fields, train)
    _batch_size(name, fields, train, world_size)
    notes += _steps(name, fields, train)
    notes += [f"{name}: {', '.join(names)}: ignored, since {reason}" for reason, names in ignored.items()]
    settings["zero_optimization"] = _zero(f"{name}: zero_optimization", settings.get("zero_optimization", {}), train)
    accumulated = fields.get("data_types.grad_accum_dtype", train.precision)
    if settings["zero_optimization"]["stage"] == 0 and accumulated != train.precision:
        raise UserError(
            f"{name}: data_types.grad_accum_dtype is {accumulated}, but train.precision is {train.precision}, and "
            "DeepSpeed supports that only with ZeRO; remove it, or write zero_optimization.stage 1, 2 or 3"
        )
    return _complete(settings, train, world_size), notes


def zero_from_file(path: Path, config: RunConfig) -> tuple[int, str]:
    """ZeRO's stage and what it offloads to the host, for plans: `config` may still have `auto`, so only names and
    ZeRO's own values are checked."""
    name, settings = printable(path, 200), dict[str, Any]()
    for field, value in flatten(read(path, name)):
        if field in PASSED_THROUGH:
            _pass_through(settings, f"{name}: {field}", field, value)
        elif field not in KNOWN:
            raise _unknown(name, field, value)
    zero = _zero(f"{name}: zero_optimization", settings.get("zero_optimization", {}), config.train)
    for part, where in (("offload_param", "all"), ("offload_optimizer", "optimizer")):
        if zero.get(part, {}).get("device") == "cpu":
            return zero["stage"], where
    return zero["stage"], "off"


def default_config(config: RunConfig, world_size: int) -> dict[str, Any]:
    """Without a file: ZeRO-2, or ZeRO-3 where the weights are offloaded too."""
    stage = 3 if "offload_param" in OFFLOAD_SECTIONS[config.train.offload] else 2
    zero = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
    return _complete({"zero_optimization": _zero("parallel.engine", zero, config.train)}, config.train, world_size)


def _complete(settings: dict[str, Any], train: TrainConfig, world_size: int) -> dict[str, Any]:
    """Adds fixed values for what the training loop does itself."""
    if train.optimizer != "adamw":
        raise UserError(
            f"train.optimizer: {train.optimizer} given, but ZeRO shards the weights, and only AdamW can update shards; "
            "use train.optimizer=adamw, or another parallel.engine"
        )
    precisions = {kind: {**settings.get(kind, {}), "enabled": train.precision == kind} for kind in ("fp16", "bf16")}
    return {
        **settings,
        **precisions,
        # The training loop accumulates gradients itself and marks the last micro batch.
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": train.clip,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": _NEVER,
    }


def _unknown(name: str, field: str, value: Any) -> UserError:
    inside = next((known for known in KNOWN if known.startswith(f"{field}.")), None)
    outside = next((known for known in KNOWN if field.startswith(f"{known}.")), None)
    if inside is not None:
        example = inside.removeprefix(f"{field}.").split(".")[0]
        return UserError(
            f'{name}: {field}: {format_value(value)} given; it takes an object, such as {{"{example}": …}}'
        )
    if outside is not None:
        return UserError(f"{name}: {outside}: an object given; it takes one value; remove the braces")
    return UserError(f"{name}: {printable(field)} is not a known field{did_you_mean(field, KNOWN) or '; remove it'}")


def _check_equal(at: str, value: Any, key: str, train: TrainConfig) -> None:
    """`auto`, or the value of the train key."""
    ours = getattr(train, key)
    if value != "auto" and not is_equal(at, value, ours):
        number = parse_number(at, value)
        if isinstance(ours, int) and not isinstance(number, int):
            raise UserError(f"{at}: {format_value(value)} given, but train.{key} is {ours}; it takes a whole number")
        raise UserError(f"{at} is {number}, but train.{key} is {ours}; type train.{key}={number}, {_OR_AUTO}")


def _pass_through(settings: dict[str, Any], at: str, field: str, value: Any) -> None:
    kind = PASSED_THROUGH[field]
    if value == "auto":
        if field.startswith("zero_optimization.") and kind in ("size", "count"):
            return  # DeepSpeed's own default holds
        raise UserError(f'{at}: "auto" given, but no setting of the run decides it; write a value, or remove the field')
    if kind == "flag":
        value = parse_flag(at, value)
    elif isinstance(kind, tuple):
        value = parse_number(at, value) if isinstance(kind[0], int) else value
        if value not in kind:
            raise UserError(f"{at}: {format_value(value)} given; allowed: {', '.join(map(str, kind))}")
    else:
        value = parse_number(at, value)
        whole = "" if kind == "number" else "whole "
        least = 1 if kind == "count" else 0
        if value < least or (whole and not isinstance(value, int)):
            raise UserError(f"{at}: {value} given; it takes a {whole}number, {least} or more")
    *sections, last = field.split(".")
    for section in sections:
        settings = settings.setdefault(section, {})
    settings[last] = value


def _optimizer(name: str, fields: Fields, train: TrainConfig) -> None:
    """Checked first, since the fields of other optimizers are unknown here."""
    kind = fields.get("optimizer.type", "AdamW")
    if not isinstance(kind, str) or kind.lower() not in ("adam", "adamw"):
        raise UserError(
            f"{name}: optimizer.type is {format_value(kind)}, but train.optimizer is {train.optimizer}; "
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
        raise UserError(f"{at}: {format_value(betas)} given; it takes two numbers, such as [0.9, 0.95]")
    if not (is_equal(at, betas[0], train.beta1) and is_equal(at, betas[1], train.beta2)):
        first, second = (parse_number(at, beta) for beta in betas)
        raise UserError(
            f"{at} are {first} and {second}, but train.beta1 is {train.beta1} and train.beta2 {train.beta2}; "
            f"type train.beta1={first} train.beta2={second}, {_OR_AUTO}"
        )


def _schedule(name: str, fields: Fields, train: TrainConfig) -> list[str]:
    """The loop sets the learning rate, so another schedule in the file is a note; its values are compared as usual."""
    kind = fields.get("scheduler.type")
    if kind is None:
        return []
    if kind not in tuple(SCHEDULES):
        raise UserError(
            f"{name}: scheduler.type is {format_value(kind)}, but train.schedule is {train.schedule}; "
            f"allowed: {', '.join(SCHEDULES)}; or remove scheduler"
        )
    other = {key: value for key, value in SCHEDULES[kind].items() if getattr(train, key) != value}
    if not other:
        return []
    ours = " and ".join(f"train.{key} is {getattr(train, key)}" for key in other)
    overrides = " ".join(f"train.{key}={value}" for key, value in other.items())
    return [f"{name}: scheduler.type is {kind}, but {ours}, and that is used; to follow the file, type {overrides}"]


def _precision(name: str, fields: Fields, train: TrainConfig) -> None:
    switches = {kind: fields.get(f"{kind}.enabled", "auto") for kind in ("fp16", "bf16")}
    flags = {kind: parse_flag(f"{name}: {kind}.enabled", value) for kind, value in switches.items() if value != "auto"}
    on = [kind for kind, flag in flags.items() if flag]
    if len(on) > 1:
        raise UserError(f'{name}: fp16.enabled and bf16.enabled are both true; write "auto" in both')
    if on and on != [train.precision]:
        value, kind = "true", on[0]
    elif not on and train.precision in flags:
        value, kind = "false", str(train.precision)
    else:
        return
    use = on[0] if on else "fp32"
    raise UserError(
        f"{name}: {kind}.enabled is {value}, but train.precision is {train.precision}; "
        f"type train.precision={use}, {_OR_AUTO}"
    )


def _batch_size(name: str, fields: Fields, train: TrainConfig, world_size: int) -> None:
    """Checked after the micro batch, which equals the run's by then."""
    value = fields.get("gradient_accumulation_steps", "auto")
    if value == "auto":
        return
    at, micro = f"{name}: gradient_accumulation_steps", int(train.micro_batch)
    accumulation = parse_number(at, value)
    if not isinstance(accumulation, int) or accumulation < 1:
        raise UserError(f"{at}: {format_value(value)} given; it takes a whole number, 1 or more")
    rows = micro * accumulation * world_size
    if rows != train.global_batch:
        product = f"{accumulation} × train.micro_batch {micro} × {world_size} ranks is {rows} rows a step"
        raise UserError(
            f"{at} is {accumulation}, and {product}, but train.global_batch is {train.global_batch}; "
            f"type train.global_batch={rows}, {_OR_AUTO}"
        )


def _steps(name: str, fields: Fields, train: TrainConfig) -> list[str]:
    """Steps of the run and of its warm-up; only a note where they are unknown before the data is read."""
    share, warmup = train.warmup < 1, None
    if not share or train.steps is not None:
        warmup = math.ceil(train.warmup * (train.steps or 0)) if share else int(train.warmup)
    notes = []
    for field, key, ours in (("warmup_num_steps", "warmup", warmup), ("total_num_steps", "steps", train.steps)):
        at, value = f"{name}: scheduler.params.{field}", fields.get(f"scheduler.params.{field}", "auto")
        if value == "auto":
            continue
        number = parse_number(at, value)
        if ours is None:
            ours_is = "train.epochs or train.tokens" if key == "steps" else f"train.warmup, a share of {train.warmup},"
            notes.append(f"{at} is {number}, but {ours_is} is used; to follow the file, type train.{key}={number}")
        elif number != ours:
            of = f" ({ours} steps)" if key == "warmup" and share else ""
            raise UserError(
                f"{at} is {number}, but train.{key} is {getattr(train, key)}{of}; type train.{key}={number}, {_OR_AUTO}"
            )
    return notes


def _zero(at: str, zero: dict[str, Any], train: TrainConfig) -> dict[str, Any]:
    """Adds `train.offload` where the file has no offload section; refuses what DeepSpeed would silently ignore."""
    stage, offloaded = zero.get("stage", 0), OFFLOAD_SECTIONS[train.offload]
    for part, least_stage in (("offload_optimizer", 1), ("offload_param", 3)):
        section = zero.get(part, {})
        device = section.get("device", "cpu" if part in offloaded else "none")
        if device == "nvme":
            raise UserError(f"{at}.{part}.device is nvme, which is not supported; write cpu or none")
        if device == "none" and part in offloaded:
            raise UserError(
                f"{at}.{part}.device is none, but train.offload is {train.offload}; "
                "type train.offload=off, or write cpu in the file"
            )
        if device == "cpu" and stage < least_stage:
            why = f"train.offload={train.offload}" if part in offloaded else part
            raise UserError(f"{at}.stage is {stage}, but {why} needs {least_stage} or above; change one of them")
        if device == "cpu" and "device" not in section:
            zero = {**zero, part: {"device": "cpu", "pin_memory": True, **section}}
    return {"stage": stage, **zero}
