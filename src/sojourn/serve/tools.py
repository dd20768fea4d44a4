"""Tool calls: found in what a model writes, and enforced by a grammar where they are required.

Models write calls in the form that their chat template taught them. Three forms are read:
- hermes (Hermes, Qwen, and models trained here): <tool_call>{"name": …, "arguments": {…}}</tool_call>
- mistral: [TOOL_CALLS] and a list of such objects, or [TOOL_CALLS]name[ARGS]{…}
- llama3: an answer that is {"name": …, "parameters": {…}}, perhaps after <|python_tag|>
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sojourn.infer.grammar import lark_json
from sojourn.infer.stop_strings import overlap
from sojourn.serve.engines.base import Grammar

ToolForm = Literal["hermes", "mistral", "llama3"]
PYTHON_TAG = "<|python_tag|>"
MARKERS: dict[ToolForm, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "llama3": (PYTHON_TAG,),
}
_ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True)
class Call:
    """`arguments`: JSON text, as OpenAI's API has it."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: "call_" + secrets.token_hex(12))


@dataclass(frozen=True)
class ToolSpec:
    name: str
    parameters: dict[str, Any]
    strict: bool = False


def find_form(template: str) -> ToolForm | None:
    """In which form a template has calls written; None where it is another one."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<function=" in template:
        return None
    if "<tool_call>" in template or "tools" not in template:  # without tools, prompts list them in the hermes form
        return "hermes"
    return "llama3" if PYTHON_TAG in template or '"parameters":' in template else None


class ToolParser:
    """Text in, text and calls out. Text that may be the beginning of a call is held back."""

    def __init__(self, form: ToolForm) -> None:
        self._form, self._held, self._inside, self._started = form, "", False, False
        self._at_gap = True  # before the first text or after a call, where white space is no content
        self._has_calls = False

    def add(self, piece: str) -> list[str | Call]:
        self._held += piece
        if self._form == "hermes":
            return self._read_hermes()
        if self._form == "llama3":
            return self._read_llama()
        return self._read_until("[TOOL_CALLS]")

    def finish(self) -> list[str | Call]:
        """What was held back; a call that is complete but for its end tag is a call."""
        held, self._held = self._held, ""
        if not held:
            return []
        if not self._inside:
            return [] if self._has_calls and self._at_gap else [held]
        if self._form == "hermes":
            complete = held[: len(held) - overlap(held, "</tool_call>")]
            return _or_text(_read_calls(complete), "<tool_call>" + held)
        if self._form == "mistral":
            return _or_text(_read_mistral_calls(held), "[TOOL_CALLS]" + held)
        return _or_text(_read_llama_calls(held.strip().removeprefix(PYTHON_TAG)), held)

    def _read_hermes(self) -> list[str | Call]:
        found: list[str | Call] = []
        while True:
            if not self._inside:
                found += self._read_until("<tool_call>")
                if not self._inside:
                    return found
            body, end, rest = self._held.partition("</tool_call>")
            if not end:
                return found
            calls = _read_calls(body)
            self._held, self._inside, self._at_gap = rest, False, bool(calls)
            self._has_calls = self._has_calls or bool(calls)
            found += _or_text(calls, f"<tool_call>{body}</tool_call>")

    def _read_until(self, marker: str) -> list[str | Call]:
        """The text before the marker; what comes after stays held."""
        if self._inside:
            return []
        text, found, rest = self._held.partition(marker)
        if found:
            self._inside, self._held = True, rest
            return [text] if text.strip() or not self._at_gap else []
        keep = overlap(text, marker)
        if self._at_gap and not text[: len(text) - keep].strip():
            return []
        self._at_gap = False
        text, self._held = text[: len(text) - keep], text[len(text) - keep :]
        return [text] if text else []

    def _read_llama(self) -> list[str | Call]:
        """Calls are the whole answer, so its first character decides."""
        if self._started:
            if self._inside:
                return []
            text, self._held = self._held, ""
            return [text] if text else []
        begin = self._held.lstrip()
        if not begin or (PYTHON_TAG.startswith(begin) and begin != PYTHON_TAG):
            return []
        self._started, self._inside = True, begin.startswith(("{", PYTHON_TAG))
        return [] if self._inside else self._read_llama()


def _or_text(calls: list[Call], text: str) -> list[str | Call]:
    return [*calls] if calls else [text]


def _read_calls(text: str) -> list[Call]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = [_as_call(one) for one in (value if isinstance(value, list) else [value])]
    return [one for one in calls if one is not None] if all(calls) else []


def _read_llama_calls(text: str) -> list[Call]:
    """One object, or several with semicolons between."""
    decoder, calls, at = json.JSONDecoder(), [], 0
    text = text.strip()
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        call = _as_call(value)
        if call is None:
            return []
        calls.append(call)
        while at < len(text) and text[at] in "; \n\t":
            at += 1
    return calls


def _read_mistral_calls(text: str) -> list[Call]:
    if text.lstrip().startswith("["):
        return _read_calls(text)
    calls = []
    for one in text.split("[TOOL_CALLS]"):
        name, _, arguments = one.partition("[ARGS]")
        call = _read_calls(json.dumps({"name": name.strip()})[:-1] + f', "arguments": {arguments}}}')
        if not call:
            return []
        calls += call
    return calls


def _as_call(value: Any) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return Call(value["name"], text)


def call_grammar(
    form: ToolForm, tools: Sequence[ToolSpec], special: set[str], required: bool, several: bool
) -> Grammar | None:
    """A grammar that requires calls of these tools; or one that leaves the choice and only holds calls to their
    schemas, where a tool asks for that. `special`: markers that are special tokens, which a grammar names without
    quotes."""
    if not required and not any(tool.strict for tool in tools):
        return None
    key = "parameters" if form == "llama3" else "arguments"
    calls = [
        {
            "type": "object", "properties": {"name": {"const": tool.name}, key: tool.parameters or _ANY_OBJECT},
            "required": ["name", key], "additionalProperties": False,
        }
        for tool in tools
    ]  # fmt: skip
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if form == "hermes":
        begin, end = (_marker(marker, special) for marker in MARKERS["hermes"])
        body = f"/\\n?/ {lark_json(schema)} /\\n?/ {end} /\\n?/"
    elif form == "mistral":
        begin = _marker("[TOOL_CALLS]", special)
        body = lark_json(
            {"type": "array", "items": schema, "minItems": 1, "maxItems": len(tools) * 4 if several else 1}
        )
        several = False
    else:
        return Grammar("lark", f"start: {lark_json(schema)}\n") if required else None
    if required:
        return Grammar("lark", f"start: call{'+' if several else ''}\ncall: {begin} {body}\n")
    if begin.startswith('"'):
        head = f"trigger[lazy]: TEXT {begin}\ncall: trigger {body}\n"
    else:
        head = f"call: TEXT {begin} {body}\n"
    count = "*" if several else "?"
    return Grammar("lark", f"start: call{count} tail\ntail: TEXT\nTEXT: /(.|\\n)*/\n{head}")


def _marker(text: str, special: set[str]) -> str:
    return text if text in special and text.startswith("<") else json.dumps(text)
