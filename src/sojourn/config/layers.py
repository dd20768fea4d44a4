"""A run's values laid over one another (preset, files, command line), and for each key where it was written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from sojourn.config.renamed import KeyPath, current, describe_renaming
from sojourn.config.schema import ADAPTER, QUANTISED

_LENGTHS: set[KeyPath] = {("train", "epochs"), ("train", "steps"), ("train", "tokens")}
_DIALS: set[KeyPath] = {("model", "params"), ("model", "depth")}
_HEADS: set[KeyPath] = {("model", "num_heads"), ("model", "num_kv_heads")}
_SIZES: set[KeyPath] = {("model", "d_model"), ("model", "num_layers"), ("model", "ffn_size")} | _HEADS
_WHOLE = _LENGTHS | _DIALS  # two ways to say one thing: the nearer holds, whoever said the other
_NEAREST = ("typed", "file", "preset")


@dataclass(frozen=True)
class Origin:
    """Where something was written: `text` for people, `layer` counts up as layers are laid on."""

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
        """Lays one value; a mapping goes into the section that is there instead of replacing it."""
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
            self._give_way(key, value, origin)

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
        """The place to look: of several keys that clash, the one laid last; of a missing one, its surroundings."""
        found = [self.origins[key] for key in keys if key in self.origins]
        for depth in range(len(keys[0]), 0, -1):
            found = found or [origin for key, origin in self.origins.items() if key[:depth] == keys[0][:depth]]
        return min(found, key=lambda origin: _NEAREST.index(origin.kind)).text if found else self.source

    def _give_way(self, key: KeyPath, value: Any, origin: Origin) -> None:
        """Drops what this value voids in earlier layers: a length or a model's size said in other ways, and what a
        preset said about its own width or method."""
        voided: set[KeyPath] = set()
        if key in _LENGTHS:
            voided = _LENGTHS - {key}
        elif key in _DIALS:
            voided = (_DIALS | _SIZES) - {key}
        elif key == ("model", "d_model"):
            voided = _HEADS | _DIALS
        elif key == ("method", "kind") and value in ("pretrain", "full", "lora"):
            voided = {("method", name) for name in (QUANTISED if value == "lora" else (*QUANTISED, *ADAPTER))}
        for other in voided & self.origins.keys():
            earlier = self.origins[other]
            if earlier.layer < origin.layer and (_WHOLE & {key, other} or earlier.kind == "preset"):
                self.drop(other)
