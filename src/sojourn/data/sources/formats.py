"""Detects the format of a record by its keys and converts it to a Document.

Seven formats: text, Alpaca, ShareGPT, messages (OpenAI), prompt/completion, question/answer and preference pairs. A
BadRecord is one line that says what is wrong; the caller adds the file and line.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from sojourn.data.sources.document import Document, Message, Role
from sojourn.data.sources.turns import read_turns
from sojourn.data.sources.values import (
    BadRecord,
    EmptyRecord,
    Record,
    check_json,
    check_text,
    column_names,
    first_present,
    kind_name,
    parse_json,
)

_TRANSCRIPT = re.compile(r"(?:^|\n\n)\s*(Human|Assistant):")


def detect_format(record: Any) -> str:
    """The name of the record's format. Raises BadRecord."""
    if not isinstance(record, dict):
        raise BadRecord(f"expected a record with keys, found {kind_name(record)}")
    keys = record.keys()
    for name, needed, _ in _FORMATS:
        if all(any(key in keys for key in choice) for choice in needed):
            return name
    known = "; ".join(f"{name} ({', '.join(choice[0] for choice in needed)})" for name, needed, _ in _FORMATS)
    hint = "name the columns, for example data.columns.text=NAME"
    raise BadRecord(f"not a known format (found {column_names(record)}); known: {known}; or {hint}")


def to_document(record: Record, name: str, where: str) -> Document:
    """The record as a document. Raises BadRecord."""
    return _READERS[name](record, where)


def _from_text(record: Record, where: str) -> Document:
    text = check_text(record["text"], "text")
    if not text or text.isspace():
        raise EmptyRecord
    return Document(where, text=text)


def _from_messages(record: Record, where: str) -> Document:
    key, turns = first_present(record, "messages", "conversations", "conversation")
    return _chat(where, (*_system(record), *read_turns(turns, key)), record)


def _from_alpaca(record: Record, where: str) -> Document:
    key, answer = first_present(record, "output", "response")
    question = _question(record, "instruction")
    return _chat(where, (*_system(record), *_history(record), question, _reply(record, answer, key)), record)


def _from_prompt_completion(record: Record, where: str) -> Document:
    prompt, completion = record["prompt"], first_present(record, "completion", "response")
    before = read_turns(prompt, "prompt") if isinstance(prompt, list) else [_question(record, "prompt")]
    reasoning = _reasoning(record)
    after = [_reply(record, *reversed(completion))] if reasoning else _answer(completion[1], completion[0])
    return _chat(where, (*_system(record), *_history(record), *before, *after), record)


def _from_question_answer(record: Record, where: str) -> Document:
    (question_key, question), (key, answer) = (
        first_present(record, "question", "query"),
        first_present(record, "answer", "response"),
    )
    turns = (Message("user", check_text(question, question_key)), _reply(record, answer, key))
    return _chat(where, (*_system(record), *_history(record), *turns), record)


def _from_preference(record: Record, where: str) -> Document:
    """Two answers to a separate prompt, or two whole conversations that begin alike."""
    sides = [first_present(record, side, f"{side}_messages") for side in ("chosen", "rejected")]
    chosen, rejected = (_answer(value, key) for key, value in sides)
    if chosen == rejected:
        raise BadRecord("chosen and rejected are the same")
    key, prompt = first_present(
        record, "prompt", "messages", "conversations", "conversation", "instruction", "question"
    )
    before: list[Message] = []
    if chosen[0].role != "assistant" and chosen[0] != rejected[0]:
        raise BadRecord("chosen and rejected begin with different prompts")
    if chosen[0].role == "assistant" or rejected[0].role == "assistant":
        if prompt is None:
            raise BadRecord("chosen and rejected without a prompt")
        question = read_turns(prompt, key) if isinstance(prompt, list) else [_question(record, key)]
        before = [*_system(record), *_history(record), *question]
    pair = [_chat(where, (*before, *answer), record) for answer in (chosen, rejected)]
    return Document(where, messages=pair[0].messages, tools=pair[0].tools, rejected=pair[1].messages)


