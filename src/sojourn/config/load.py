"""Builds a RunConfig from a command line: preset or file, what it `extends`, then flags and `key=value`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from sojourn.config.command_line import ParsedArgs, parse_args
from sojourn.config.fields import parse_gpus
from sojourn.config.keys import all_keys
from sojourn.config.layers import Layers, Origin
from sojourn.config.messages import did_you_mean, printable
from sojourn.config.preset import FOLDER, find_preset, get_preset, preset_names
from sojourn.config.renamed import check_spellings, current
from sojourn.config.schema import RunConfig
from sojourn.config.validation_errors import describe_error, describe_value, dotted, locate, takes_text_only
from sojourn.config.yaml_file import parse_value, read_yaml, write_yaml
from sojourn.errors import UserError

_MAX_EXTENDS = 20


@dataclass(frozen=True)
class Loaded:
    config: RunConfig
    source: str
    notes: tuple[str, ...] = ()
    name_given: bool = False  # by the user: typed, or the name of a file of theirs


def load_run(args: list[str]) -> Loaded:
    """`args` after the verb: RUN, overrides and flags in any order."""
    parsed = parse_args(args)
    layers, notes = Layers(), parsed.notes
    if parsed.run is not None:
        path = _find_run(parsed.run, notes)
    elif not (parsed.settings or parsed.batch or parsed.accumulation):
        raise UserError("name a run: a preset or a YAML file, such as small (see: sojourn presets list)")
    elif _names_a_base(parsed):
        path = None
    else:
        path = get_preset("small")
    source = "command line"
    if path is not None:
        source = path.stem if path.parent == FOLDER else printable(path, 200)
        _add_file(layers, path, ())
    if path is not None and parsed.run is not None:
        layers.values.setdefault("name", _as_name(path.stem))
        if _path_kind(Path(parsed.run)) == "folder" and path.name == "run.yaml":  # a run folder: resume there
            layers.set(("save", "folder"), str(Path(parsed.run)), Origin("command line", "preset"))
            layers.notes.clear()  # run.yaml was written by Sojourn, perhaps by an older version
    _add_command_line(layers, parsed)
    notes.extend(layers.notes)
    if layers.get(("model", "base")) is not None and layers.get(("method", "kind")) is None:
        layers.set(("method", "kind"), "lora", Origin("model.base", "preset"))
        notes.append("method.kind not given: using lora, which trains adapters; method.kind=full trains all weights")
    config = _validate(layers)
    name_given = ("name",) in (setting.key for setting in parsed.settings)
    if parsed.run is None and not name_given:
        config = config.model_copy(update={"name": size_name(config)})
        start = "" if path is None else f" from the preset {path.stem}"
        notes.insert(0, f"no run named; starting {config.name}{start}")
    name_given = name_given or (parsed.run is not None and path is not None and path.parent != FOLDER)
    return Loaded(config, source, tuple(notes), name_given)


def read_config(path: Path) -> RunConfig:
    """One file, such as a run folder's `run.yaml`."""
    layers = Layers()
    _add_file(layers, path, ())
    return _validate(layers)


def with_settings(config: RunConfig, settings: dict[str, Any]) -> RunConfig:
    """A copy with some keys (dotted) changed, validated."""
    values = dump(config)
    for key, value in settings.items():
        (*sections, last), setting = current(tuple(key.split(".")), value)
        place = values
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = setting
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise UserError(describe_error(error, lambda *_: "settings")) from None


def dump(config: RunConfig) -> dict[str, Any]:
    """Plain values that validate as the same config."""
    return config.model_dump(mode="json")


def to_yaml(config: RunConfig) -> str:
    return write_yaml(dump(config))


def size_name(config: RunConfig) -> str:
    """A name for a run from what it is: 512x6, 20M, depth-4, Qwen2.5-7B-qlora."""
    model = config.model
    if model.base is None:
        dial = f"depth-{model.depth}" if model.depth else str(model.params) if model.params else None
        return dial or f"{model.d_model}x{model.num_layers}"
    base = model.base.rstrip("/\\").replace("\\", "/").rpartition("/")[2].removesuffix(".gguf")
    return _as_name(f"{base}-{config.method.kind}")


