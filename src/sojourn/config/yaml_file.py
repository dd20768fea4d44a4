"""Reads a YAML file into plain values, with the line number of each key.

Plain scalars follow YAML 1.2: `1e-4` is a number; `off`, `no`, `11:30` and `2026-01-01` are text. Duplicate keys,
tags and anchors that expand without end are errors.
"""

from __future__ import annotations

import copy
import functools
import re
import stat
from pathlib import Path
from typing import Any

import yaml

from sojourn.config.messages import printable
from sojourn.config.renamed import KeyPath
from sojourn.config.validation_errors import describe_value, dotted
from sojourn.errors import UserError

_MOST_BYTES = 200_000
_MOST_NODES = 5_000
_DEEPEST = 10
_MANY_BRACKETS = re.compile(r"(?:[\[{]\s{0,9}){100}")
_TAG = "tag:yaml.org,2002:"
_FLOAT = r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan"


class _Loader(yaml.SafeLoader):
    """Plain scalars of YAML 1.2 only."""


class _Dumper(yaml.SafeDumper):
    """Quotes text that a reader of YAML 1.1 or 1.2 would read as another type."""


class _FastDumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """The same in C: a run's file in 3 ms instead of 12. It escapes signs beyond U+FFFF, such as emoji."""


_Loader.yaml_implicit_resolvers = {}
for _kind, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9][0-9_]*", "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
):
    for _class in (_Loader, _Dumper, _FastDumper):
        _class.add_implicit_resolver(_TAG + _kind, re.compile(rf"^(?:{_pattern})\Z"), list(_first))


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(str(node.value).replace("_", ""))


def _construct_float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    return float(str(node.value).replace("_", "").replace(".inf", "inf").replace(".nan", "nan"))


_Loader.add_constructor(_TAG + "int", _construct_int)
_Loader.add_constructor(_TAG + "float", _construct_float)
_RESOLVER = _Loader("")


def _plain_tag(text: str) -> str:
    """The tag of an unquoted scalar."""
    return str(_RESOLVER.resolve(yaml.ScalarNode, text, (True, False)))  # type: ignore[no-untyped-call]


def parse_value(text: str) -> Any:
    """The value of `key=value` on a command line: `1e-4`, `true`, `[a, b]`, else the text itself."""
    try:
        if text[:1] in ("[", "{", '"', "'"):
            node = yaml.compose(text, Loader=_Loader)
        else:
            node = yaml.ScalarNode(_plain_tag(text), text)
        _Checker("").check(node)
        return _construct(node)
    except (yaml.YAMLError, ValueError, RecursionError, UserError):
        return text


def write_yaml(values: dict[str, Any]) -> str:
    options: dict[str, Any] = {"sort_keys": False, "allow_unicode": True, "width": 100}
    text = str(yaml.dump(values, Dumper=_FastDumper, **options))
    return str(yaml.dump(values, Dumper=_Dumper, **options)) if "\\U" in text else text


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """The mapping in `path`, and the line of every key in it."""
    values, lines = _parse(printable(path, 200), _read_text(path))
    return copy.deepcopy(values), dict(lines)


@functools.lru_cache(maxsize=64)  # one command reads presets and run.yaml several times, 10 ms each
def _parse(name: str, text: str) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """`name`: of the file, for errors."""
    try:
        if _MANY_BRACKETS.search(text):
            raise RecursionError  # which the parser would take seconds to find
        node = yaml.compose(text, Loader=_Loader)
        if node is None:
            return {}, {}
        if not isinstance(node, yaml.MappingNode):
            raise UserError(
                f"{name}:{_line(node)}: expected `key: value` lines, found {_describe_node(node)}{_colon(text)}"
            )
        checker = _Checker(name)
        checker.check(node)
        return _construct(node), checker.lines
    except yaml.MarkedYAMLError as error:
        mark = error.context_mark if "quoted scalar" in (error.context or "") else error.problem_mark
        line = mark.line + 1 if mark else 1
        raise UserError(
            f"{name}:{line}: not valid YAML: {_describe_yaml_error(error, text.splitlines(), line)}"
        ) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        hint = "; is it UTF-16? save the file as UTF-8" if error.character in (0, "\0") else "; remove it"
        raise UserError(f"{name}:{line}: not valid YAML: an invisible control character{hint}") from None
    except RecursionError:
        raise UserError(f"{name}: nested too deeply; a run's file has sections, keys and lists") from None


def _construct(node: yaml.Node) -> Any:
    return _Loader("").construct_document(node)


