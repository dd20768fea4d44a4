"""Compiles a chat template as transformers does, within limits: a template comes with a model, and nobody has read it.

No operator, call, filter or format may make more than `MOST_CHARACTERS`, and one rendering takes at most `MOST_SECONDS`
of CPU time. Two more changes: generation blocks write markers around their text, and `strftime_now` is a fixed date, so
that the same data always gives the same tokens.
"""

from __future__ import annotations

import datetime
import json
import re
import signal
import threading
from collections.abc import Callable
from functools import lru_cache, reduce, wraps
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from sojourn.errors import UserError

# Unicode noncharacters as markers in a rendering: formats.py rejects documents that have them.
SPAN_START, SPAN_END = "\ufdd0", "\ufdd1"
MOST_CHARACTERS = 1 << 24
MOST_SECONDS = 10.0
_LONG_NUMBER = re.compile(r"\d{6}")  # a width or precision in a format
_SIZED = (str, bytes, list, tuple, dict)


class _Generation(Extension):
    tags = {"generation"}  # noqa: RUF012  (Jinja's own attribute)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_with_markers"), [], [], body).set_lineno(line)

    def _with_markers(self, caller: Callable[[], str]) -> str:
        return f"{SPAN_START}{caller()}{SPAN_END}"


class _ConcatAsAdd(NodeTransformer):
    """`a ~ b` as `a|string + b|string`, which can be intercepted."""

    def visit_Concat(self, node: Any) -> Any:  # noqa: N802  (Jinja's own name)
        texts: list[Any] = [nodes.Filter(self.visit(one), "string", [], [], None, None) for one in node.nodes]
        return reduce(nodes.Add, texts).set_lineno(node.lineno).set_environment(node.environment)


class _Limited(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "+", "%"})

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
def compile_template(source: str) -> Callable[..., str]:
    environment = _Limited(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    for name in ("center", "indent", "wordwrap", "format", "round"):
        environment.filters[name] = _with_limit(environment.filters[name])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = datetime.date(2024, 7, 26).strftime
    try:
        return _limit_time(environment.from_string(source).render)
    except TemplateError as error:
        raise UserError(f"data.template: not a valid Jinja template: {error}") from None


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


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _limit_time(render: Callable[..., str]) -> Callable[..., str]:
    """Loops in loops may take years. A timer can interrupt the main thread only; there, templates are rendered."""
    if not hasattr(signal, "setitimer"):
        return render

    def interrupt(*_: object) -> None:
        raise TemplateError(f"it takes more than {MOST_SECONDS} s of CPU time")

    @wraps(render)
    def limited(*args: Any, **kwargs: Any) -> str:
        if threading.current_thread() is not threading.main_thread():
            return render(*args, **kwargs)
        before = signal.signal(signal.SIGPROF, interrupt)
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
        try:
            return render(*args, **kwargs)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)

    return limited
