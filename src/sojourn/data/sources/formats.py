"""Detects the format of a record by its keys and converts it to a Document.

Seven formats: text, Alpaca, ShareGPT, messages (OpenAI), prompt/completion, question/answer and preference pairs. A
BadRecord is one line that says what is wrong; the caller adds the file and line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from sojourn.data.sources.document import Document, Message, Role

Record = dict[str, Any]

_ROLES: dict[str, Role] = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant",
    "function_call": "assistant",
    "tool": "tool", "observation": "tool", "function": "tool", "function_response": "tool",
}  # fmt: skip
_OPENAI_ROLES: dict[str, Role] = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_TRANSCRIPT = re.compile(r"(?:^|\n\n)\s*(Human|Assistant):")
_OPTIONAL = ("input", "system", "history", "tools")
_LONE_SURROGATE = "half a character (a lone surrogate) in the text"
_NONCHARACTER = "a noncharacter (U+FDD0 to U+FDD3) in the text"


class BadRecord(Exception):
    """What is wrong with one record."""


class EmptyRecord(Exception):
    """A record with no text: skipped, not counted as bad."""


def rename_columns(record: Record, columns: dict[str, str]) -> Record:
    """The record with the user's columns under our names; `columns` maps ours to theirs."""
    if not columns:
        return record
    missing = [column for ours, column in columns.items() if column not in record and ours not in _OPTIONAL]
    if missing:
        raise BadRecord(f"no column {' and no '.join(missing)} (it has {_keys(record)})")
    return {ours: record[column] for ours, column in columns.items() if column in record}


def detect_format(record: Any) -> str:
    """The name of the record's format. Raises BadRecord."""
    if not isinstance(record, dict):
        raise BadRecord(f"expected a record with keys, found {_kind(record)}")
    keys = record.keys()
    for name, needed, _ in _FORMATS:
        if all(any(key in keys for key in choice) for choice in needed):
            return name
    known = "; ".join(f"{name} ({', '.join(choice[0] for choice in needed)})" for name, needed, _ in _FORMATS)
    hint = "name the columns, for example data.columns.text=NAME"
    raise BadRecord(f"not a known format (found {_keys(record)}); known: {known}; or {hint}")


def to_document(record: Record, name: str, where: str) -> Document:
    """The record as a document. Raises BadRecord."""
    return _READERS[name](record, where)


def _keys(record: Record) -> str:
    return ", ".join(str(key)[:40] for key in list(record)[:6]) or "no keys"


