"""Compiles a chat template as transformers does, within limits: a template comes with a model, and nobody has read it.

No operator, call, filter or format may make more than `MOST_CHARACTERS`, and one rendering takes at most `MOST_SECONDS`
of CPU time and `MOST_MEMORY` (on Linux). Two more changes: generation blocks write markers around their text where they
are asked for, and `strftime_now` is a fixed date, so that the same data always gives the same tokens.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterable
from functools import lru_cache, reduce, wraps
from typing import Any

from jinja2 import TemplateError, nodes, pass_environment
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_sum
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from sojourn.errors import UserError
from sojourn.machine.compute_limit import LimitReached, call_limited

# Unicode noncharacters as markers in a rendering: formats.py rejects documents that have them.
SPAN_START, SPAN_END = "\ufdd0", "\ufdd1"
MOST_CHARACTERS = 1 << 24
MOST_SECONDS = 10.0
MOST_MEMORY = 1 << 30
_LONG_NUMBER = re.compile(r"\d{6}")  # a width or precision in a format
_SIZED = (str, bytes, list, tuple, dict)


class _Generation(Extension):
    tags = {"generation"}  # noqa: RUF012  (Jinja's own attribute)
    marks = (SPAN_START, SPAN_END)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_with_markers"), [], [], body).set_lineno(line)

    def _with_markers(self, caller: Callable[[], str]) -> str:
        return caller().join(self.marks)


class _Unmarked(_Generation):
    marks = ("", "")


class _ConcatAsAdd(NodeTransformer):
    """`a ~ b` as `a|string + b|string`, which can be intercepted."""

    def visit_Concat(self, node: Any) -> Any:  # noqa: N802  (Jinja's own name)
        texts: list[Any] = [nodes.Filter(self.visit(one), "string", [], [], None, None) for one in node.nodes]
        return reduce(nodes.Add, texts).set_lineno(node.lineno).set_environment(node.environment)


def _joined(parts: Iterable[str]) -> str:
    """Of a template's output, or of a block's."""
    texts, length = [], 0
    for part in parts:
        texts.append(part)
        length += len(part)
        if length > MOST_CHARACTERS:
            raise TemplateError(f"it writes more than {MOST_CHARACTERS:,} characters")
    return "".join(texts)


class _Limited(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "+", "%"})
    concat = staticmethod(_joined)

    def _parse(self, *given: Any) -> Any:
        return _ConcatAsAdd().visit(super()._parse(*given))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = [_size(left), _size(right)]
        too_large = {
            "*": sizes[0] * sizes[1] > MOST_CHARACTERS,
            "**": max(sizes) > 1000,
            "+": isinstance(left, _SIZED) and sum(sizes) > MOST_CHARACTERS,
            "%": isinstance(left, str) and _LONG_NUMBER.search(left) is not None,
        }
        if too_large[operator]:
            raise TemplateError(f"its {operator} would make more than {MOST_CHARACTERS:,} characters")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_large_numbers(args, kwargs)
        return super().call(context, function, *args, **kwargs)

    def wrap_str_format(self, function: Any) -> Any:
        """`'{:>10000000000}'.format(…)`"""
        text = getattr(function, "__self__", None)
        if isinstance(text, str) and _LONG_NUMBER.search(text):
            raise TemplateError(f"it formats to more than {MOST_CHARACTERS:,} characters")
        return super().wrap_str_format(function)


@lru_cache(maxsize=16)
def compile_template(source: str, markers: bool = True) -> Callable[..., str]:
    """`markers`: around generation blocks."""
    blocks = _Generation if markers else _Unmarked
    environment = _Limited(trim_blocks=True, lstrip_blocks=True, extensions=[blocks, loopcontrols])
    for name in ("center", "indent", "wordwrap", "format", "round"):
        environment.filters[name] = _with_limit(environment.filters[name])
    environment.filters["tojson"] = _to_json
    environment.filters["sum"] = _sum
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = datetime.date(2024, 7, 26).strftime
    try:
        return _limited(call_limited(MOST_SECONDS, MOST_MEMORY, environment.from_string, source).render)
    except (TemplateError, LimitReached, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise UserError(f"data.template: not a valid Jinja template: {reason}") from None


def _size(value: Any) -> int:
    return len(value) if isinstance(value, _SIZED) else int(abs(value)) if isinstance(value, (int, float)) else 0


def _refuse_large_numbers(args: Any, kwargs: Any) -> None:
    if any(type(one) is int and abs(one) > MOST_CHARACTERS for one in (*args, *kwargs.values())):
        raise TemplateError(f"it calls a function with a number over {MOST_CHARACTERS:,}")


def _with_limit(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _refuse_large_numbers(args, kwargs)
        return function(*args, **kwargs)

    return checked


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@pass_environment
def _sum(environment: Any, values: Any, attribute: Any = None, start: Any = 0) -> Any:
    if not isinstance(start, (int, float)):
        raise TemplateError("it adds up what is no number")
    return do_sum(environment, values, attribute, start)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _limited(render: Callable[..., str]) -> Callable[..., str]:
    """Loops in loops may take years."""

    @wraps(render)
    def limited(*args: Any, **kwargs: Any) -> str:
        try:
            return call_limited(MOST_SECONDS, MOST_MEMORY, render, *args, **kwargs)
        except LimitReached as error:
            raise UserError(
                f"data.template: not rendered: {error}; take the template of the model's publisher"
            ) from None

    return limited
