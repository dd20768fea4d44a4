"""From what the user typed to a RunConfig: preset or file, what it extends, flags, then `key=value` overrides."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from sojourn.config.explain import closest, explain
from sojourn.config.flags import Typed, read_words
from sojourn.config.preset import find_preset, presets
from sojourn.config.schema import RunConfig
from sojourn.config.yamlfile import KeyPath, parse_value, read_yaml
from sojourn.errors import UserError

_DEEPEST = 20


@dataclass
class Layers:
    """Values merged so far, and for each key where it came from."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)

    def set(self, key: KeyPath, value: Any, origin: str) -> None:
        if isinstance(value, dict) and value:
            for name, inner in value.items():
                self.set((*key, str(name)), inner, origin)
            return
        section = self.values
        for part in key[:-1]:
            if not isinstance(section.get(part), dict):
                section[part] = {}
            section = section[part]
        section[key[-1]] = value
        self.origins[key] = origin

    def where(self, key: KeyPath) -> str:
        """Where the key, or failing that the nearest key around it, was written."""
        for depth in range(len(key), 0, -1):
            near = [origin for known, origin in self.origins.items() if known[:depth] == key[:depth]]
            if near:
                return near[0]
        return next(iter(self.origins.values()), "the run")


@dataclass(frozen=True)
class Loaded:
    config: RunConfig
    source: str
    notes: tuple[str, ...] = ()


def load_run(words: list[str]) -> Loaded:
    """`words` as typed after the verb: RUN, overrides and flags in any order."""
    typed = read_words(words)
    if typed.run is None and not typed.settings:
        raise UserError("say what to run: a preset or a YAML file (see: sojourn presets list)")
    layers, notes = Layers(), list(typed.notes)
    source = "command line"
    if typed.run is not None:
        path = _find(typed.run, notes)
        source = str(path) if find_preset(typed.run) != path else path.stem
        _add_file(layers, path, ())
        layers.values.setdefault("name", path.stem)
    elif not {("model", "base"), ("model", "d_model")} & {setting.key for setting in typed.settings}:
        raise UserError("say what to run: a preset or a YAML file, or the model's size (--d_model, --num_layers)")
    _add_typed(layers, typed)
    return Loaded(validate(layers), source, tuple(notes))


def validate(layers: Layers) -> RunConfig:
    try:
        return RunConfig.model_validate(layers.values)
    except ValidationError as error:
        raise UserError(explain(error, layers.where)) from None


def dump(config: RunConfig) -> dict[str, Any]:
    """Plain values that read back as the same config."""
    return config.model_dump(mode="json")


def to_yaml(config: RunConfig) -> str:
    return yaml.safe_dump(dump(config), sort_keys=False, allow_unicode=True, width=100)


def summary(config: RunConfig) -> str:
    """A run in a few words."""
    model, train = config.model, config.train
    what = f"{config.method.kind} of {model.base}" if model.base else f"a new {model.d_model}×{model.num_layers} model"
    long = f"{train.steps} steps" if train.steps else f"{train.tokens} tokens" if train.tokens else f"{train.epochs or 1:g} epochs"
    return f"{what}, {long}, global batch {train.global_batch}, rows of {config.data.max_length} tokens"


def read_config(path: Path) -> RunConfig:
    """One file by itself, such as a run folder's `run.yaml`."""
    layers = Layers()
    _add_file(layers, path, ())
    return validate(layers)


