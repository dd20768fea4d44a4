"""The name of a run that the user has not named: that of its preset or of its size, with a number where it is taken.

A command typed again must find its own run. So a name is taken if its run was started with other settings or data; one
started with the same is resumed.
"""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

from sojourn.config.load import Loaded, read_config, with_settings
from sojourn.config.schema import RunConfig
from sojourn.data.inputs import open_inputs
from sojourn.data.settings import data_settings
from sojourn.errors import UserError
from sojourn.resolve.new_model import new_model_spec
from sojourn.resolve.resolved import Resolved
from sojourn.resolve.training import resolve_new_model
from sojourn.run.folder import RunFolder
from sojourn.run.home import prepared_folder, run_folder
from sojourn.storage.file_digests import FileDigests
from sojourn.storage.files import read_json_object
from sojourn.train.checkpoint.config_changes import data_section, decisive_differences


def choose_name(loaded: Loaded) -> tuple[RunConfig, str | None]:
    """The configuration under a name of its own, and a note if that has become another. Machines that share a run must
    agree on its name, so theirs stays."""
    config = loaded.config
    several_nodes = config.parallel.nodes > 1 or int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1
    if loaded.name_given or config.save.folder is not None or several_nodes:
        return config, None
    name, taken = str(config.name), ""
    for number in count(2):
        run = run_folder(name)
        difference = _difference(config, run)
        if not difference:
            break
        taken = taken or f"{run.path} was started with {difference}"
        name = f"{config.name}-{number}"
    if not taken:
        return config, None
    now = f"resuming {name}" if run.exists() else f"this run is called {name} (name=NAME gives it another name)"
    return with_settings(config, {"name": name}), f"{taken}; {now}"


def _difference(config: RunConfig, run: RunFolder) -> str:
    """What the run was started with that `config` has not; empty for the same run, and for a new one."""
    if not run.exists():
        return ""
    try:
        before = read_config(run.config)
        if changes := decisive_differences(before, _sized(config), run):
            return f"other settings ({changes})"
        return "other data" if _is_other_data(before, config, run) else ""
    except UserError:  # a damaged run.yaml, a file that is not there: said when the run is opened
        return ""


def _sized(config: RunConfig) -> RunConfig:
    """With the sizes that one dial stands for, as run.yaml has them."""
    if config.model.base is not None:
        return config
    resolved = Resolved(config)
    resolve_new_model(resolved, new_model_spec(config.model, config.data.vocab_size))
    return resolved.config


def _is_other_data(before: RunConfig, config: RunConfig, run: RunFolder) -> bool:
    """The same bytes in another place are the same data."""
    path = read_json_object(run.environment).get("data")
    if data_section(before) == data_section(config) or not isinstance(path, str):
        return False
    inputs = open_inputs(data_settings(config), lambda line: None, config.advanced.split_digits)
    return inputs.artefact_hash(FileDigests(prepared_folder() / ".digests.json")) != Path(path).name
