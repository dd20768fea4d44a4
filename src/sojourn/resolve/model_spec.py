"""The ModelSpec of a new model, of one in the catalogue, or of one whose config.json is here or on the hub.

Nothing but a config.json is downloaded, and no weight is read.
"""

from __future__ import annotations

from dataclasses import replace

from sojourn.catalog.models import ModelSpec, RefusedModel, find_model
from sojourn.config.messages import printable
from sojourn.config.schema import RunConfig
from sojourn.errors import UserError
from sojourn.expand_user import expand_user
from sojourn.resolve.config_json import spec_of_file
from sojourn.resolve.families import stored_as
from sojourn.resolve.new_model import new_model_spec
from sojourn.storage.hub_config import hub_config, is_hub_name


def model_spec_of(config: RunConfig) -> ModelSpec:
    if config.model.base is None:
        return new_model_spec(config.model, int(config.data.vocab_size))
    return base_model_spec(str(config.model.base))


def base_model_spec(word: str) -> ModelSpec:
    """A folder or file at hand before a name; names are looked up in the catalogue, then on the hub."""
    path = expand_user(word)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file() and file.suffix != ".gguf":
        return spec_of_file(file)
    if path.exists() or word.startswith((".", "/", "~")):
        what = (
            "a GGUF file tells its shape only when it is opened" if path.suffix == ".gguf" else "no config.json there"
        )
        raise UserError(
            f"model.base: {printable(word)}: {what}; plan with its name, or with the folder of its config.json"
        )
    try:
        found = _of_name(word)
    except UserError as error:
        raise type(error)(f"model.base: {error}") from None
    return replace(found, stored=found.stored or stored_as(word))


def _of_name(word: str) -> ModelSpec:
    try:
        return find_model(word)
    except RefusedModel:
        raise
    except UserError as error:
        if not is_hub_name(word):
            raise UserError(f"{error}; or give a folder with the model's config.json") from None
    return spec_of_file(hub_config(word))
