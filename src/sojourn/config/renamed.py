"""Keys and values that were renamed. The old spellings keep working, in files, on command lines and in run folders."""

from __future__ import annotations

from typing import Any

from sojourn.errors import UserError

KeyPath = tuple[str, ...]

_KEYS = {
    "train.checkpointing": "train.activation_checkpointing",
    "train.gradient_checkpointing": "train.activation_checkpointing",
    "train.ahead": "advanced.async_step",
    "train.fused": "advanced.fused_forwards",
    "train.loss": "advanced.chunked_loss",
    "train.compile_cache": "advanced.compile_cache",
    "train.hopper": "advanced.hopper_kernels",
    "data.split_digits": "advanced.split_digits",
    "parallel.reshard": "advanced.reshard_after_forward",
}
_VALUES = {
    "train.loss": {"chunked": "on", "whole": "off"},
    "train.fp8": {"inner": "except_last_layer"},
}
_ALIASES = {"train.gradient_checkpointing"}  # Hugging Face's name: a second spelling for good, so without a note

RENAMED = {tuple(old.split(".")): tuple(new.split(".")) for old, new in _KEYS.items()}


def current(key: KeyPath, value: Any) -> tuple[KeyPath, Any]:
    """A key and its value in today's spelling."""
    values = _VALUES.get(".".join(key), {})
    return RENAMED.get(key, key), values.get(value, value) if isinstance(value, str) else value


def check_spellings(written: list[tuple[KeyPath, str]]) -> None:
    """Refuses two spellings of one key in one file or command line; each key comes with where it is written."""
    first: dict[KeyPath, KeyPath] = {}
    for key, where in written:
        new, _ = current(key, None)
        if first.setdefault(new, key) != key:
            both = " and ".join(".".join(spelling) for spelling in (first[new], key))
            raise UserError(f"{where}: {both} are the same setting; keep {'.'.join(new)}")


def describe_renaming(key: KeyPath, value: Any) -> str | None:
    """A note for whoever wrote `key`, or None where that is today's spelling or a lasting alias."""
    new_key, new_value = current(key, value)
    old, new = ".".join(key), ".".join(new_key)
    if old in _ALIASES or (key, value) == (new_key, new_value):
        return None
    return f"{old} is now {new}" if value == new_value else f"{old}={value} is now {new}={new_value}"


def upgrade(values: dict[str, Any]) -> dict[str, Any]:
    """A whole configuration, as nested mappings, in today's spelling."""
    upgraded: dict[str, Any] = {name: dict(part) if isinstance(part, dict) else part for name, part in values.items()}
    for section, part in values.items():
        for name, value in part.items() if isinstance(part, dict) else ():
            (new_section, new_name), new_value = current((section, name), value)
            del upgraded[section][name]
            upgraded.setdefault(new_section, {})[new_name] = new_value
    return upgraded
