"""JSON that came with a model from elsewhere: read within limits, and refused where two programs could read it
differently."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from sojourn.storage.files import NotValid, read_bytes

MOST_BYTES = 8 << 20
_MOST_DIGITS = 100  # model_max_length has 31
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def parse_foreign_json(data: bytes) -> Any:
    """Raises `NotValid` for anything but one JSON value in UTF-8 without duplicate keys and NaN."""
    if data.startswith(_BYTE_ORDER_MARK):
        raise NotValid("begins with a byte order mark; save it as UTF-8 without one")
    try:
        return json.loads(
            data.decode("utf-8"), object_pairs_hook=_mapping, parse_constant=_constant, parse_int=_integer
        )
    except UnicodeDecodeError:
        raise NotValid("not UTF-8") from None
    except NotValid:
        raise
    except RecursionError:
        raise NotValid("not valid JSON: it is nested too deeply") from None
    except ValueError as error:
        raise NotValid(f"not valid JSON ({str(error)[:80]})") from None


def load_foreign_json(path: Path, most: int = MOST_BYTES) -> Any:
    """Raises `NotValid`, `FileNotFoundError` or `CannotRead`."""
    return parse_foreign_json(read_bytes(path, most))


def check_link(path: Path) -> None:
    """A link must not lead out of the model's folder: it could name any file of this machine. The hub's own cache,
    whose files are links to its blobs, is the exception."""
    if not path.is_symlink():
        return
    folder, target = path.parent.resolve(), Path(os.path.realpath(path))
    inside = [folder, *([folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else [])]
    if not any(target.is_relative_to(place) for place in inside):
        raise NotValid("a link to a file outside of the model's folder; copy that file here instead")


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise NotValid(f"it has the key {twice[:40]!r} twice")
    return found


def _constant(text: str) -> float:
    if text == "NaN":
        raise NotValid("it has a NaN in it")
    return float(text)  # Infinity, which configurations of Mamba models have


def _integer(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise NotValid(f"a number of {len(text):,} digits")
    return int(text)
