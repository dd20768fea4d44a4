"""Which files of a folder do not travel: the rules of .gitignore, also read from .sojournignore."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FILES = (".gitignore", ".sojournignore")


@dataclass(frozen=True)
class Rule:
    """`folder`: where the rule's file is, relative to the root; "" for the root."""

    pattern: re.Pattern[str]
    negated: bool
    only_folders: bool
    folder: str

    def matches(self, rel: str, is_folder: bool) -> bool:
        if self.only_folders and not is_folder:
            return False
        if self.folder:
            if not rel.startswith(self.folder + "/"):
                return False
            rel = rel[len(self.folder) + 1 :]
        return self.pattern.fullmatch(rel) is not None


class Ignore:
    """Rules of a tree. Ask for a folder before its content: what is in an ignored folder cannot be included again."""

    def __init__(self, lines: Iterable[str] = (), root: Path | None = None) -> None:
        """`root`: read the files of rules in it and in its folders too."""
        self._rules = [rule for line in lines if (rule := parse_rule(line))]
        self._root = root
        if root is not None:
            self._read("")

    def _read(self, folder: str) -> None:
        if self._root is None:
            return
        for name in FILES:
            try:
                text = (self._root / folder / name).read_text(encoding="utf-8-sig", errors="surrogateescape")
            except OSError:
                continue
            self._rules += [rule for line in text.splitlines() if (rule := parse_rule(line, folder))]

    def keeps(self, rel: str, is_folder: bool) -> bool:
        if self._root is not None and is_folder and rel.rpartition("/")[2] == ".git":
            return False
        kept = True
        for rule in reversed(self._rules):
            if rule.matches(rel, is_folder):
                kept = rule.negated
                break
        if kept and is_folder:
            self._read(rel)
        return kept


def parse_rule(line: str, folder: str = "") -> Rule | None:
    """None for an empty line or a comment."""
    text = re.sub(r"(?<!\\)((?:\\\\)*) +$", r"\1", line.rstrip("\r\n"))
    if not text or text.startswith("#"):
        return None
    negated = text.startswith("!")
    text = text[negated:]
    only_folders = text.endswith("/")
    text = text.rstrip("/") if only_folders else text
    if not text:
        return None
    anchored = "/" in text
    regex = _translate(text.lstrip("/"))
    return Rule(re.compile(regex if anchored else f"(?:.*/)?{regex}", re.DOTALL), negated, only_folders, folder)


def _translate(text: str) -> str:
    result, at = "", 0
    while at < len(text):
        rest = text[at:]
        start = at == 0 or text[at - 1] == "/"
        if start and rest.startswith("**/"):
            result, at = result + "(?:.*/)?", at + 3
        elif start and rest == "**":
            result, at = result + ".+", at + 2
        elif rest[0] == "*":
            result, at = result + "[^/]*", at + len(rest) - len(rest.lstrip("*"))
        elif rest[0] == "?":
            result, at = result + "[^/]", at + 1
        elif rest[0] == "[" and (found := re.match(r"\[([!^]?)(\]?(?:\\.|[^\]\\])*)\]", rest, re.DOTALL)):
            result, at = result + _character_class(found[1], found[2]), at + found.end()
        elif rest[0] == "\\" and len(rest) > 1:
            result, at = result + re.escape(rest[1]), at + 2
        else:
            result, at = result + re.escape(rest[0]), at + 1
    return result


def _character_class(negation: str, content: str) -> str:
    escaped = re.sub(r"\\(.)|([\[\]^&~|])", lambda found: "\\" + (found[1] or found[2]), content, flags=re.DOTALL)
    return f"(?!/)[{'^' if negation else ''}{escaped}]"
