"""Prepared data: the artefacts of SOJOURN_HOME, their reports, and examples with the mask that training uses."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.errors import UserError
from sojourn.storage.files import read_json_object

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from sojourn.data.artefact import Split

_MOST_EXAMPLES = 50
_SEARCH_SECONDS = 1.5  # of one answer
_BLOCK = 64  # rows decoded at a time
_MOST_TOKENS = 4096  # of a row that are shown


def list_artefacts(folder: Path) -> list[dict[str, Any]]:
    """Newest first."""
    found = []
    paths = [path for path in folder.iterdir() if not path.name.startswith(".")] if folder.is_dir() else []
    for path in paths:
        facts, report = read_json_object(path / "artefact.json"), read_json_object(path / "report.json")
        if not facts:
            continue
        train = report.get("train") or {}
        sources = [str(one.get("name")) for one in report.get("sources") or [] if isinstance(one, dict)]
        found.append({
            "hash": path.name, "created": (path / "artefact.json").stat().st_mtime, "kind": facts.get("kind"),
            "documents": train.get("documents"), "tokens": train.get("tokens"), "rows": train.get("rows"),
            "sources": sources, "max_length": facts.get("max_length"), "bytes": _size(path),
        })  # fmt: skip
    return sorted(found, key=lambda one: -one["created"])


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def find_artefact(folder: Path, name: str) -> Path | None:
    path = folder / name
    plain = name.isalnum() and name.isascii() and len(name) <= 64
    return path if plain and (path / "artefact.json").is_file() else None


def report(path: Path) -> dict[str, Any]:
    return {
        "hash": path.name,
        "facts": read_json_object(path / "artefact.json"),
        **read_json_object(path / "report.json"),
    }


def examples(path: Path, split: str, first: int, count: int, search: str) -> dict[str, Any]:
    """Rows as text, in parts that are trained on and parts that are not. `search`: only rows with this text. `next`:
    where to go on; a search of many rows is answered in parts."""
    try:
        from tokenizers import Tokenizer

        from sojourn.data.artefact import Artefact
    except ImportError as error:
        raise UserError(f"looking at rows needs {error.name}; type: pip install 'sojourn[train]'") from None
    artefact = Artefact(path)
    rows = artefact.train if split == "train" else artefact.eval
    tokenizer = Tokenizer.from_file(str(artefact.tokenizer / "tokenizer.json"))
    found: list[dict[str, Any]] = []
    row, count, until = max(0, first), min(count, _MOST_EXAMPLES), time.monotonic() + _SEARCH_SECONDS
    while row < len(rows) and len(found) < count and time.monotonic() < until:
        block = range(row, min(len(rows), row + (_BLOCK if search else count - len(found))))
        for row in _rows_with(search, rows, tokenizer, block):
            ids, mask, starts = rows.row(row)
            shown = _parts(tokenizer, ids[:_MOST_TOKENS].tolist(), mask[:_MOST_TOKENS].tolist())
            found.append({"row": row, "tokens": len(ids), "documents": len(starts), "text_parts": shown})
            if len(found) == count:
                break
        row = found[-1]["row"] + 1 if len(found) == count else block.stop
    return {"examples": found, "next": row if row < len(rows) else None, "total": len(rows)}


def _rows_with(search: str, rows: Split, tokenizer: Tokenizer, block: range) -> list[int]:
    if not search:
        return list(block)
    texts = tokenizer.decode_batch([rows.row(row)[0].tolist() for row in block], skip_special_tokens=False)
    return [row for row, text in zip(block, texts, strict=True) if search.casefold() in text.casefold()]


def _parts(tokenizer: Any, ids: list[int], mask: list[int]) -> list[dict[str, Any]]:
    """Texts of stretches of tokens with the same mask; characters of several tokens are not torn apart."""
    edges = [i for i in range(1, len(ids)) if bool(mask[i]) != bool(mask[i - 1])]
    parts, before, start = [], "", 0
    for edge in [*edges, len(ids)]:
        if edge == 0:
            continue
        text = tokenizer.decode(ids[:edge], skip_special_tokens=False)
        parts.append({"text": text[len(before) :], "trained": bool(mask[start])})
        before, start = text, edge
    return parts
