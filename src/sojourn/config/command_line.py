"""Parses a command line: RUN, `key=value`, and flags of other trainers in `-` and `_` spelling."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from sojourn.config.keys import all_keys
from sojourn.config.messages import ask_if_meant, closest_typo, printable
from sojourn.config.other_trainers import (
    ACCUMULATION_FLAGS,
    ALL_FLAGS,
    BATCH_SIZE_FLAGS,
    IGNORED_FLAGS,
    IGNORED_WITH_VALUE,
    SWITCH_FLAGS,
    UNSUPPORTED_FLAGS,
    VALUE_FLAGS,
    VALUE_MEANINGS,
)
from sojourn.config.renamed import RENAMED, KeyPath
from sojourn.errors import UserError

_EXAMPLES = {
    "config": "small",
    "params": "100M",
    "batch": "16",
    "gpus": "0,1",
    "rate": "1e-4",
    "lr": "1e-4",
    "time": "11h30m",
    "budget": "30",
    "price": "'2.19 CNY'",
    "deepspeed": "ds_config.json",
    "dir": "FOLDER",
    "file": "data.jsonl",
    "data": "data.jsonl",
    "resume": "FOLDER",
    "device": "cuda",
    "model": "FOLDER",
    "tokenizer": "FOLDER",
}


@dataclass(frozen=True)
class Setting:
    """One key that the command line sets; a `value` that is text is not parsed yet."""

    key: KeyPath
    value: Any
    origin: str


@dataclass
class ParsedArgs:
    """A parsed command line. `batch` is rows per GPU, `accumulation` gradient accumulation steps."""

    run: str | None = None
    settings: list[Setting] = field(default_factory=list)
    batch: Setting | None = None
    accumulation: Setting | None = None
    notes: list[str] = field(default_factory=list)


def parse_args(args: list[str]) -> ParsedArgs:
    parsed, left = ParsedArgs(), list(reversed(args))
    while left:
        arg = left.pop()
        if re.search("[\ud800-\udfff]", arg):
            raise UserError(f"command line: “{printable(arg)}” is not UTF-8 text")
        if arg.startswith("-") and arg != "-":
            _flag(parsed, arg, left)
        elif "=" in arg:
            _override(parsed, arg)
        elif parsed.run is not None:
            first, second = printable(parsed.run), printable(arg)
            raise UserError(
                f"command line: “{first}” already names the run, so “{second}” is one argument too many; "
                "settings are key=value or --flag value"
            )
        else:
            parsed.run = arg
    return parsed


def is_typed(args: list[str], key: KeyPath) -> bool:
    """Whether the command line itself sets the key."""
    return any(setting.key == key for setting in parse_args(args).settings)


def _override(parsed: ParsedArgs, arg: str) -> None:
    name, _, value = arg.partition("=")
    key = tuple(part.strip().replace("-", "_") for part in name.split("."))
    if not all(re.fullmatch(r"\w+", part) for part in key):
        raise UserError(f"command line: “{printable(arg)}” is not key=value; an example: train.lr=1e-4")
    parsed.settings.append(Setting(key, value, f"command line {printable(arg)}"))


def _flag(parsed: ParsedArgs, arg: str, left: list[str]) -> None:
    """One flag, and its value from the arguments `left`."""
    spelled, equals, value = arg.partition("=")
    name = spelled.lstrip("-").replace("-", "_").lower()
    dotted = tuple(name.split("."))
    origin = f"command line {printable(spelled)}"
    if name not in ALL_FLAGS and dotted not in all_keys() and dotted not in RENAMED:
        raise UserError(f"{origin}: no such flag{_suggest(spelled, name)}")
    if name in UNSUPPORTED_FLAGS:
        if (value if equals else left.pop() if left and left[-1].lower() == "false" else "").lower() == "false":
            return
        raise UserError(f"{origin}: {UNSUPPORTED_FLAGS[name]}")
    optional = _optional_values(name)
    if not equals and optional:
        value = left.pop() if left and re.fullmatch(optional, left[-1], re.IGNORECASE) else "true"
    elif not equals:
        if not left or left[-1].startswith("--"):
            raise UserError(f"{origin}: needs a value, such as {printable(spelled)} {_example(name)}")
        value = left.pop()

    if name == "nproc_per_node" and re.fullmatch(r"[1-9][0-9]{0,2}", value):
        value = ",".join(map(str, range(int(value))))

    if name in SWITCH_FLAGS:
        key, on, off = SWITCH_FLAGS[name]
        if value.lower() not in ("true", "false"):
            raise UserError(f"{origin}: “{printable(value)}” given; allowed: nothing, true or false")
        chosen = on if value.lower() == "true" else off
        if chosen is not None:
            parsed.settings.append(Setting(tuple(key.split(".")), chosen, origin))
    elif name in IGNORED_FLAGS:
        parsed.notes.append(f"{spelled} is not needed: {IGNORED_FLAGS[name]}")
    elif name in VALUE_MEANINGS:
        _translate_value(parsed, name, value, spelled)
    elif name == "config":
        if parsed.run is not None:
            raise UserError(
                f"{origin}: “{printable(value)}” given, but “{printable(parsed.run)}” already names the run"
            )
        parsed.run = value
    elif name in BATCH_SIZE_FLAGS:
        parsed.batch = Setting(("train", "micro_batch"), _parse_rows(origin, value), origin)
    elif name in ACCUMULATION_FLAGS:
        parsed.accumulation = Setting(("train", "global_batch"), _parse_rows(origin, value), origin)
    else:
        # A warmup of one step is no warmup: the first step already has the full learning rate.
        value = "0" if name == "warmup_steps" and value == "1" else value
        parsed.settings.append(
            Setting(tuple(VALUE_FLAGS[name].split(".")) if name in VALUE_FLAGS else dotted, value, origin)
        )


def _optional_values(name: str) -> str:
    """The values (as a regex) that may follow a flag without a required value; empty: a value is required."""
    if name in SWITCH_FLAGS:
        return "true|false"
    if name in IGNORED_FLAGS:
        return "" if name in IGNORED_WITH_VALUE else "true|false|auto|[0-9]+"
    known = VALUE_MEANINGS.get(name, {})
    return "|".join(known) if "true" in known else ""


def _translate_value(parsed: ParsedArgs, name: str, value: str, spelled: str) -> None:
    """A value of another trainer; `tensorboard,wandb` is two of them."""
    known, origin = VALUE_MEANINGS[name], f"command line {printable(spelled)}"
    values = [arg.strip() for arg in value.split(",")]
    own = [arg for arg in values if arg.lower() not in known]
    if own and name not in VALUE_FLAGS:
        raise UserError(f"{origin}: “{printable(value)}” given; allowed: {' or '.join(known)}")
    for arg in (arg.lower() for arg in values if arg not in own):
        if not all("=" in part for part in known[arg].split()):
            parsed.notes.append(f"{spelled} {arg}: {known[arg]}")
            continue
        for setting in known[arg].split():
            key, _, meant = setting.partition("=")
            parsed.settings.append(Setting(tuple(key.split(".")), meant, origin))
    if own:
        parsed.settings.append(Setting(tuple(VALUE_FLAGS[name].split(".")), ",".join(own), origin))


def _parse_rows(origin: str, value: str) -> int:
    if not re.fullmatch(r"0*[1-9][0-9]{0,6}", value):
        raise UserError(f"{origin}: “{printable(value)}” given; allowed: a whole number from 1")
    return int(value)


def _suggest(spelled: str, name: str) -> str:
    same = [key for key in all_keys() if key[-1] == name and len(key) > 1]
    if same:
        return f"; did you mean {'.'.join(same[0])}=VALUE?"
    mistyped = closest_typo(name, ALL_FLAGS)
    if mistyped:
        return ask_if_meant(f"--{mistyped.replace('_', '-') if '-' in spelled.lstrip('-') else mistyped}")
    return "; any setting can be given as key=value, such as train.lr=1e-4 (see: sojourn presets show small)"


def _example(name: str) -> str:
    return next((example for part, example in _EXAMPLES.items() if part in name), "8")
