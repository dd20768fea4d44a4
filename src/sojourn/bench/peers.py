"""Finds the scripts of other programs to compare with: `benchmarks/peers`, which only the repository has."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from sojourn.errors import UserError


def load_peers() -> ModuleType | None:
    """The package `benchmarks.peers`; None where Sojourn runs without its repository."""
    root = Path(__file__).parents[3]
    if not (root / "benchmarks" / "peers" / "__init__.py").is_file():
        return None
    if str(root) not in sys.path:
        sys.path.append(str(root))
    return importlib.import_module("benchmarks.peers")


def require_peers() -> ModuleType:
    peers = load_peers()
    if peers is None:
        raise UserError(
            "--peers: the scripts of other programs are in the repository, not in the installed package; "
            "install from a clone with pip install -e ., or leave out --peers"
        )
    return peers
