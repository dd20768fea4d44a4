"""Reads a model's weight files into the page cache while Python imports torch. On a cold disk each takes about 10 s."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from sojourn.expand_user import expand_user
from sojourn.machine.hardware import memory

_PIECE = 2**23
_SHARE = 0.5  # of the free memory, so that the files stay in the page cache until they are opened


def read_ahead(model: str) -> threading.Thread | None:
    """`model`: a folder, or a name on the hub that was fetched before. None without files or without enough memory."""
    files = weight_files(model)
    if not files or sum(file.stat().st_size for file in files) > _SHARE * memory().available:
        return None
    thread = threading.Thread(target=_read, args=(files,), name="read-ahead", daemon=True)
    thread.start()
    return thread


def weight_files(model: str) -> list[Path]:
    folder = expand_user(model)
    if not folder.is_dir() and model.count("/") == 1:
        home = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface") / "hub"
        kept = expand_user(home) / f"models--{model.replace('/', '--')}" / "snapshots"
        folder = max(kept.glob("*"), key=lambda path: path.stat().st_mtime, default=folder)
    return sorted(file for file in folder.glob("*.safetensors") if file.is_file())


def _read(files: list[Path]) -> None:
    """Fills the page cache. Errors are left to whoever opens the files."""
    buffer = bytearray(_PIECE)
    try:
        for file in files:
            with file.open("rb", buffering=0) as source:
                while source.readinto(buffer):
                    pass
    except OSError:
        return