def _as_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text).strip("-.")[:100] or "run"


def summary(config: RunConfig) -> str:
    """A run in one line."""
    model, train = config.model, config.train
    what = f"{config.method.kind} of {model.base}" if model.base else f"a new {model.d_model}×{model.num_layers} model"
    what = f"a new model of {model.params} parameters" if model.params else what
    what = f"a new model of depth {model.depth}" if model.depth else what
    epochs = train.epochs or 1
    long = f"{epochs:g} epoch{'' if epochs == 1 else 's'}"
    long = f"{train.steps} steps" if train.steps else f"{train.tokens} tokens" if train.tokens else long
    return f"{what}, {long}, global batch {train.global_batch}, rows of {config.data.max_length} tokens"


def _validate(layers: Layers) -> RunConfig:
    try:
        return RunConfig.model_validate(layers.values)
    except ValidationError as error:
        raise UserError(describe_error(error, layers.where)) from None


def _find_run(word: str, notes: list[str]) -> Path:
    """A file if it exists, else a preset. `configs/lora_20k.yaml` means the preset of that name, unless that folder
    exists: then the user meant a file of their own."""
    named, path = find_preset(word), Path(word)
    like_a_file = path.suffix.lower() in (".yaml", ".yml") or "/" in word or "\\" in word
    here = _path_kind(path)
    if here == "file" and (like_a_file or named is None):
        return path
    if named is not None:
        return named
    if here == "folder":
        if (path / "run.yaml").is_file():
            return path / "run.yaml"
        raise UserError(f"{printable(path, 200)}: a folder; give a YAML file or a preset (see: sojourn presets list)")
    if like_a_file:
        named = find_preset(path.stem)
        if named is not None and (path.parent == Path() or not path.parent.is_dir()):
            notes.append(f"{printable(word, 200)} does not exist; using the preset {named.stem}")
            return named
        raise UserError(
            f"{printable(word, 200)}: no such file{did_you_mean(path.stem, preset_names())} "
            "(presets: sojourn presets list)"
        )
    if tuple(word.split(".")) in all_keys():
        raise UserError(f"command line: “{printable(word)}” is a key; write {printable(word)}=VALUE")
    hint = did_you_mean(word, preset_names())
    raise UserError(f"“{printable(word)}” is neither a preset nor a file{hint} (see: sojourn presets list)")


def _path_kind(path: Path) -> str:
    try:
        return "file" if path.is_file() else "folder" if path.is_dir() else ""
    except (OSError, ValueError):  # too long, or not a name a file can have
        return ""


def _add_file(layers: Layers, path: Path, chain: tuple[Path, ...]) -> None:
    values, lines = read_yaml(path)
    name = printable(path, 200)
    if "extends" in values:
        parent = values.pop("extends")
        at = f"{name}:{lines['extends',]}: extends"
        _add_file(layers, _extended(path, parent, at, chain), (*chain, path.resolve()))
        layers.values.pop("name", None)
    layers.count += 1
    kind: Literal["preset", "file"] = "preset" if path.parent == FOLDER else "file"
    layers.source = f"preset {path.stem}" if kind == "preset" else name
    check_spellings([(key, f"{name}:{line}") for key, line in lines.items()])
    for key, value in values.items():
        layers.set((key,), value, Origin(layers.source, kind, layers.count))
    for written, line in lines.items():
        place, _ = current(written, None)
        layers.origins[place] = Origin(layers.source if kind == "preset" else f"{name}:{line}", kind, layers.count)


