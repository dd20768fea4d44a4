"""What an answer must look like: response_format and tools as a grammar."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sojourn.data.sources.values import BadRecord, check_json
from sojourn.serve.engines.base import Grammar
from sojourn.serve.errors import bad_request
from sojourn.serve.schemas import JsonObjectFormat, JsonSchemaFormat, ResponsesSchemaFormat, TextFormat
from sojourn.serve.served_model import ServedModel
from sojourn.serve.tools import ToolForm, ToolSpec, call_grammar

AnyFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | ResponsesSchemaFormat


@dataclass(frozen=True)
class ToolUse:
    """`form`: in which calls are read; None where they are not looked for. `listed`: for the chat template.
    `several`: whether one answer may have more than one call."""

    form: ToolForm | None = None
    listed: tuple[dict[str, Any], ...] = ()
    grammar: Grammar | None = None
    several: bool = True


def format_grammar(given: AnyFormat | None, param: str) -> Grammar | None:
    if given is None or isinstance(given, TextFormat):
        return None
    if isinstance(given, JsonObjectFormat):
        return Grammar("json_object")
    schema = given.json_schema.schema_ if isinstance(given, JsonSchemaFormat) else given.schema_
    if schema is None:
        raise bad_request(f"{param}: json_schema needs a schema", param)
    return Grammar("json_schema", dump_schema(schema, param))


def dump_schema(schema: dict[str, Any], param: str) -> str:
    try:
        check_json(schema, param)
        return json.dumps(schema, allow_nan=False)
    except (BadRecord, ValueError, RecursionError) as error:
        raise bad_request(f"{param}: {error}", param, "invalid_schema") from None


def tool_use(
    model: ServedModel, tools: Sequence[dict[str, Any]], choice: Literal["none", "auto", "required"] | str | None,
    named: str | None, several: bool, has_format: bool,
) -> ToolUse:  # fmt: skip
    """`tools`: name, description, parameters, strict. `named`: the function that must be called."""
    if not tools:
        if named is not None or choice == "required":
            raise bad_request("tool_choice needs tools", "tool_choice")
        return ToolUse()
    if choice == "none" and named is None:
        return ToolUse()
    names = [tool["name"] for tool in tools]
    for at, tool in enumerate(tools):
        dump_schema(tool.get("parameters") or {}, f"tools[{at}]")
    if len(set(names)) < len(names):
        raise bad_request("tools: two functions have the same name", "tools")
    if named is not None and named not in names:
        raise bad_request(f"tool_choice: no tool has the name {named!r}", "tool_choice")
    if has_format:
        raise bad_request(
            "response_format and tools in one request are not supported; leave one out", "response_format"
        )
    if model.is_chat and model.tool_form is None:
        raise bad_request("the model's chat template writes tool calls in a form that is not known here", "tools")
    form: ToolForm = model.tool_form or "hermes"
    specs = [ToolSpec(tool["name"], tool.get("parameters") or {}, bool(tool.get("strict"))) for tool in tools]
    if named is not None:
        specs, several = [one for one in specs if one.name == named], False
    grammar = call_grammar(form, specs, model.special_markers, named is not None or choice == "required", several)
    return ToolUse(form, tuple(_listed(tool) for tool in tools), grammar, several)


def _listed(tool: dict[str, Any]) -> dict[str, Any]:
    function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    return {"type": "function", "function": function}
