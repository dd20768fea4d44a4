"""Prepared data: the artefacts of SOJOURN_HOME, their reports, and examples with the mask that training uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sojourn.errors import UserError
from sojourn.storage.files import read_json_object

_MOST_EXAMPLES = 50
_MOST_SCANNED = 20_000  # rows that a search reads at most
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
    """Rows as text, in parts that are trained on and parts that are not. `search`: only rows with this text."""
    try:
        from tokenizers import Tokenizer

        from sojourn.data.artefact import Artefact
    except ImportError as error:
        raise UserError(f"looking at rows needs {error.name}; type: pip install 'sojourn[train]'") from None
    artefact = Artefact(path)
    rows = artefact.train if split == "train" else artefact.eval
    tokenizer = Tokenizer.from_file(str(artefact.tokenizer / "tokenizer.json"))
    found: list[dict[str, Any]] = []
    row, count = max(0, first), min(count, _MOST_EXAMPLES)
    end = min(len(rows), row + _MOST_SCANNED)
    while row < end and len(found) < count:
        ids, mask, starts = rows.row(row)
        if not search or search.casefold() in tokenizer.decode(ids.tolist(), skip_special_tokens=False).casefold():
            shown = _parts(tokenizer, ids[:_MOST_TOKENS].tolist(), mask[:_MOST_TOKENS].tolist())
            found.append({"row": row, "tokens": len(ids), "documents": len(starts), "text_parts": shown})
        row += 1
    return {"examples": found, "next": row if row < len(rows) else None, "total": len(rows), "scanned": row - first}


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
