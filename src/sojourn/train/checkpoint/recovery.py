"""Where a run resumes: the newest good checkpoint of this run, from the run folder or from its mirror.

For each step, newest first, the run folder's copy is taken if it is good, else the mirror's. A damaged copy is set
aside in its place. A copy of another run is refused by name.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from sojourn.config.load import read_config
from sojourn.config.schema import RunConfig
from sojourn.errors import UserError
from sojourn.run.checkpoints import list_checkpoints, step_of
from sojourn.run.folder import RunFolder
from sojourn.run.identity import (
    Identity,
    is_foreign,
    new_identity,
    parse_identity,
    read_identity,
    write_identity,
)
from sojourn.run.mirror_claim import mirror_identity, refuse_foreign_mirror
from sojourn.storage.files import CannotRead, read_json
from sojourn.storage.mirror import Mirror, MirrorDamaged, MirrorFailed
from sojourn.train.checkpoint.checkpoint import remove, set_aside, verify
from sojourn.train.checkpoint.config_changes import harmful_changes, settings_hash
from sojourn.train.checkpoint.mirroring import RUN_FILES

Say = Callable[[str], None]
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # then every other copy would look bad too


def join_mirror(mirror: Mirror, run: RunFolder, say: Say) -> None:
    """Before anything reads the run's files: refuses another run's mirror; on a new machine, fetches those files."""
    try:
        found = mirror_identity(mirror)
        refuse_foreign_mirror(mirror, run, found)
        names = mirror.names("checkpoints")
    except MirrorFailed as error:
        if not list_checkpoints(run.checkpoints):
            raise
        say(f"warning: {error}; resuming from the checkpoints here")
        return
    if names and run.exists() and found is None:
        _refuse_other_settings(mirror, run)
    if (names or found is not None) and not run.exists():
        _fetch_run_files(mirror, run, say)


def _fetch_run_files(mirror: Mirror, run: RunFolder, say: Say) -> None:
    for name in RUN_FILES:
        try:
            if mirror.read(name) is not None:
                mirror.fetch(name, run.path / name)
        except MirrorDamaged as error:
            say(f"warning: {error}; going on without it")


def _refuse_other_settings(mirror: Mirror, run: RunFolder) -> None:
    """For mirrors of versions that knew no identities: compares the settings."""
    try:
        data = mirror.read("run.yaml")
    except MirrorDamaged:
        return
    if data is None:
        return
    with TemporaryDirectory() as temporary:
        file = Path(temporary, "run.yaml")
        file.write_bytes(data)
        differences = harmful_changes(read_config(file), read_config(run.config), run)
    if differences:
        raise UserError(
            f"save.mirror: {mirror.location} holds another run of this name ({differences}); give this run another "
            "name: name=NEW, or another mirror: save.mirror=FOLDER"
        )


def find_newest_anywhere(run: RunFolder, mirror: Mirror | None, say: Say) -> Path | None:
    """The checkpoint to resume from, in the run folder; it is fetched there first where only the mirror has it."""
    here = {step_of(path): path for path in list_checkpoints(run.checkpoints)}
    there = _mirrored_steps(mirror, bool(here), say)
    for step in sorted(here.keys() | there, reverse=True):
        path = run.checkpoints / f"step-{step:08d}"
        if step in here and _is_good(here[step], run, say):
            return here[step]
        if mirror is not None and step in there and _fetch(mirror, run, path, say):
            return path
    return None


def _mirrored_steps(mirror: Mirror | None, has_local: bool, say: Say) -> set[int]:
    if mirror is None:
        return set()
    try:
        return {step_of(Path(name)) for name in mirror.names("checkpoints") if name.startswith("step-")}
    except MirrorFailed as error:
        if not has_local:
            raise
        say(f"warning: {error}; resuming from the checkpoints here")
        return set()


def _is_good(path: Path, run: RunFolder, say: Say) -> bool:
    try:
        damage = verify(path)
    except CannotRead as error:
        if error.errno in _OUT_OF_RESOURCES:
            raise
        say(f"warning: {error}; trying another copy")
        return False
    if damage is None:
        refuse_foreign(path, run)
        return True
    aside = set_aside(path)
    line = f"{path.name} is damaged ({damage})" + (f"; set aside as {aside.name}" if aside is not None else "")
    say(f"warning: {line}; trying another copy")
    run.event("damaged_checkpoint", message=line)
    return False


def refuse_foreign(path: Path, run: RunFolder) -> None:
    if is_foreign(read_json(path / "state.json"), read_identity(run.identity)):
        raise UserError(
            f"{path}: a checkpoint of another run; move it away, or start from it in a new run: name=NEW "
            f"save.resume={path}"
        )


def _fetch(mirror: Mirror, run: RunFolder, path: Path, say: Say) -> bool:
    try:
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        mirror.fetch(f"checkpoints/{path.name}", path)
        damage = verify(path)
        if damage is not None:
            set_aside(path)
            raise MirrorDamaged(damage)
    except MirrorFailed as error:
        say(f"warning: {path.name} in {mirror.location} cannot be used: {error}; trying an older one")
        run.event("damaged_checkpoint", message=f"{mirror.location}: {path.name}: {error}")
        if isinstance(error, MirrorDamaged):
            with contextlib.suppress(MirrorFailed):
                mirror.set_aside(f"checkpoints/{path.name}")
        return False
    if not _is_ours(path, run):
        remove(path)
        raise UserError(
            f"save.mirror: {mirror.location} holds checkpoints of another run; give this run another name: name=NEW, "
            "or another mirror: save.mirror=FOLDER"
        )
    say(f"{path.name} was fetched from {mirror.location}")
    return True


def _is_ours(fetched: Path, run: RunFolder) -> bool:
    """Of a run that has no checkpoint here yet, the mirror's checkpoint with the same settings gives the identity: the
    mirror's own identity.json may be damaged."""
    mark, identity = parse_identity(read_json(fetched / "state.json")), read_identity(run.identity)
    if mark is None or identity is None or mark.run_id == identity.run_id:
        return True
    if list_checkpoints(run.checkpoints) == [fetched] and mark.settings == identity.settings:
        write_identity(run.identity, mark)
        return True
    return False


def establish_identity(config: RunConfig, run: RunFolder, artefact_hash: str, is_known: bool) -> Identity:
    """The run's identity, made at its birth. `is_known`: its run.yaml was read and compared with `config`."""
    settings, identity = settings_hash(config, artefact_hash), read_identity(run.identity)
    if identity is None:
        marks = (parse_identity(read_json(path / "state.json")) for path in reversed(list_checkpoints(run.checkpoints)))
        identity = next((mark for mark in marks if mark is not None and mark.settings == settings), None)
        identity = identity or new_identity(settings)
        write_identity(run.identity, identity)
    elif not is_known and identity.settings != settings:
        raise UserError(
            f"{run.path} was started with other settings or other data, and its run.yaml cannot be read; restore them "
            "to resume it, or give this run another name: name=NEW"
        )
    return identity
