"""The prepared artefact of a configuration: found, or made in a stage folder and renamed into place when complete."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from sojourn.config.data import DataConfig
from sojourn.config.schema import RunConfig
from sojourn.data.artefact import Artefact
from sojourn.data.inputs import open_inputs
from sojourn.data.preview import make_preview
from sojourn.data.sample import hold_out, take_sample
from sojourn.data.settings import data_settings
from sojourn.data.write import Say, Show, write_artefact
from sojourn.errors import RunFailed
from sojourn.storage.disk import sync_file, sync_folder
from sojourn.storage.file_digests import FileDigests
from sojourn.storage.stage import live_stages


def prepare_run(
    config: RunConfig,
    folder: Path,
    say: Say = lambda line: None,
    show: Show = lambda formats, examples: None,
) -> Artefact:
    """The artefact of a run's data under `folder`; see `prepare`."""
    return prepare(data_settings(config), folder, say, show, config.advanced.split_digits)


def prepare(
    data: DataConfig,
    folder: Path,
    say: Say = lambda line: None,
    show: Show = lambda formats, examples: None,
    split_digits: bool = True,
) -> Artefact:
    """The artefact of `data` under `folder`. `show` gets each source's format, then, before all is read, examples."""
    inputs = open_inputs(data, say, split_digits)
    digests = FileDigests(folder / ".digests.json")
    target = folder / inputs.artefact_hash(digests)
    if (target / "artefact.json").is_file():
        say(f"already prepared: {target}")
        digests.save()
        artefact = Artefact(target)
        if "unused_columns" not in artefact.report and not inputs.is_builtin:
            say("note: prepared by an earlier version, which ignored label, train and media columns; "
                f"to prepare it anew, remove {target}")  # fmt: skip
        return artefact
    inputs = hold_out(take_sample(inputs, say), say)
    preview = make_preview(inputs)
    show(preview.formats, [])
    stage = folder / f".stage-{os.getpid()}-{target.name}"
    try:
        stage.mkdir(parents=True)
        live_stages(folder)  # removes abandoned ones
        write_artefact(inputs, preview, stage, say, show)
        digests.check_unchanged()
        _sync_all(stage)
        try:
            stage.rename(target)
        except OSError:
            if not (target / "artefact.json").is_file():  # another process was first; its result is the same
                raise
        sync_folder(folder)
        digests.save()
    except OSError as error:
        raise RunFailed(f"preparing failed in {folder}: {error.strerror or error}; nothing was written") from None
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.rmdir()  # if it is empty
    return Artefact(target)


def _sync_all(stage: Path) -> None:
    for path in sorted(stage.rglob("*")):
        sync_folder(path) if path.is_dir() else sync_file(path)