def _read_text(path: Path) -> str:
    name = printable(path, 200)
    try:
        if path.is_dir():
            raise UserError(f"{name}: a folder; give a YAML file")
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # opening a fifo or a device may never end
            raise UserError(f"{name}: not a regular file; give a YAML file")
        if found.st_size > _MOST_BYTES:
            raise UserError(f"{name}: larger than 200 kB; this does not look like a run's YAML file")
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{name}: no such file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 text (byte {error.start}); save the file as UTF-8") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{name}: cannot be read: {printable(getattr(error, 'strerror', None) or error)}") from None


def _describe_yaml_error(error: yaml.MarkedYAMLError, lines: list[str], line: int) -> str:
    """The parser's error without YAML jargon."""
    problem, context = error.problem or "", error.context or ""
    here = "\n".join(lines[max(0, line - 2) : line])
    if re.search(r"^ *\t", here, re.MULTILINE) or "'\\t'" in problem:
        return "a tab; indent with spaces"
    if "：" in here:
        return "a full-width colon “：”; write “: ” after a key"
    if "another document" in problem:
        return "a second document begins here (---); keep one in a file"
    if "undefined alias" in problem:
        return f"{problem.removeprefix('found ')}; put the text in quotes if it should start with *"
    if "mapping values are not allowed" in problem or "expected ':'" in problem:
        return "a line here is not `key: value`; check the indentation, the space after “:”, and quote values with “: ”"
    if "quoted scalar" in context and "end of stream" in problem:
        return "a quote opened here is never closed"
    if "cannot start any token" in problem:
        return f"a value cannot start with {problem.split()[2]}; put it in quotes"
    if "flow" in context:
        return "a list or mapping in brackets is not closed, or lacks a comma"
    if "escape" in problem:
        return "in double quotes a backslash begins an escape; use single quotes"
    if "<block end>" in problem:
        return "this line is not indented like the lines above it"
    return printable(problem or context, 120)


def _colon(text: str) -> str:
    return " (the colon is full-width; write “: ”)" if "：" in text else ""


class _Checker:
    """Checks a parsed document before it becomes values, and records the line of every key."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: dict[KeyPath, int] = {}
        self.nodes = 0

    def check(self, node: yaml.Node, at: KeyPath = (), above: tuple[int, ...] = ()) -> None:
        self.nodes += 1
        if id(node) in above:
            raise self._error(node, at, "an anchor that contains itself; write the values out")
        if len(above) > _DEEPEST:
            raise self._error(node, at[:3], "nested too deeply; a run's file has sections, keys and lists")
        if self.nodes > _MOST_NODES:
            raise UserError(f"{self.name}: more than {_MOST_NODES:,} values; this does not look like a run's YAML file")
        if isinstance(node, yaml.ScalarNode):
            self._check_scalar(node, at)
        elif node.tag not in (_TAG + "map", _TAG + "seq"):
            raise self._error(node, at, f"the tag {_tag(node)} is not allowed; write plain values")
        inside = (*above, id(node))
        if isinstance(node, yaml.SequenceNode):
            for number, item in enumerate(node.value):
                self.check(item, (*at, str(number)), inside)
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode) or key.tag != _TAG + "str":
                    raise self._error(key, at, f"a key must be a word, found {_describe_node(key)}")
                self._check_scalar(key, at)
                here = (*at, key.value)
                if here in self.lines:
                    raise self._error(key, here, f"given twice (first on line {self.lines[here]}); keep one")
                self.lines[here] = _line(key)
                self.check(value, here, inside)

    def _check_scalar(self, node: yaml.ScalarNode, at: KeyPath) -> None:
        if node.tag not in (_TAG + "str", _plain_tag(node.value)):
            raise self._error(node, at, f"the tag {_tag(node)} is not allowed; write a plain value")
        if node.tag == _TAG + "int" and len(node.value) > 1000:
            raise self._error(node, at, f"a number of {len(node.value)} digits given; that is too large for any key")
        if re.search("[\ud800-\udfff]", node.value):
            raise self._error(node, at, "half a character (a lone surrogate); write the character itself")

    def _error(self, node: yaml.Node, at: KeyPath, message: str) -> UserError:
        return UserError(f"{self.name}:{_line(node)}: {dotted(at)}{': ' if at else ''}{message}")


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1 if node.start_mark else 1


def _tag(node: yaml.Node) -> str:
    return printable(node.tag.replace(_TAG, "!!"))


def _describe_node(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return describe_value(str(node.value))
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
