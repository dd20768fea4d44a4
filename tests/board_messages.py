"""The sentences in Sojourn's source: string literals that read as English prose, as templates with numbered values.

An f-string's values become {0}, {1}, …, in order: those are the keys of the catalogues in `board/zh/`.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import sojourn

SOURCE = Path(sojourn.__file__).parent
_PROSE = re.compile(r"[a-z]{2,}[,;:.]? (?:[a-z]{2,}|\{|[A-Za-z])|\} [a-z]{2,}|[a-z]{3,}: \{")
_HELP = ("help", "rich_help_panel", "metavar", "epilog")  # of commands: a terminal shows them
_SCHEMA = re.compile(r"\w+\(.*\) -> .+")  # of an operation of PyTorch
_PERCENT = re.compile(r"%[-+0 #]*\d*(?:\.\d+)?[a-z]|%%")  # on boxes, whose Python may be old
_MODULE = re.compile(r"sojourn(?:\.\w+)+\.?")  # in a string: imported by name


def reached(*places: str) -> list[str]:
    """The files below src/sojourn that these files and packages import, at any depth, and they themselves. Only the
    command line's main.py is not followed: it imports every command."""
    found: set[Path] = set()
    waiting = [file for place in places for file in _files(place)]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            waiting += [] if file == SOURCE / "cli" / "main.py" else _imports_and_sentences(file)[0]
    return sorted(str(file.relative_to(SOURCE)) for file in found)


def _files(place: str) -> list[Path]:
    path = SOURCE / place
    return [path] if path.suffix else sorted(path.rglob("*.py"))


def _imports(node: ast.AST) -> Iterator[Path]:
    for child in ast.walk(node):
        if isinstance(child, ast.ImportFrom):
            yield from _modules(child.module or "", *(f"{child.module}.{one.name}" for one in child.names))
        elif isinstance(child, ast.Import):
            yield from _modules(*(one.name for one in child.names))
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            for name in _MODULE.findall(child.value):
                yield from _files(name[8:-1].replace(".", "/")) if name[-1] == "." else _modules(name)


def _modules(*names: str) -> Iterator[Path]:
    for name in names:
        place = SOURCE.parent / name.replace(".", "/")
        if name.startswith("sojourn."):
            yield from (file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file())


def sentences(*places: str) -> dict[str, str]:
    """Templates of the files and packages below src/sojourn, each with where it stands first."""
    found: dict[str, str] = {}
    for place in places:
        for file in _files(place):
            for line, template in _imports_and_sentences(file)[1]:
                found.setdefault(template, f"{file.relative_to(SOURCE)}:{line}")
    return found


@cache
def _imports_and_sentences(file: Path) -> tuple[list[Path], list[tuple[int, str]]]:
    """Both at once: to parse a file takes longer than either."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    literals = sorted(_literals(tree, _docstrings(tree)))
    return list(_imports(tree)), [
        (line, template) for line, template in literals if _PROSE.search(template) and not _SCHEMA.fullmatch(template)
    ]


def _docstrings(tree: ast.AST) -> set[int]:
    with_docs = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    firsts = (node.body[0] for node in ast.walk(tree) if isinstance(node, with_docs) and node.body)
    return {id(first.value) for first in firsts if isinstance(first, ast.Expr)}


def _literals(node: ast.AST, skipped: set[int]) -> Iterator[tuple[int, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.keyword) and child.arg in _HELP:
            continue
        if isinstance(child, ast.BinOp) and isinstance(child.op, ast.Mod) and isinstance(child.left, ast.Constant):
            if isinstance(child.left.value, str):
                yield child.lineno, _percent_template(child.left.value)
            yield from _literals(ast.Expr(child.right), skipped)
        elif isinstance(child, ast.JoinedStr):
            yield child.lineno, template_of(child)
            for part in child.values:
                if isinstance(part, ast.FormattedValue):
                    yield from _literals(ast.Expr(part.value), skipped)
        elif isinstance(child, ast.Constant):
            if isinstance(child.value, str) and id(child) not in skipped:
                yield child.lineno, child.value
        else:
            yield from _literals(child, skipped)


def _percent_template(text: str) -> str:
    numbers = itertools.count()
    return _PERCENT.sub(lambda found: "%" if found[0] == "%%" else f"{{{next(numbers)}}}", text)


def template_of(text: ast.JoinedStr) -> str:
    number, parts = 0, []
    for part in text.values:
        if isinstance(part, ast.Constant):
            parts.append(str(part.value))
        else:
            parts.append(f"{{{number}}}")
            number += 1
    return "".join(parts)
