"""The sentences in Sojourn's source: string literals that read as English prose, as templates with numbered values.

An f-string's values become {0}, {1}, …, in order: those are the keys of the catalogues in `board/zh/`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import sojourn

SOURCE = Path(sojourn.__file__).parent
_PROSE = re.compile(r"[a-z]{2,}[,;:.]? (?:[a-z]{2,}|\{|[A-Za-z])|\} [a-z]{2,}|[a-z]{3,}: \{")
_HELP = ("help", "rich_help_panel", "metavar", "epilog")  # of commands: a terminal shows them
_SCHEMA = re.compile(r"\w+\(.*\) -> .+")  # of an operation of PyTorch


def sentences(*places: str) -> dict[str, str]:
    """Templates of the files and packages below src/sojourn, each with where it stands first."""
    found: dict[str, str] = {}
    for place in places:
        path = SOURCE / place
        for file in [path] if path.suffix else sorted(path.rglob("*.py")):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            for line, template in sorted(_literals(tree, _docstrings(tree))):
                if _PROSE.search(template) and not _SCHEMA.fullmatch(template):
                    found.setdefault(template, f"{file.relative_to(SOURCE)}:{line}")
    return found


def _docstrings(tree: ast.AST) -> set[int]:
    with_docs = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    firsts = (node.body[0] for node in ast.walk(tree) if isinstance(node, with_docs) and node.body)
    return {id(first.value) for first in firsts if isinstance(first, ast.Expr)}


def _literals(node: ast.AST, skipped: set[int]) -> Iterator[tuple[int, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.keyword) and child.arg in _HELP:
            continue
        if isinstance(child, ast.JoinedStr):
            yield child.lineno, template_of(child)
            for part in child.values:
                if isinstance(part, ast.FormattedValue):
                    yield from _literals(ast.Expr(part.value), skipped)
        elif isinstance(child, ast.Constant):
            if isinstance(child.value, str) and id(child) not in skipped:
                yield child.lineno, child.value
        else:
            yield from _literals(child, skipped)


def template_of(text: ast.JoinedStr) -> str:
    number, parts = 0, []
    for part in text.values:
        if isinstance(part, ast.Constant):
            parts.append(str(part.value))
        else:
            parts.append(f"{{{number}}}")
            number += 1
    return "".join(parts)
