"""Understands a command line: RUN, `key=value`, and the guides' flags in `-` and `_` spelling."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from sojourn.config.keys import all_keys
from sojourn.config.messages import did_you_mean, printable
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
    """One key that the command line sets; a `value` that is text is still to be read."""

    key: KeyPath
    value: Any
    origin: str


@dataclass
class ParsedArgs:
    """A command line, understood. `batch` is rows per GPU, `accumulation` how many of those to a step."""

    run: str | None = None
    settings: list[Setting] = field(default_factory=list)
    batch: Setting | None = None
    accumulation: Setting | None = None
    notes: list[str] = field(default_factory=list)


def parse_args(words: list[str]) -> ParsedArgs:
    typed, left = ParsedArgs(), list(reversed(words))
    while left:
        word = left.pop()
        if re.search("[\ud800-\udfff]", word):
            raise UserError(f"command line: “{printable(word)}” is not UTF-8 text")
        if word.startswith("-") and word != "-":
            _flag(typed, word, left)
        elif "=" in word:
            _override(typed, word)
        elif typed.run is not None:
            first, second = printable(typed.run), printable(word)
            raise UserError(
                f"command line: “{first}” already says what to run, so “{second}” is one word too many; "
                "settings are key=value or --flag value"
            )
        else:
            typed.run = word
    return typed


def _override(typed: ParsedArgs, word: str) -> None:
    name, _, value = word.partition("=")
    key = tuple(part.strip().replace("-", "_") for part in name.split("."))
    if not all(re.fullmatch(r"\w+", part) for part in key):
        raise UserError(f"command line: “{printable(word)}” is not key=value; an example: train.lr=1e-4")
    typed.settings.append(Setting(key, value, f"command line {printable(word)}"))


def _flag(typed: ParsedArgs, word: str, left: list[str]) -> None:
    """One flag, and from the words `left` its value."""
    spelled, equals, value = word.partition("=")
    name = spelled.lstrip("-").replace("-", "_").lower()
    dotted = tuple(name.split("."))
    origin = f"command line {printable(spelled)}"
    if name not in ALL_FLAGS and dotted not in all_keys() and dotted not in RENAMED:
        raise UserError(f"{origin}: no such flag{_suggest(spelled, name)}")
    if name in UNSUPPORTED_FLAGS:
        raise UserError(f"{origin}: {UNSUPPORTED_FLAGS[name]}")
    optional = _optional(name)
    if not equals and optional:
        value = left.pop() if left and re.fullmatch(optional, left[-1], re.IGNORECASE) else "true"
    elif not equals:
        if not left or left[-1].startswith("--"):
            raise UserError(f"{origin}: needs a value, such as {printable(spelled)} {_example(name)}")
        value = left.pop()

    if name in SWITCH_FLAGS:
        key, on, off = SWITCH_FLAGS[name]
        if value.lower() not in ("true", "false"):
            raise UserError(f"{origin}: “{printable(value)}” given; allowed: nothing, true or false")
        chosen = on if value.lower() == "true" else off
        if chosen is not None:
            typed.settings.append(Setting(tuple(key.split(".")), chosen, origin))
    elif name in IGNORED_FLAGS:
        typed.notes.append(f"{spelled} is not needed: {IGNORED_FLAGS[name]}")
    elif name in VALUE_MEANINGS:
        _choose(typed, name, value, spelled)
    elif name == "config":
        if typed.run is not None:
            raise UserError(
                f"{origin}: “{printable(value)}” given, but “{printable(typed.run)}” already says what to run"
            )
        typed.run = value
    elif name in BATCH_SIZE_FLAGS:
        typed.batch = Setting(("train", "micro_batch"), _whole(origin, value), origin)
    elif name in ACCUMULATION_FLAGS:
        typed.accumulation = Setting(("train", "global_batch"), _whole(origin, value), origin)
    else:
        # A warmup of one step is none: the first step is then already at the full rate.
        value = "0" if name == "warmup_steps" and value == "1" else value
        typed.settings.append(
            Setting(tuple(VALUE_FLAGS[name].split(".")) if name in VALUE_FLAGS else dotted, value, origin)
        )


def _optional(name: str) -> str:
    """The values that may follow a flag which may stand alone; none: it always has one."""
    if name in SWITCH_FLAGS:
        return "true|false"
    if name in IGNORED_FLAGS:
        return "" if name in IGNORED_WITH_VALUE else "true|false|auto|[0-9]+"
    known = VALUE_MEANINGS.get(name, {})
    return "|".join(known) if "true" in known else ""


def _choose(typed: ParsedArgs, name: str, value: str, spelled: str) -> None:
    """A value in another trainer's words; `tensorboard,wandb` is two of them."""
    known, origin = VALUE_MEANINGS[name], f"command line {printable(spelled)}"
    words = [word.strip() for word in value.split(",")]
    own = [word for word in words if word.lower() not in known]
    if own and name not in VALUE_FLAGS:
        raise UserError(f"{origin}: “{printable(value)}” given; allowed: {' or '.join(known)}")
    for word in (word.lower() for word in words if word not in own):
        if not all("=" in part for part in known[word].split()):
            typed.notes.append(f"{spelled} {word}: {known[word]}")
            continue
        for setting in known[word].split():
            key, _, meant = setting.partition("=")
            typed.settings.append(Setting(tuple(key.split(".")), meant, origin))
    if own:
        typed.settings.append(Setting(tuple(VALUE_FLAGS[name].split(".")), ",".join(own), origin))


def _whole(origin: str, value: str) -> int:
    if not re.fullmatch(r"0*[1-9][0-9]{0,6}", value):
        raise UserError(f"{origin}: “{printable(value)}” given; allowed: a whole number from 1")
    return int(value)


def _suggest(spelled: str, name: str) -> str:
    same = [key for key in all_keys() if key[-1] == name and len(key) > 1]
    if same:
        return f"; did you mean {'.'.join(same[0])}=VALUE?"
    near = did_you_mean(name, ALL_FLAGS).replace("mean ", "mean --")
    if near:
        return near.replace("_", "-") if "-" in spelled.lstrip("-") else near
    return "; any setting can be given as key=value, such as train.lr=1e-4 (see: sojourn presets show small)"


def _example(name: str) -> str:
    return next((example for part, example in _EXAMPLES.items() if part in name), "8")
