"""Recognises a record by its keys and turns it into a Document."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from sojourn.data.document import Document, Message, Role
from sojourn.errors import UserError

_SHAREGPT_ROLES: dict[str, Role] = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
}  # fmt: skip


def recognise(record: Any, where: str) -> str:
    """The name of the record's format."""
    if isinstance(record, dict):
        for name, (keys, _) in _FORMATS.items():
            if keys <= record.keys():
                return name
        found = ", ".join(list(map(str, record))[:6]) or "no keys"
    else:
        found = type(record).__name__
    known = "; ".join(f"{name} ({', '.join(sorted(keys))})" for name, (keys, _) in _FORMATS.items())
    raise UserError(f"{where}: not a format that is known here (found {found}); known: {known}")


def to_document(record: dict[str, Any], name: str, where: str) -> Document:
    document = _FORMATS[name][1](record, where)
    if document.is_chat and document.messages[-1].role != "assistant":
        raise UserError(f"{where}: the last message is not the assistant's, so there is nothing to learn from it")
    return document


def _text(value: Any, key: str, where: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where}: {key}: expected text, found {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UserError(f"{where}: {key}: half a character (a lone surrogate) in the text; mend or remove it") from None
    return value


def _from_text(record: dict[str, Any], where: str) -> Document:
    return Document(where, text=_text(record["text"], "text", where))


def _from_messages(record: dict[str, Any], where: str) -> Document:
    return Document(where, messages=_turns(record["messages"], "messages", "role", "content", where))


def _from_sharegpt(record: dict[str, Any], where: str) -> Document:
    messages = _turns(record["conversations"], "conversations", "from", "value", where)
    system = record.get("system")
    return Document(
        where, messages=(Message("system", system), *messages) if isinstance(system, str) and system else messages
    )


def _turns(turns: Any, key: str, role_key: str, content_key: str, where: str) -> tuple[Message, ...]:
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{where}: {key}: expected a list of messages")
    found = []
    for turn in turns:
        if not isinstance(turn, dict) or role_key not in turn or content_key not in turn:
            raise UserError(f"{where}: {key}: each message needs {role_key} and {content_key}")
        role = _SHAREGPT_ROLES.get(turn[role_key]) if isinstance(turn[role_key], str) else None
        if role is None:
            raise UserError(f"{where}: {key}: role “{turn[role_key]}” is not one of {', '.join(get_args(Role))}")
        found.append(Message(role, _text(turn[content_key], content_key, where)))
    return tuple(found)


def _from_alpaca(record: dict[str, Any], where: str) -> Document:
    asked = _text(record["instruction"], "instruction", where)
    given = record.get("input") or ""
    question = f"{asked}\n{_text(given, 'input', where)}" if given else asked
    return _pair(question, _text(record["output"], "output", where), where, record.get("system"))


def _asked(question: str, answer: str) -> Callable[[dict[str, Any], str], Document]:
    return lambda record, where: _pair(
        _text(record[question], question, where), _text(record[answer], answer, where), where, record.get("system")
    )


def _pair(question: str, answer: str, where: str, system: Any = None) -> Document:
    before = (Message("system", system),) if isinstance(system, str) and system else ()
    return Document(where, messages=(*before, Message("user", question), Message("assistant", answer)))


_FORMATS: dict[str, tuple[set[str], Callable[[dict[str, Any], str], Document]]] = {
    "messages": ({"messages"}, _from_messages),
    "sharegpt": ({"conversations"}, _from_sharegpt),
    "alpaca": ({"instruction", "output"}, _from_alpaca),
    "prompt/completion": ({"prompt", "completion"}, _asked("prompt", "completion")),
    "question/answer": ({"question", "answer"}, _asked("question", "answer")),
    "text": ({"text"}, _from_text),
}
