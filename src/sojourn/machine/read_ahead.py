"""Reads a model's files before anybody asks for them, while Python is still importing what will: on a rented machine
both take their ten seconds from the same cold disk, and one after the other they take twenty."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from sojourn.machine.hardware import memory

_PIECE = 2**23
_SHARE = 0.5  # of the free memory: what is read must stay there until it is wanted


def read_ahead(model: str) -> threading.Thread | None:
    """`model`: a folder, or a name on the hub that was fetched before. None where nothing is to be read, or no room."""
    files = weight_files(model)
    if not files or sum(file.stat().st_size for file in files) > _SHARE * memory().available:
        return None
    thread = threading.Thread(target=_read, args=(files,), name="read-ahead", daemon=True)
    thread.start()
    return thread


def weight_files(model: str) -> list[Path]:
    folder = Path(model).expanduser()
    if not folder.is_dir() and model.count("/") == 1:
        home = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface") / "hub"
        kept = Path(home).expanduser() / f"models--{model.replace('/', '--')}" / "snapshots"
        folder = max(kept.glob("*"), key=lambda path: path.stat().st_mtime, default=folder)
    return sorted(file for file in folder.glob("*.safetensors") if file.is_file())


def _read(files: list[Path]) -> None:
    """Into the system's own cache; whoever opens the files finds them there. Any trouble is theirs to tell."""
    buffer = bytearray(_PIECE)
    try:
        for file in files:
            with file.open("rb", buffering=0) as source:
                while source.readinto(buffer):
                    pass
    except OSError:
        return