def _chat(where: str, messages: tuple[Message, ...], record: Record) -> Document:
    if messages[-1].role != "assistant":
        raise BadRecord("the last message is not the assistant's, so there is nothing to train on")
    return Document(
        where, messages=messages, tools=read_tools(record) if "tools" in record or "functions" in record else ()
    )


def _reply(record: Record, answer: Any, key: str) -> Message:
    return Message("assistant", check_text(answer, key), reasoning=_reasoning(record))


def _reasoning(record: Record) -> str:
    """What the assistant thought before a single answer."""
    key, value = first_present(record, "reasoning", "reasoning_content", "thinking")
    return check_text(value, key) if value else ""


def _system(record: Record) -> tuple[Message, ...]:
    value = record.get("system")
    return (Message("system", check_text(value, "system")),) if value else ()


def _question(record: Record, key: str) -> Message:
    """The question under `key`, with Alpaca's `input` on the next line."""
    input_key, given = first_present(record, "input", "context")
    question = check_text(record[key], key)
    return Message("user", f"{question}\n{check_text(given, input_key)}" if given else question)


def _history(record: Record) -> list[Message]:
    """Alpaca's earlier rounds: [[question, answer], …]."""
    rounds = record.get("history") or []
    if not isinstance(rounds, list) or any(not isinstance(pair, (list, tuple)) or len(pair) != 2 for pair in rounds):
        raise BadRecord("history: expected a list of [question, answer]")
    roles: tuple[Role, Role] = ("user", "assistant")
    return [
        Message(role, check_text(part, "history")) for pair in rounds for role, part in zip(roles, pair, strict=True)
    ]


def _answer(value: Any, key: str) -> list[Message]:
    """An answer as text, as one message, or as a list of messages; or a transcript (Human: … Assistant: …)."""
    if isinstance(value, str):
        parts = _TRANSCRIPT.split(check_text(value, key)) if value.lstrip().startswith("Human:") else []
        if len(parts) > 1:
            roles: dict[str, Role] = {"Human": "user", "Assistant": "assistant"}
            return [Message(roles[role], text.strip()) for role, text in zip(parts[1::2], parts[2::2], strict=True)]
        return [Message("assistant", check_text(value, key))]
    if not isinstance(value, (dict, list)):
        check_text(value, key)
    return read_turns([value] if isinstance(value, dict) else value, key)


def read_tools(record: Record) -> tuple[Record, ...]:
    """The functions that a chat may call, as {"type": "function", "function": …}."""
    key, tools = first_present(record, "tools", "functions")
    if isinstance(tools, str):
        tools = parse_json(tools, key) if tools.strip() else []
    tools = [tools] if isinstance(tools, dict) else tools or []
    if not isinstance(tools, list) or any(not isinstance(tool, dict) for tool in tools):
        raise BadRecord(f"{key}: expected a list of functions")
    return tuple(check_json(t if "function" in t else {"type": "function", "function": t}, key) for t in tools)


_Needed = tuple[tuple[str, ...], ...]
_FORMATS: tuple[tuple[str, _Needed, Callable[[Record, str], Document]], ...] = (
    ("preference", (("chosen", "chosen_messages"), ("rejected", "rejected_messages")), _from_preference),
    ("messages", (("messages",),), _from_messages),
    ("sharegpt", (("conversations", "conversation"),), _from_messages),
    ("alpaca", (("instruction",), ("output", "response")), _from_alpaca),
    ("prompt/completion", (("prompt",), ("completion", "response")), _from_prompt_completion),
    ("question/answer", (("question", "query"), ("answer", "response")), _from_question_answer),
    ("text", (("text",),), _from_text),
)
_READERS = {name: reader for name, _, reader in _FORMATS}
NAMES = tuple(_READERS)
