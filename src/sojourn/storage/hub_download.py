"""A model of the Hugging Face hub in the hub's own cache on this machine: its safetensors, settings and tokenizer;
neither its code nor its pickles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sojourn.errors import RunFailed, UserError
from sojourn.storage.hub_access import hub_errors_as_user_errors, not_cached_error, offline_reason

# Of the repository's top folder: others have copies in other formats
MODEL_FILES = (
    "model*.safetensors", "adapter_model.safetensors", "*.json", "*.jinja", "*.txt", "*.md", "LICENSE*", "NOTICE*",
    "*.model",
)  # fmt: skip
IN_FOLDERS = ("*/*",)


def base_model_folder(name: str, revision: str | None) -> Path:
    """Downloaded on first use; a cut download goes on where it was."""
    from huggingface_hub import snapshot_download

    return _from_hub(
        name, revision,
        lambda offline: snapshot_download(
            name, revision=revision, allow_patterns=list(MODEL_FILES), ignore_patterns=list(IN_FOLDERS),
            local_files_only=bool(offline),
        ),
    )  # fmt: skip


def config_file(name: str, revision: str | None) -> Path:
    """config.json alone."""
    from huggingface_hub import hf_hub_download

    return _from_hub(
        name, revision,
        lambda offline: hf_hub_download(name, "config.json", revision=revision, local_files_only=bool(offline)),
    )  # fmt: skip


def _from_hub(name: str, revision: str | None, fetch: Callable[[str], str]) -> Path:
    offline = offline_reason(None)
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        with hub_errors_as_user_errors(name, name, revision):
            return Path(fetch(offline))
    except LocalEntryNotFoundError:
        raise not_cached_error(name, offline) from None
    except EntryNotFoundError:
        raise UserError(f"{name} has no model on the hub (no config.json); check the name") from None
    except RunFailed:
        if offline:
            raise not_cached_error(name, offline) from None
        raise
