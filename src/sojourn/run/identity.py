"""Which run a file belongs to. Every run gets a random id at birth, in `identity.json`, with a hash of the settings
that decide its numbers. Checkpoints, `final/`, the ledger and the mirror carry both; a copy that carries another id is
another run's, whatever it is called."""

from __future__ import annotations

import re
import secrets
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sojourn.storage.files import read_json, write_json

FILE = "identity.json"
MODEL_MARK = "sojourn.json"  # in final/ and best/: which run, and which of its steps, the model is of


@dataclass(frozen=True)
class Identity:
    """`settings`: the hash. `created`: date and host, for messages."""

    run_id: str
    settings: str
    created: str = ""

    @property
    def mark(self) -> dict[str, str]:
        """What each copy carries."""
        return {"run_id": self.run_id, "settings": self.settings}


def new_identity(settings: str) -> Identity:
    return Identity(secrets.token_hex(8), settings, f"{time.strftime('%Y-%m-%d %H:%M')} on {socket.gethostname()}")


def read_identity(path: Path) -> Identity | None:
    """None where there is none, or an invalid one: versions before this file had none."""
    return parse_identity(read_json(path))


def parse_identity(found: Any) -> Identity | None:
    if not isinstance(found, dict):
        return None
    run_id, settings, created = (found.get(key, "") for key in ("run_id", "settings", "created"))
    if not isinstance(run_id, str) or not re.fullmatch(r"[0-9a-f]{16}", run_id) or not isinstance(settings, str):
        return None
    return Identity(run_id, settings, str(created)[:80])


def write_identity(path: Path, identity: Identity) -> None:
    write_json(path, asdict(identity))


def is_foreign(mark: Any, identity: Identity | None) -> bool:
    """Whether a copy with this mark belongs to another run. Copies of older versions have no mark."""
    found = parse_identity(mark)
    return found is not None and identity is not None and found.run_id != identity.run_id
