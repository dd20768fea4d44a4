"""RUN of `sojourn plan`: a preset, a file, a run folder, or a model by itself, which is planned as LoRA."""

from __future__ import annotations

from pathlib import Path

from sojourn.catalog.models import RefusedModel, find_model
from sojourn.config.command_line import parse_args
from sojourn.config.load import Loaded, load_run
from sojourn.config.preset import find_preset
from sojourn.errors import UserError
from sojourn.storage.hub_config import is_hub_name

_FILE_ENDINGS = (".yaml", ".yml", ".json", ".toml", ".jsonl", ".txt")


def load_planned(args: list[str]) -> Loaded:
    """The run that the arguments name. `sojourn plan MODEL` plans adapters on that model."""
    word = parse_args(args).run
    at = [i for i, arg in enumerate(args) if arg == word and not (i and args[i - 1].startswith("-"))]
    if word is None or not at or not names_a_model(word):
        return load_run(args)
    loaded = load_run([*args[: at[0]], f"model.base={word}", *args[at[0] + 1 :]])
    notes = [note for note in loaded.notes if not note.startswith("no run named")]
    return Loaded(loaded.config, loaded.source, tuple(notes), loaded.name_given)


def names_a_model(word: str) -> bool:
    """A folder with a config.json, a name of the catalogue, or ORG/NAME; presets and files come first."""
    path = Path(word)
    try:
        if find_preset(word) is not None or find_preset(path.stem) is not None or path.is_file():
            return False
        if path.is_dir():
            return (path / "config.json").is_file()
    except (OSError, ValueError):  # not a name a file can have
        return False
    if path.suffix.lower() in _FILE_ENDINGS:
        return False
    if is_hub_name(word):
        return True
    try:
        find_model(word)
    except RefusedModel:
        return True
    except UserError:
        return False
    return True