def _kind(value: Any) -> str:
    names = {
        "dict": "an object",
        "list": "a list",
        "str": "text",
        "NoneType": "nothing (null)",
        "bool": "true or false",
    }
    return names.get(type(value).__name__, "a number" if isinstance(value, (int, float)) else type(value).__name__)


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise BadRecord(f"{key}: expected text, found {_kind(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise BadRecord(f"{key}: {_LONE_SURROGATE}") from None
        if any(mark in value for mark in "\ufdd0\ufdd1\ufdd2\ufdd3"):
            raise BadRecord(f"{key}: {_NONCHARACTER}")
    return value


def _first(record: Record, *keys: str) -> tuple[str, Any]:
    """The first of `keys` that the record has, and its value; or the first name with None."""
    return next(((key, record[key]) for key in keys if record.get(key) is not None), (keys[0], None))


def _from_text(record: Record, where: str) -> Document:
    text = _text(record["text"], "text")
    if not text or text.isspace():
        raise EmptyRecord
    return Document(where, text=text)


def _from_messages(record: Record, where: str) -> Document:
    key, turns = _first(record, "messages", "conversations", "conversation")
    return _chat(where, (*_system(record), *_turns(turns, key)), record)


def _from_alpaca(record: Record, where: str) -> Document:
    key, answer = _first(record, "output", "response")
    question = _question(record, "instruction")
    return _chat(
        where, (*_system(record), *_history(record), question, Message("assistant", _text(answer, key))), record
    )


def _from_prompt_completion(record: Record, where: str) -> Document:
    prompt, completion = record["prompt"], _first(record, "completion", "response")
    before = _turns(prompt, "prompt") if isinstance(prompt, list) else [_question(record, "prompt")]
    after = _answer(completion[1], completion[0])
    return _chat(where, (*_system(record), *_history(record), *before, *after), record)


def _from_question_answer(record: Record, where: str) -> Document:
    (question_key, question), (key, answer) = _first(record, "question", "query"), _first(record, "answer", "response")
    turns = (Message("user", _text(question, question_key)), Message("assistant", _text(answer, key)))
    return _chat(where, (*_system(record), *_history(record), *turns), record)


def _from_preference(record: Record, where: str) -> Document:
    """Two answers to a separate prompt, or two whole conversations that begin alike."""
    chosen, rejected = _answer(record["chosen"], "chosen"), _answer(record["rejected"], "rejected")
    if chosen == rejected:
        raise BadRecord("chosen and rejected are the same")
    key, prompt = _first(record, "prompt", "messages", "conversations", "conversation", "instruction", "question")
    before: list[Message] = []
    if chosen[0].role != "assistant" and chosen[0] != rejected[0]:
        raise BadRecord("chosen and rejected begin with different prompts")
    if chosen[0].role == "assistant" or rejected[0].role == "assistant":
        if prompt is None:
            raise BadRecord("chosen and rejected without a prompt")
        question = _turns(prompt, key) if isinstance(prompt, list) else [_question(record, key)]
        before = [*_system(record), *_history(record), *question]
    pair = [_chat(where, (*before, *answer), record) for answer in (chosen, rejected)]
    return Document(where, messages=pair[0].messages, tools=pair[0].tools, rejected=pair[1].messages)


def _chat(where: str, messages: tuple[Message, ...], record: Record) -> Document:
    if messages[-1].role != "assistant":
        raise BadRecord("the last message is not the assistant's, so there is nothing to train on")
    return Document(
        where, messages=messages, tools=_tools(record) if "tools" in record or "functions" in record else ()
    )


def _system(record: Record) -> tuple[Message, ...]:
    value = record.get("system")
    return (Message("system", _text(value, "system")),) if value else ()


def _question(record: Record, key: str) -> Message:
    """The question under `key`, with Alpaca's `input` on the next line."""
    input_key, given = _first(record, "input", "context")
    question = _text(record[key], key)
    return Message("user", f"{question}\n{_text(given, input_key)}" if given else question)


def _history(record: Record) -> list[Message]:
    """Alpaca's earlier rounds: [[question, answer], …]."""
    rounds = record.get("history") or []
    if not isinstance(rounds, list) or any(not isinstance(pair, (list, tuple)) or len(pair) != 2 for pair in rounds):
        raise BadRecord("history: expected a list of [question, answer]")
    roles: tuple[Role, Role] = ("user", "assistant")
    return [Message(role, _text(part, "history")) for pair in rounds for role, part in zip(roles, pair, strict=True)]


def _answer(value: Any, key: str) -> list[Message]:
    """An answer as text, as one message, or as a list of messages; or a transcript (Human: … Assistant: …)."""
    if isinstance(value, str):
        parts = _TRANSCRIPT.split(_text(value, key)) if value.lstrip().startswith("Human:") else []
        if len(parts) > 1:
            roles: dict[str, Role] = {"Human": "user", "Assistant": "assistant"}
            return [Message(roles[role], text.strip()) for role, text in zip(parts[1::2], parts[2::2], strict=True)]
        return [Message("assistant", _text(value, key))]
    if not isinstance(value, (dict, list)):
        _text(value, key)
    return _turns([value] if isinstance(value, dict) else value, key)


def _turns(turns: Any, key: str) -> list[Message]:
    if isinstance(turns, str) and turns.lstrip().startswith("["):  # JSON in a cell of a table
        turns = _parse_json(turns, key)
    if not isinstance(turns, list) or not turns:
        raise BadRecord(f"{key}: expected a list of messages, found {_kind(turns) if turns != [] else 'none'}")
    return [_turn(turn, key) for turn in turns]


def _turn(turn: Any, key: str) -> Message:
    """One message, OpenAI's (role, content) or ShareGPT's (from, value)."""
    if isinstance(turn, dict) and len(turn) == 2:  # the fast path for nearly all messages
        role, content = turn.get("role"), turn.get("content")
        if isinstance(content, str) and isinstance(role, str) and role in _OPENAI_ROLES:
            return Message(_OPENAI_ROLES[role], _text(content, key))
    if not isinstance(turn, dict):
        raise BadRecord(f"{key}: expected messages with a role and a content, found {_kind(turn)}")
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
    text = content if isinstance(content, str) else _parts(content, key) if content is not None else ""
    _, reasoning = _first(turn, "reasoning_content", "reasoning", "thinking")
    weight = _first(turn, "weight", "loss_weight")[1]
    if weight not in (None, 0, 1):
        raise BadRecord(f"{key}: weight {str(weight)[:20]}: only 0 and 1 are supported")
    return Message(role, _text(text, key), calls, _text(reasoning, key) if reasoning else "", weight != 0)


def _parts(parts: Any, key: str) -> str:
    """Content in parts, all of them text."""
    if not isinstance(parts, list):
        raise BadRecord(f"{key}: content: expected text, found {_kind(parts)}")
    texts = []
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        text = part.get("text", part.get("value")) if isinstance(part, dict) else part
        if kind != "text" or not isinstance(text, str):
            raise BadRecord(f"{key}: content part of type “{str(kind)[:30]}”: only text can be read")
        texts.append(text)
    return "".join(texts)


def _parse_json(value: str, key: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise BadRecord(f"{key}: not valid JSON: {value[:60]}") from None


def _parse_function_call(value: Any) -> tuple[Record, ...]:
    """ShareGPT's function_call: JSON of one call or of a list of them."""
    calls = _parse_json(value, "function_call") if isinstance(value, str) else value
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
                arguments = _text(arguments, "arguments")
        parsed.append({"name": _text(function["name"], "name"), "arguments": _check_json(arguments, "arguments")})
    return tuple(parsed)


def _tools(record: Record) -> tuple[Record, ...]:
    """The functions that a chat may call, as {"type": "function", "function": …}."""
    key, tools = _first(record, "tools", "functions")
    if isinstance(tools, str):
        tools = _parse_json(tools, key) if tools.strip() else []
    tools = [tools] if isinstance(tools, dict) else tools or []
    if not isinstance(tools, list) or any(not isinstance(tool, dict) for tool in tools):
        raise BadRecord(f"{key}: expected a list of functions")
    return tuple(_check_json(t if "function" in t else {"type": "function", "function": t}, key) for t in tools)


def _check_json(value: Any, key: str) -> Any:
    """`value`, after checking that all text in it can be encoded."""
    try:
        _text(json.dumps(value, ensure_ascii=False), key)
    except (RecursionError, TypeError, ValueError) as error:
        nested = isinstance(error, RecursionError)
        raise BadRecord(f"{key}: {'nested too deeply' if nested else 'not a JSON value'}") from None
    return value


_Needed = tuple[tuple[str, ...], ...]
_FORMATS: tuple[tuple[str, _Needed, Callable[[Record, str], Document]], ...] = (
    ("preference", (("chosen",), ("rejected",)), _from_preference),
    ("messages", (("messages",),), _from_messages),
    ("sharegpt", (("conversations", "conversation"),), _from_messages),
    ("alpaca", (("instruction",), ("output", "response")), _from_alpaca),
    ("prompt/completion", (("prompt",), ("completion", "response")), _from_prompt_completion),
    ("question/answer", (("question", "query"), ("answer", "response")), _from_question_answer),
    ("text", (("text",),), _from_text),
)
_READERS = {name: reader for name, _, reader in _FORMATS}
NAMES = tuple(_READERS)
