"""Which run a mirror holds, and which process writes to it.

Two small files in the mirror: `identity.json` is the run's identity; `owner.json` has a random token of the process
that trains it. The token is checked before and after each copy. Where it is gone, the drive was unmounted, and what is
there now is the empty folder below it. Where it is another one, the run goes on elsewhere, and this process must stop.
"""

from __future__ import annotations

import json
import secrets
import socket
from pathlib import Path
from tempfile import TemporaryDirectory

from sojourn.errors import RunFailed, UserError
from sojourn.run.folder import RunFolder
from sojourn.run.identity import FILE, Identity, parse_identity, read_identity
from sojourn.run.lock import OwnershipLost
from sojourn.storage.files import read_json, write_json
from sojourn.storage.mirror import Mirror, MirrorDamaged, MirrorFailed

_OWNER = "owner.json"
_RECORD = "mirror.json"  # in the run folder: the mirrors that this run has written to


def mirror_identity(mirror: Mirror) -> Identity | None:
    """None where the mirror is empty, or was written by a version that knew no identities, or the file is damaged."""
    try:
        data = mirror.read(FILE)
        return None if data is None else parse_identity(json.loads(data))
    except (MirrorDamaged, ValueError):
        return None


def refuse_foreign_mirror(mirror: Mirror, run: RunFolder, found: Identity | None) -> None:
    """`found`: the mirror's identity. Also refuses a mirror that has disappeared: its drive is not mounted."""
    ours = read_identity(run.identity)
    if ours is not None and found is not None and ours.run_id != found.run_id:
        raise UserError(
            f"save.mirror: {mirror.location} holds another run of this name (started {found.created}); give this run "
            "another name: name=NEW, or another mirror: save.mirror=FOLDER"
        )
    if found is None and mirror.location in _recorded(run) and not mirror.names("checkpoints"):
        raise UserError(
            f"save.mirror: {mirror.location} was the mirror of this run and is empty now; mount the drive, or set "
            "save.mirror to another folder"
        )


def _recorded(run: RunFolder) -> list[str]:
    found = read_json(run.path / _RECORD)
    return [text for text in found if isinstance(text, str)] if isinstance(found, list) else []


class MirrorClaim:
    """Made once a process that trains the run; `take` before the first copy, `check` around each."""

    def __init__(self, mirror: Mirror, run: RunFolder) -> None:
        self._mirror, self._run = mirror, run
        self._token = secrets.token_hex(8)
        self._taken = False

    def take(self) -> None:
        """Makes this process the mirror's owner; whoever was it before stops at its next copy."""
        if self._taken:
            return
        self._refuse_another_run()
        with TemporaryDirectory() as temporary:
            owner = Path(temporary, _OWNER)
            write_json(owner, {"token": self._token, "host": socket.gethostname()})
            self._mirror.put_file(self._run.identity, FILE)
            self._mirror.put_file(owner, _OWNER)
        self._taken = True

    def record(self) -> None:
        """After a copy: from now on, a mirror that is empty there is one that is not mounted."""
        if self._mirror.location not in _recorded(self._run):
            write_json(self._run.path / _RECORD, [*_recorded(self._run), self._mirror.location])

    def _refuse_another_run(self) -> None:
        """A drive that was away at the start may come back with something else."""
        try:
            refuse_foreign_mirror(self._mirror, self._run, mirror_identity(self._mirror))
        except RunFailed:
            raise
        except UserError as error:
            raise MirrorFailed(str(error)) from None

    def check(self) -> None:
        try:
            data = self._mirror.read(_OWNER)
            found = None if data is None else json.loads(data)
        except (MirrorDamaged, ValueError):
            found = {"token": self._token}  # damaged: only this process writes there, as far as anybody knows
        if found is None:
            raise MirrorFailed(f"{self._mirror.location}: what was there is gone; check that the drive is mounted")
        if not isinstance(found, dict) or found.get("token") != self._token:
            host = found.get("host") if isinstance(found, dict) else None
            raise OwnershipLost(
                f"{self._mirror.location}: the run has been taken over{f' on {host}' if host else ''}; this process "
                "stops and mirrors nothing more"
            )
