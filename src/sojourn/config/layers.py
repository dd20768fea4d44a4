"""Merges the layers of a configuration (preset, files, command line) and records where each key was set."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from sojourn.config.renamed import KeyPath, current, describe_renaming
from sojourn.config.schema import ADAPTER, QUANTISED

_LENGTHS: set[KeyPath] = {("train", "epochs"), ("train", "steps"), ("train", "tokens")}
_DIALS: set[KeyPath] = {("model", "params"), ("model", "depth")}
_HEADS: set[KeyPath] = {("model", "num_heads"), ("model", "num_kv_heads")}
_SIZES: set[KeyPath] = {("model", "d_model"), ("model", "num_layers"), ("model", "ffn_size")} | _HEADS
_ALTERNATIVES = _LENGTHS | _DIALS  # ways to set one thing: the later layer wins, whatever set the other
_PRECEDENCE = ("typed", "file", "preset")


@dataclass(frozen=True)
class Origin:
    """Where a key was set: `text` for messages, and the number of the `layer`, later ones higher."""

    text: str
    kind: Literal["preset", "file", "typed"]
    layer: int = 0


@dataclass
class Layers:
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    source: str = "command line"
    count: int = 0
    notes: list[str] = field(default_factory=list)

    def set(self, key: KeyPath, value: Any, origin: Origin) -> None:
        """Sets one value; a mapping is merged into its section."""
        if isinstance(value, dict) and (value or isinstance(self.get(key), dict)):
            self.origins.setdefault(key, origin)
            for name, inner in value.items():
                self.set((*key, str(name)), inner, origin)
            return
        note = describe_renaming(key, value)
        if note is not None and note not in self.notes:
            self.notes.append(note)
        key, value = current(key, value)
        section = self.values
        for part in key[:-1]:
            if not isinstance(section.get(part), dict):
                section[part] = {}
            section = section[part]
        section[key[-1]] = value
        self.origins = {known: o for known, o in self.origins.items() if known[: len(key)] != key}
        self.origins[key] = origin
        if value is not None:
            self._drop_overridden(key, value, origin)

    def get(self, key: KeyPath) -> Any:
        value: Any = self.values
        for part in key:
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def drop(self, key: KeyPath) -> None:
        section = self.get(key[:-1])
        section.pop(key[-1], None)
        self.origins.pop(key, None)

    def where(self, *keys: KeyPath) -> str:
        """Where to look: of several conflicting keys, the one set last; of a missing key, its section."""
        found = [self.origins[key] for key in keys if key in self.origins]
        for depth in range(len(keys[0]), 0, -1):
            found = found or [origin for key, origin in self.origins.items() if key[:depth] == keys[0][:depth]]
        return min(found, key=lambda origin: _PRECEDENCE.index(origin.kind)).text if found else self.source

    def _drop_overridden(self, key: KeyPath, value: Any, origin: Origin) -> None:
        """Drops what this value overrides in earlier layers: another length or model size, and what a preset set for
        its own width or method."""
        dropped: set[KeyPath] = set()
        if key in _LENGTHS:
            dropped = _LENGTHS - {key}
        elif key in _DIALS:
            dropped = (_DIALS | _SIZES) - {key}
        elif key == ("model", "d_model"):
            dropped = _HEADS | _DIALS
        elif key == ("method", "kind") and value in ("pretrain", "full", "lora"):
            dropped = {("method", name) for name in (QUANTISED if value == "lora" else (*QUANTISED, *ADAPTER))}
        for other in dropped & self.origins.keys():
            earlier = self.origins[other]
            if earlier.layer < origin.layer and (_ALTERNATIVES & {key, other} or earlier.kind == "preset"):
                self.drop(other)
