"""The prepared artefact of a configuration: found, or made in a stage folder and renamed into place when complete."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sojourn.config.data import DataConfig
from sojourn.config.schema import RunConfig
from sojourn.data.artefact import Artefact
from sojourn.data.inputs import data_settings, open_inputs
from sojourn.data.preview import make_preview
from sojourn.data.write import write_artefact
from sojourn.errors import RunFailed
from sojourn.storage.disk import sync_file, sync_folder
from sojourn.storage.file_digests import FileDigests
from sojourn.storage.stage import live_stages

Show = Callable[[list[tuple[str, str]], list[dict[str, Any]]], None]


def prepare_run(
    config: RunConfig,
    folder: Path,
    say: Callable[[str], None] = lambda line: None,
    show: Show = lambda formats, examples: None,
) -> Artefact:
    """The artefact of a run's data under `folder`; see `prepare`."""
    return prepare(data_settings(config), folder, say, show, config.advanced.split_digits)


def prepare(
    data: DataConfig,
    folder: Path,
    say: Callable[[str], None] = lambda line: None,
    show: Show = lambda formats, examples: None,
    split_digits: bool = True,
) -> Artefact:
    """The artefact of `data` under `folder`. Before it is made, `show` gets each source's format and the examples."""
    inputs = open_inputs(data, say, split_digits)
    digests = FileDigests(folder / ".digests.json")
    target = folder / inputs.artefact_hash(digests)
    if (target / "artefact.json").is_file():
        say(f"already prepared: {target}")
        digests.save()
        return Artefact(target)
    preview = make_preview(inputs)
    show(preview.formats, [asdict(example.shortened()) for example in preview.examples])
    stage = folder / f".stage-{os.getpid()}-{target.name}"
    try:
        stage.mkdir(parents=True)
        live_stages(folder)  # removes abandoned ones
        write_artefact(inputs, preview, stage, say)
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
