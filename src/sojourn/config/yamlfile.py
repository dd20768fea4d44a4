"""Reads a YAML file into plain values and remembers on which line each key stands.

YAML 1.2's plain scalars are used, as people expect them: `1e-4` is a number, `off` and `no` are words, `11:30` and
`2026-01-01` are text. A key given twice is an error, and so are anchors that expand without end.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from sojourn.errors import UserError

KeyPath = tuple[str, ...]
_MOST_BYTES = 1_000_000


class _Loader(yaml.SafeLoader):
    pass


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("int", r"[-+]?[0-9][0-9_]*", "-+0123456789"),
    ("float", r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", "-+.0123456789"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first))


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(str(loader.construct_scalar(node)).replace("_", ""))


def _construct_float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    return float(str(loader.construct_scalar(node)).replace("_", "").replace(".inf", "inf").replace(".nan", "nan"))


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)


def parse_value(text: str, where: str) -> Any:
    """The value of `key=value` on a command line: `1e-4`, `true`, `[a, b]`, or text."""
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506: a SafeLoader
    except (yaml.YAMLError, ValueError):
        return text
    except RecursionError:
        raise UserError(f"{where}: the value is nested too deeply") from None


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """The mapping in `path`, and the line of every key in it."""
    text = _read_text(path)
    try:
        node = yaml.compose(text, Loader=_Loader)
        if node is None:
            return {}, {}
        if not isinstance(node, yaml.MappingNode):
            raise UserError(f"{path}:{node.start_mark.line + 1}: expected `key: value` lines, found {_kind(node)}")
        lines: dict[KeyPath, int] = {}
        _walk(node, (), path, lines, set())
        values = _Loader("").construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise UserError(f"{path}{line}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {str(error).splitlines()[0]}") from None
    except ValueError as error:
        raise UserError(f"{path}: a value cannot be read: {error}") from None
    except RecursionError:
        raise UserError(f"{path}: nested too deeply") from None
    return values, lines


def _read_text(path: Path) -> str:
    try:
        if path.is_dir():
            raise UserError(f"{path} is a folder; give a YAML file")
        if path.stat().st_size > _MOST_BYTES:
            raise UserError(f"{path} is larger than 1 MB; this does not look like a run's YAML file")
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); save the file as UTF-8") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _walk(node: yaml.Node, at: KeyPath, path: Path, lines: dict[KeyPath, int], above: set[int]) -> None:
    if id(node) in above:
        raise UserError(f"{path}:{node.start_mark.line + 1}: an anchor contains itself")
    if len(lines) > 10_000:
        raise UserError(f"{path}: more than 10,000 keys; this does not look like a run's YAML file")
    inside = above | {id(node)}
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            _walk(item, (*at, str(number)), path, lines, inside)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode) or key.tag.endswith((":int", ":float", ":bool", ":null")):
                raise UserError(f"{path}:{line}: a key must be a word, found {_kind(key)}")
            here = (*at, key.value)
            if here in lines:
                raise UserError(f"{path}:{line}: {'.'.join(here)} is given twice (first on line {lines[here]})")
            lines[here] = line
            _walk(value, here, path, lines, inside)


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    return f"“{str(node.value)[:40]}”"