def _find(word: str, notes: list[str]) -> Path:
    """A file if there is one, else a preset; a guide's `configs/lora_20k.yaml` means the preset of that name."""
    named = find_preset(word)
    path = Path(word).expanduser()
    looks_like_file = path.suffix in (".yaml", ".yml") or "/" in word or "\\" in word
    try:
        if path.is_file() and (looks_like_file or named is None):
            return path
    except (OSError, ValueError):
        raise UserError(f"“{word[:60]}” is neither a preset nor a file (see: sojourn presets list)") from None
    if named is not None:
        return named
    if looks_like_file:
        named = find_preset(path.stem)
        if named is not None and not path.exists():
            notes.append(f"{word} is not here; using the preset {named.stem}")
            return named
        raise UserError(f"{word}: {'a folder, not a YAML file' if path.is_dir() else 'no such file'}"
                        f"{closest(path.stem, [p.name for p in presets()])}")
    raise UserError(f"“{word[:60]}” is neither a preset nor a file"
                    f"{closest(word.replace('_', '-'), [p.name for p in presets()])} (see: sojourn presets list)")


def _add_file(layers: Layers, path: Path, chain: tuple[Path, ...]) -> None:
    here = path.resolve()
    if here in chain:
        loop = " → ".join(p.name for p in (*chain[chain.index(here):], here))
        raise UserError(f"{path}: extends goes round in a circle: {loop}")
    if len(chain) >= _DEEPEST:
        raise UserError(f"{path}: extends is more than {_DEEPEST} files deep")
    values, lines = read_yaml(path)
    parent = values.pop("extends", None)
    if parent is not None:
        at = f"{path}:{lines.get(('extends',), 1)}"
        if not isinstance(parent, str) or not parent:
            raise UserError(f"{at}: extends: allowed: the name of a preset or of a YAML file")
        beside = path.parent / parent
        target = beside if _is_file(beside, at) else find_preset(parent)
        if target is None:
            raise UserError(f"{at}: extends: “{parent[:60]}” is neither a preset nor a file beside this one"
                            f"{closest(parent, [p.name for p in presets()])}")
        _add_file(layers, target, (*chain, here))
        layers.values.pop("name", None)
    for key, value in _leaves(values):
        layers.set(key, value, _origin(path, lines, key))


def _is_file(path: Path, at: str) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        raise UserError(f"{at}: extends: not a file name") from None


def _leaves(values: dict[str, Any], at: KeyPath = ()) -> list[tuple[KeyPath, Any]]:
    found: list[tuple[KeyPath, Any]] = []
    for name, value in values.items():
        if isinstance(value, dict) and value:
            found.extend(_leaves(value, (*at, str(name))))
        else:
            found.append(((*at, str(name)), value))
    return found


def _origin(path: Path, lines: dict[KeyPath, int], key: KeyPath) -> str:
    return f"{path}:{lines[key]}" if key in lines else str(path)


def _add_typed(layers: Layers, typed: Typed) -> None:
    for setting in typed.settings:
        value = parse_value(setting.value, setting.origin) if isinstance(setting.value, str) else setting.value
        layers.set(setting.key, value, setting.origin)
        _replace_length(layers, setting.key)
    _set_batch(layers, typed)


def _replace_length(layers: Layers, key: KeyPath) -> None:
    """A run's length typed on the command line replaces the length, in whatever unit, that the preset gives."""
    lengths = {("train", name) for name in ("epochs", "steps", "tokens")}
    if key in lengths:
        for other in lengths - {key}:
            if "command line" not in layers.origins.get(other, "command line"):
                layers.values["train"].pop(other[1], None)
                layers.origins.pop(other)


def _set_batch(layers: Layers, typed: Typed) -> None:
    """The guides' arithmetic: global batch = batch size × accumulation × number of GPUs."""
    if typed.batch_size is None and typed.accumulation is None:
        return
    train = layers.values.setdefault("train", {})
    gpus = layers.values.get("parallel", {}).get("gpus")
    world = len([g for g in str(gpus).split(",") if g]) if isinstance(gpus, (str, int)) and gpus not in ("auto", "all") else (
        len(gpus) if isinstance(gpus, list) else 1)
    micro = typed.batch_size or train.get("micro_batch", 1)
    micro = 1 if micro == "auto" else micro
    layers.set(("train", "micro_batch"), micro, "command line --batch-size")
    layers.set(("train", "global_batch"), micro * (typed.accumulation or 1) * world, "command line --batch-size")
