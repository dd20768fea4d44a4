"""One message of a chat: OpenAI's (role, content), ShareGPT's (from, value), with tool calls, reasoning and marks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from sojourn.data.sources.document import Message, Role
from sojourn.data.sources.values import BadRecord, Record, check_json, check_text, first_present, kind_name, parse_json

_ROLES: dict[str, Role] = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant",
    "function_call": "assistant",
    "tool": "tool", "observation": "tool", "function": "tool", "function_response": "tool",
}  # fmt: skip
_OPENAI_ROLES: dict[str, Role] = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


_MARKS = ("weight", "loss_weight", "train", "training", "trainable", "loss")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_TEXT_PARTS = ("text", "input_text", "output_text")
TURN_KEYS = {"role", "from", "content", "value", "tool_calls", "function_call", *_MARKS, *_REASONING}


def as_flag(value: Any) -> bool | None:
    """True or false, as JSON, a number or a table's text; None for anything else."""
    if isinstance(value, str):
        return {"true": True, "1": True, "false": False, "0": False}.get(value.strip().lower())
    return bool(value) if isinstance(value, (bool, int, float)) and value in (0, 1) else None


def marks_without_effect(turn: Record) -> Iterator[str]:
    """`train: true` and the like, of a turn that is not the assistant's: it is no target all the same."""
    named = turn.get("role", turn.get("from"))
    role = _ROLES.get(named) if isinstance(named, str) else None
    if role not in (None, "assistant"):
        yield from (f"{name} of {role} turns" for name in _MARKS if as_flag(turn.get(name)))


def read_turns(turns: Any, key: str) -> list[Message]:
    if isinstance(turns, str) and turns.lstrip().startswith("["):  # JSON in a cell of a table
        turns = parse_json(turns, key)
    if not isinstance(turns, list) or not turns:
        raise BadRecord(f"{key}: expected a list of messages, found {kind_name(turns) if turns != [] else 'none'}")
    return [_turn(turn, key) for turn in turns]


def _turn(turn: Any, key: str) -> Message:
    """One message, OpenAI's (role, content) or ShareGPT's (from, value)."""
    if isinstance(turn, dict) and len(turn) == 2:  # the fast path for nearly all messages
        role, content = turn.get("role"), turn.get("content")
        if isinstance(content, str) and isinstance(role, str) and role in _OPENAI_ROLES:
            return Message(_OPENAI_ROLES[role], check_text(content, key))
    if not isinstance(turn, dict):
        raise BadRecord(f"{key}: expected messages with a role and a content, found {kind_name(turn)}")
    named, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    role = _ROLES.get(named) if isinstance(named, str) else None
    if role is None:
        known = ", ".join(dict.fromkeys(_ROLES))
        raise BadRecord(
            f"{key}: role “{str(named)[:40]}” is not one of {known}" if named else f"{key}: a message has no role"
        )
    calls: tuple[Record, ...] = ()
    if role == "assistant":
        calls = _calls(turn.get("tool_calls") or ([turn["function_call"]] if turn.get("function_call") else []))
    if named == "function_call":
        calls, content = _parse_function_call(content), ""
    if content is None and not calls:
        raise BadRecord(f"{key}: a message has no content")
    text, reasoning = (content or "", "") if isinstance(content, str | None) else _parts(content, key)
    reasoning = first_present(turn, *_REASONING)[1] or reasoning
    return Message(
        role, check_text(text, key), calls, check_text(reasoning, key) if reasoning else "", _is_trained(turn, key)
    )


def _is_trained(turn: Record, key: str) -> bool:
    given = [(name, turn[name]) for name in _MARKS if turn.get(name) is not None]
    for name, value in given:
        if as_flag(value) is None:
            raise BadRecord(f"{key}: {name} {str(value)[:20]}: only 0 and 1 are supported (or false and true)")
    return all(as_flag(value) for _, value in given)


def _parts(parts: Any, key: str) -> tuple[str, str]:
    """Content in parts: the text, and the reasoning."""
    if not isinstance(parts, list):
        raise BadRecord(f"{key}: content: expected text, found {kind_name(parts)}")
    texts, thoughts = [], []
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind in ("reasoning", "thinking"):
            thoughts.append(_reasoning_text(part, key))
            continue
        text = part.get("text", part.get("value")) if isinstance(part, dict) else part
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            raise BadRecord(f"{key}: content part of type “{str(kind)[:30]}”: only text can be read, no media")
        texts.append(text)
    return "".join(texts), "\n".join(thoughts)


def _reasoning_text(part: Record, key: str) -> str:
    """OpenAI's `summary` is a list of texts; others have the text itself."""
    name, value = first_present(part, "text", "reasoning", "thinking", "content", "summary")
    if isinstance(value, list):
        value = "\n".join(check_text(one.get("text") if isinstance(one, dict) else one, name) for one in value)
    return check_text(value, f"{key}: {name}")


def _parse_function_call(value: Any) -> tuple[Record, ...]:
    """ShareGPT's function_call: JSON of one call or of a list of them."""
    calls = parse_json(value, "function_call") if isinstance(value, str) else value
    return _calls(calls if isinstance(calls, list) else [calls])


def _calls(calls: Any) -> tuple[Record, ...]:
    if not isinstance(calls, list):
        raise BadRecord("tool_calls: expected a list")
    parsed = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRecord("tool_calls: each call needs a name and arguments")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                arguments = check_text(arguments, "arguments")
        parsed.append({"name": check_text(function["name"], "name"), "arguments": check_json(arguments, "arguments")})
    return tuple(parsed)