def _extended(path: Path, parent: Any, at: str, chain: tuple[Path, ...]) -> Path:
    """The file that `extends: parent` in `path` names."""
    if not isinstance(parent, str) or not parent:
        raise UserError(f"{at}: {describe_value(parent)} given; allowed: the name of a preset or of one YAML file")
    beside = path.parent / parent
    target = beside if _path_kind(beside) == "file" else find_preset(parent)
    if target is None:
        hint = did_you_mean(Path(parent).stem, preset_names())
        raise UserError(f"{at}: “{printable(parent)}” is neither a file beside this one nor a preset{hint}")
    files = (*chain, path.resolve())
    if target.resolve() in files:
        loop = [file.name for file in (*files[files.index(target.resolve()) :], target)]
        raise UserError(f"{at}: circular: {printable(' → '.join(loop), 200)}; remove one of them")
    if len(files) >= _MAX_EXTENDS:
        raise UserError(f"{at}: more than {_MAX_EXTENDS} files deep; extend a preset or a file nearer to it")
    return target


def _add_command_line(layers: Layers, parsed: ParsedArgs) -> None:
    layers.count += 1
    _add_settings(layers, parsed)
    _let_steps_win(layers)
    _set_batch(layers, parsed)


def _names_a_base(parsed: ParsedArgs) -> bool:
    layers = Layers()
    _add_settings(layers, parsed)
    return layers.get(("model", "base")) is not None


def _add_settings(layers: Layers, parsed: ParsedArgs) -> None:
    check_spellings([(setting.key, setting.origin) for setting in parsed.settings])
    for setting in parsed.settings:
        value = setting.value
        if isinstance(value, str):
            value = parse_value(value)
            key, _ = current(setting.key, value)
            place, annotation, _ = locate(key)
            if len(place) < len(key) and place in all_keys():
                raise UserError(f"{setting.origin}: {dotted(place)} has no keys below it; write {dotted(place)}=VALUE")
            if isinstance(value, (bool, int, float)) and takes_text_only(annotation):
                value = setting.value
        layers.set(setting.key, value, Origin(setting.origin, "typed", layers.count))


def _let_steps_win(layers: Layers) -> None:
    """As in Hugging Face: of --max_steps and --num_train_epochs on one command line, the steps count."""
    steps, epochs = ("train", "steps"), ("train", "epochs")
    if layers.get(steps) is None or layers.get(epochs) is None:
        return
    origin = layers.origins[epochs]
    if origin.kind == "typed":
        typed = origin.text.removeprefix("command line ")
        layers.notes.append(f"train.steps={layers.get(steps)} sets the length; {typed} is not used")
        layers.drop(epochs)


def _set_batch(layers: Layers, parsed: ParsedArgs) -> None:
    """As in other trainers: global batch = batch size × gradient accumulation steps × number of GPUs."""
    last = parsed.accumulation or parsed.batch
    if last is None:
        return
    micro_key, global_key = ("train", "micro_batch"), ("train", "global_batch")
    batch = layers.origins.get(global_key)
    batch_given = batch is not None and batch.kind == "typed"
    if batch_given and parsed.accumulation:
        raise UserError(f"{last.origin}: train.global_batch is given too and sets the same; remove one")
    # Without a batch size the preset's applies; if that is auto, one micro batch is the whole global batch.
    sizes = (parsed.batch.value if parsed.batch else None, layers.get(micro_key), layers.get(global_key), 32)
    micro = next(size for size in sizes if size not in (None, "auto"))
    if not isinstance(micro, int) or isinstance(micro, bool):
        return
    layers.set(micro_key, micro, Origin((parsed.batch or last).origin, "typed", layers.count))
    if not batch_given:
        gpus = parse_gpus(layers.get(("parallel", "gpus")))
        rows = micro * (parsed.accumulation.value if parsed.accumulation else 1)
        world = len(gpus) if isinstance(gpus, list) else 1
        layers.set(global_key, rows * max(1, world), Origin(last.origin, "typed", layers.count))
        if gpus == "all":
            parsed.notes.append(
                f"the global batch is {rows} rows on any number of GPUs; list them to multiply it: --gpus 0,1"
            )
