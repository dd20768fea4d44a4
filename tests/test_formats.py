"""The seven formats are detected by their keys, and what is wrong with a record is reported in one line."""

from __future__ import annotations

import json
import os
import time
from itertools import islice
from pathlib import Path

import pytest

from sojourn.config.data import Columns, DataConfig, Source
from sojourn.data.inputs import open_inputs
from sojourn.data.prepare import prepare
from sojourn.data.preview import make_preview
from sojourn.data.sources.chunks import parse_chunk
from sojourn.data.sources.columns import rename_columns
from sojourn.data.sources.document import Message
from sojourn.data.sources.formats import NAMES, detect_format, to_document
from sojourn.data.sources.source import open_source
from sojourn.data.sources.values import BadRecord, EmptyRecord
from sojourn.data.tokenize.bpe import train_bpe
from sojourn.data.tokenize.span_tokenizer import SpannedText, SpanTokenizer
from sojourn.data.tokenize.tokenizer import TokenizerBundle, open_tokenizer
from sojourn.errors import UserError

Q, A = Message("user", "Q"), Message("assistant", "A")
SYSTEM = Message("system", "S")
CALL = {"name": "f", "arguments": {"x": 1}}
FUNCTION = {"name": "f", "description": "does f", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}


def read(record):
    return to_document(record, detect_format(record), "my.jsonl:1")


def openai(*turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def sharegpt(*turns, **more):
    return {"conversations": [{"from": who, "value": said} for who, said in turns], **more}


def answered(**answer):
    return {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", **answer}]}


# What each record is, and what it becomes

CHATS = {
    "alpaca": (
        ({"instruction": "Q", "output": "A"}, (Q, A)),
        ({"instruction": "Q", "input": "", "output": "A"}, (Q, A)),
        ({"instruction": "Q", "input": None, "output": "A"}, (Q, A)),
        ({"instruction": "Q", "input": "more", "output": "A"}, (Message("user", "Q\nmore"), A)),
        ({"instruction": "Q", "context": "more", "response": "A"}, (Message("user", "Q\nmore"), A)),
        ({"instruction": "Q", "output": "A", "system": "S"}, (SYSTEM, Q, A)),
        ({"instruction": "Q", "output": "A", "system": ""}, (Q, A)),
        ({"instruction": "Q", "output": "A", "history": [["Q", "A"], ["Q", "A"]]}, (Q, A) * 3),
        ({"instruction": "Q", "output": "A", "history": None}, (Q, A)),
        ({"instruction": "Q", "output": "A", "history": [["Q", "A"]], "system": "S"}, (SYSTEM, Q, A, Q, A)),
        ({"instruction": "Q", "input": "", "output": "A", "text": "### Instruction: Q"}, (Q, A)),
        ({"instruction": "Q", "output": ""}, (Q, Message("assistant", ""))),
    ),
    "sharegpt": (
        (sharegpt(("human", "Q"), ("gpt", "A")), (Q, A)),
        (sharegpt(("user", "Q"), ("assistant", "A")), (Q, A)),
        (sharegpt(("human", "Q"), ("model", "A"), ("human", "Q"), ("chatgpt", "A")), (Q, A, Q, A)),
        (sharegpt(("system", "S"), ("human", "Q"), ("gpt", "A")), (SYSTEM, Q, A)),
        (sharegpt(("human", "Q"), ("gpt", "A"), system="S"), (SYSTEM, Q, A)),
        ({"conversation": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}, (Q, A)),
        (sharegpt(("human", "Q"), ("gpt", "A"), id="1", source="x"), (Q, A)),
        (
            sharegpt(("human", "Q"), ("function_call", json.dumps(CALL)), ("observation", "R"), ("gpt", "A")),
            (Q, Message("assistant", "", (CALL,)), Message("tool", "R"), A),
        ),
        (
            sharegpt(("human", "Q"), ("function_call", json.dumps([CALL, CALL])), ("tool", "R"), ("gpt", "A")),
            (Q, Message("assistant", "", (CALL, CALL)), Message("tool", "R"), A),
        ),
        (
            sharegpt(("human", "Q"), ("function_call", json.dumps(CALL | {"arguments": '{"x": 1}'}))),
            (Q, Message("assistant", "", (CALL,))),
        ),
    ),
    "messages": (
        (openai(("user", "Q"), ("assistant", "A")), (Q, A)),
        (openai(("developer", "S"), ("user", "Q"), ("assistant", "A")), (SYSTEM, Q, A)),
        (openai(("system", "S"), ("user", "Q"), ("assistant", "A")), (SYSTEM, Q, A)),
        (openai(("user", "Q"), ("function", "R"), ("assistant", "A")), (Q, Message("tool", "R"), A)),
        (openai(("user", [{"type": "text", "text": "Q"}]), ("assistant", [{"type": "text", "text": "A"}])), (Q, A)),
        (openai(("user", ["Q"]), ("assistant", [{"text": "A"}])), (Q, A)),
        (openai(("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), ("assistant", "A")),
         (Message("user", "ab"), A)),
        (answered(content="A", weight=0), (Q, Message("assistant", "A", trained=False))),
        (answered(content="A", weight=1), (Q, A)),
        (answered(content="A", weight=1.0), (Q, A)),
        (answered(content="A", weight=None), (Q, A)),
        (answered(content="A", loss_weight=0), (Q, Message("assistant", "A", trained=False))),
        (answered(content="A", loss_weight=1), (Q, A)),
        (answered(content="A", reasoning_content="R"), (Q, Message("assistant", "A", reasoning="R"))),
        (answered(content="A", reasoning="R"), (Q, Message("assistant", "A", reasoning="R"))),
        (answered(content="A", reasoning_content=None), (Q, A)),
        (answered(content="A", tool_calls=None), (Q, A)),
        (answered(content="A", tool_calls=[]), (Q, A)),
        (answered(content="A", name="bot"), (Q, A)),
        (answered(content="A", tool_calls=[{"id": "1", "type": "function", "function": CALL}]),
         (Q, Message("assistant", "A", (CALL,)))),
        (answered(content=None, tool_calls=[{"function": CALL | {"arguments": '{"x": 1}'}}]),
         (Q, Message("assistant", "", (CALL,)))),
        (answered(content=None, tool_calls=[CALL, CALL]), (Q, Message("assistant", "", (CALL, CALL)))),
        (answered(content=None, function_call=CALL), (Q, Message("assistant", "", (CALL,)))),
        (answered(tool_calls=[{"function": CALL}]), (Q, Message("assistant", "", (CALL,)))),
        (answered(function_call=CALL), (Q, Message("assistant", "", (CALL,)))),
        (answered(content=None, tool_calls=[{"name": "f", "arguments": "not json"}]),
         (Q, Message("assistant", "", ({"name": "f", "arguments": "not json"},)))),
        (answered(content=None, tool_calls=[{"name": "f"}]),
         (Q, Message("assistant", "", ({"name": "f", "arguments": {}},)))),
        ({**openai(("user", "Q"), ("assistant", "A")), "prompt": "Q", "prompt_id": "1"}, (Q, A)),
    ),
    "prompt/completion": (
        ({"prompt": "Q", "completion": "A"}, (Q, A)),
        ({"prompt": "Q", "response": "A"}, (Q, A)),
        ({"prompt": "Q", "completion": "A", "system": "S", "history": [["Q", "A"]]}, (SYSTEM, Q, A, Q, A)),
        ({"prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}],
          "completion": [{"role": "assistant", "content": "A"}]}, (SYSTEM, Q, A)),
        ({"prompt": [{"role": "user", "content": "Q"}], "completion": "A"}, (Q, A)),
        ({"prompt": "Q", "completion": {"role": "assistant", "content": "A"}}, (Q, A)),
        ({"prompt": "", "completion": "A"}, (Message("user", ""), A)),
    ),
    "question/answer": (
        ({"question": "Q", "answer": "A"}, (Q, A)),
        ({"query": "Q", "response": "A"}, (Q, A)),
        ({"question": "Q", "answer": "A", "system": "S"}, (SYSTEM, Q, A)),
        ({"query": "Q", "response": "A", "history": [["Q", "A"]]}, (Q, A, Q, A)),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "record", "messages"), [(name, *one) for name, listed in CHATS.items() for one in listed]
)
def test_the_format_of_a_chat_is_detected_by_its_keys(name, record, messages):
    assert detect_format(record) == name
    document = read(record)
    assert document.messages == messages and not document.rejected and not document.text
    assert document.where == "my.jsonl:1"


def test_a_text_stays_as_it_is():
    assert detect_format({"text": " a\n", "url": "x"}) == "text"
    assert read({"text": " a\n", "url": "x"}).text == " a\n"


@pytest.mark.parametrize("text", ["", " ", "\n\t\u3000"])
def test_a_text_of_whitespace_is_empty_and_not_bad(text):
    with pytest.raises(EmptyRecord):
        read({"text": text})


B = Message("assistant", "B")
_ONE = {"role": "assistant", "content": "A"}
_OTHER = {"role": "assistant", "content": "B"}
_ASKED = {"role": "user", "content": "Q"}
PREFERENCES = (
    {"prompt": "Q", "chosen": "A", "rejected": "B"},
    {"prompt": "Q", "chosen": _ONE, "rejected": _OTHER},
    {"prompt": "Q", "chosen": [_ONE], "rejected": [_OTHER]},
    {"prompt": [_ASKED], "chosen": [_ONE], "rejected": [_OTHER]},
    {"prompt": "Q", "chosen": [_ASKED, _ONE], "rejected": [_ASKED, _OTHER]},
    {"chosen": [_ASKED, _ONE], "rejected": [_ASKED, _OTHER]},
    {"messages": [_ASKED], "chosen": _ONE, "rejected": _OTHER},
    {"instruction": "Q", "input": "", "chosen": "A", "rejected": "B"},
    {"question": "Q", "chosen": "A", "rejected": "B"},
    {"conversations": [{"from": "human", "value": "Q"}], "chosen": {"from": "gpt", "value": "A"},
     "rejected": {"from": "gpt", "value": "B"}},
    {"chosen": "\n\nHuman: Q\n\nAssistant: A", "rejected": "\n\nHuman: Q\n\nAssistant: B"},
    {"chosen": "Human: Q\n\nAssistant: A", "rejected": "Human: Q\n\nAssistant: B"},
)  # fmt: skip


@pytest.mark.parametrize("record", PREFERENCES)
def test_a_preference_is_two_conversations_with_one_beginning(record):
    assert detect_format(record) == "preference"
    document = read(record)
    assert (document.messages, document.rejected) == ((Q, A), (Q, B))


def test_a_preference_keeps_its_system_turn_and_its_longer_transcripts():
    with_system = read({"system": "S", "prompt": "Q", "chosen": "A", "rejected": "B"})
    assert (with_system.messages, with_system.rejected) == ((SYSTEM, Q, A), (SYSTEM, Q, B))
    before = "\n\nHuman: Q\n\nAssistant: A\n\nHuman: Q\n\nAssistant:"
    long = read({"chosen": f"{before} A", "rejected": f"{before} B"})
    assert (long.messages, long.rejected) == ((Q, A, Q, A), (Q, A, Q, B))


@pytest.mark.parametrize(
    "tools", [[FUNCTION], [TOOL], TOOL, FUNCTION, json.dumps([FUNCTION]), json.dumps(TOOL)], ids=lambda t: str(t)[:30]
)
@pytest.mark.parametrize("key", ["tools", "functions"])
def test_tools_are_read_in_every_spelling(tools, key):
    assert read({**openai(("user", "Q"), ("assistant", "A")), key: tools}).tools == (TOOL,)
    assert read(sharegpt(("human", "Q"), ("gpt", "A"), **{key: tools})).tools == (TOOL,)


@pytest.mark.parametrize("tools", [None, "", " ", [], "[]", "null"])
def test_no_tools_are_no_damage(tools):
    assert read({**openai(("user", "Q"), ("assistant", "A")), "tools": tools}).tools == ()


# Damage

_HALF = "\ud800"
DAMAGE = (
    ({"text": 3}, "text: expected text, found a number"),
    ({"text": None}, "text: expected text, found nothing (null)"),
    ({"text": ["a"]}, "text: expected text, found a list"),
    ({"text": _HALF}, "text: half a character (a lone surrogate) in the text"),
    ({"text": "a\ufdd0"}, "text: a noncharacter"),
    ({"instruction": "Q", "output": None}, "output: expected text, found nothing (null)"),
    ({"instruction": 1, "output": "A"}, "instruction: expected text, found a number"),
    ({"instruction": "Q", "input": {"a": 1}, "output": "A"}, "input: expected text, found an object"),
    ({"instruction": "Q", "output": True}, "output: expected text, found true or false"),
    ({"instruction": "Q", "output": "A", "system": 3}, "system: expected text, found a number"),
    ({"instruction": "Q", "output": "A", "history": "x"}, "history: expected a list of [question, answer]"),
    ({"instruction": "Q", "output": "A", "history": [["Q"]]}, "history: expected a list of [question, answer]"),
    ({"instruction": "Q", "output": "A", "history": [["Q", 1]]}, "history: expected text, found a number"),
    ({"prompt": "Q", "completion": None}, "completion: expected"),
    ({"prompt": "Q", "completion": 3}, "completion: expected"),
    ({"prompt": "Q", "completion": []}, "completion: expected a list of messages, found none"),
    ({"prompt": "Q", "completion": _HALF}, "completion: half a character"),
    ({"prompt": "Q", "completion": "\ufdd1"}, "completion: a noncharacter"),
    ({"prompt": _HALF, "completion": "A"}, "prompt: half a character"),
    ({"question": "Q", "answer": 3.5}, "answer: expected text, found a number"),
    ({"question": None, "answer": "A"}, "question: expected text, found nothing (null)"),
    ({"messages": "Q"}, "messages: expected a list of messages, found text"),
    ({"messages": None}, "messages: expected a list of messages, found nothing (null)"),
    ({"messages": []}, "messages: expected a list of messages, found none"),
    ({"messages": ["Q", "A"]}, "messages: expected messages with a role and a content, found text"),
    ({"messages": [{"content": "Q"}]}, "messages: a message has no role"),
    ({"messages": [{"role": None, "content": "Q"}]}, "messages: a message has no role"),
    ({"messages": [{"role": 7, "content": "Q"}]}, "messages: role “7” is not one of system, developer, user"),
    ({"messages": [{"role": "boss", "content": "Q"}]}, "messages: role “boss” is not one of system, developer, user"),
    (openai(("user", "Q")), "the last message is not the assistant's"),
    (openai(("user", "Q"), ("assistant", "A"), ("user", "Q")), "the last message is not the assistant's"),
    (openai(("user", None), ("assistant", "A")), "messages: a message has no content"),
    ({"messages": [{"role": "user"}, _ONE]}, "messages: a message has no content"),
    (openai(("user", {"a": 1}), ("assistant", "A")), "messages: content: expected text, found an object"),
    (openai(("user", 5), ("assistant", "A")), "messages: content: expected text, found a number"),
    (openai(("user", [{"type": "image_url", "url": "x"}]), ("assistant", "A")), "content part of type “image_url”"),
    (openai(("user", [3]), ("assistant", "A")), "only text can be read"),
    (openai(("user", _HALF), ("assistant", "A")), "messages: half a character"),
    (openai(("user", [_HALF]), ("assistant", "A")), "messages: half a character"),
    (answered(content="A", weight=0.5), "messages: weight 0.5: only 0 and 1 are supported"),
    (answered(content="A", weight="x"), "messages: weight x: only 0 and 1 are supported"),
    (answered(content="A", weight=[]), "messages: weight []: only 0 and 1"),
    (answered(content="A", reasoning_content=3), "messages: expected text, found a number"),
    (answered(content="A", reasoning_content=_HALF), "messages: half a character"),
    (answered(content="A", tool_calls="f"), "tool_calls: expected a list"),
    (answered(content="A", tool_calls=["f"]), "tool_calls: each call needs a name and arguments"),
    (answered(content="A", tool_calls=[{"function": {}}]), "tool_calls: each call needs a name and arguments"),
    (answered(content="A", tool_calls=[{"name": 3}]), "tool_calls: each call needs a name and arguments"),
    (answered(content="A", tool_calls=[CALL | {"arguments": {"x": _HALF}}]), "arguments: half a character"),
    (answered(content="A", tool_calls=[CALL | {"name": _HALF}]), "name: half a character"),
    (answered(content="A", tool_calls=[CALL | {"arguments": {"x": b"bytes"}}]), "arguments: "),
    (sharegpt(("human", "Q"), ("function_call", "{oops")), "function_call: not valid JSON: {oops"),
    (sharegpt(("human", "Q"), ("function_call", "3")), "tool_calls: each call needs a name and arguments"),
    (sharegpt(("human", "Q"), ("alien", "A")), "conversations: role “alien” is not one of"),
    (sharegpt(("human", "Q"), ("gpt", "A"), tools="{oops"), "tools: not valid JSON: {oops"),
    (sharegpt(("human", "Q"), ("gpt", "A"), tools=[3]), "tools: expected a list of functions"),
    (sharegpt(("human", "Q"), ("gpt", "A"), tools=3), "tools: expected a list of functions"),
    (sharegpt(("human", "Q"), ("gpt", "A"), tools=[{"name": _HALF}]), "tools: half a character"),
    (sharegpt(("human", "Q"), ("gpt", "A"), tools=[{"name": b"bytes"}]), "tools: "),
    ({"chosen": "A", "rejected": "B"}, "chosen and rejected without a prompt"),
    ({"prompt": "Q", "chosen": "A", "rejected": "A"}, "chosen and rejected are the same"),
    ({"prompt": "Q", "chosen": None, "rejected": "A"}, "chosen: expected text, found nothing (null)"),
    ({"prompt": "Q", "chosen": "A", "rejected": _HALF}, "rejected: half a character"),
    ({"prompt": 3, "chosen": "A", "rejected": "B"}, "prompt: expected text, found a number"),
    ({"chosen": "Human: Q", "rejected": "Human: Q\n\nAssistant: B"}, "the last message is not the assistant's"),
    ({}, "not a known format (found no keys)"),
    ({"colour": 1}, "not a known format (found colour)"),
    ({"prompt": "Q"}, "not a known format (found prompt)"),
    ({"chosen": "A"}, "not a known format (found chosen)"),
    ([], "expected a record with keys, found a list"),
    ("text", "expected a record with keys, found text"),
    (None, "expected a record with keys, found nothing (null)"),
    (3, "expected a record with keys, found a number"),
)  # fmt: skip


@pytest.mark.parametrize(("record", "message"), DAMAGE, ids=lambda value: ascii(value)[:60])
def test_a_bad_record_is_reported_in_one_line(record, message):
    with pytest.raises(BadRecord) as caught:
        read(record)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_an_unknown_format_lists_the_known_ones_and_what_to_type():
    with pytest.raises(BadRecord) as caught:
        detect_format({"colour": 1})
    assert all(name in str(caught.value) for name in NAMES) and "data.columns.text=NAME" in str(caught.value)


def test_deep_nesting_is_damage():
    deep: object = "x"
    for _ in range(200_000):
        deep = [deep]
    with pytest.raises(BadRecord, match="nested too deeply"):
        read(answered(content="A", tool_calls=[CALL | {"arguments": deep}]))
    with pytest.raises(BadRecord):
        read({"text": deep})


# Files


@pytest.fixture
def source(tmp_path):
    """A source of a file with these lines."""

    def source(*lines, name="my.jsonl", columns=None):
        path = tmp_path / name
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("\n".join(texts), encoding="utf-8")
        return Source(path=str(path), columns=columns)

    return source


def read_source(source, columns=None):
    found, bad, formats = [], [], set()
    for chunk in open_source(source, columns or Columns(), False, print).chunks():
        parsed = parse_chunk(chunk)
        documents, damaged = parsed.documents, parsed.bad
        formats.add(chunk.format)
        found += documents
        bad += damaged
    return found, bad, formats


def test_a_bad_record_in_a_file_is_reported_with_its_line(source, tmp_path):
    good = {"prompt": "Q", "completion": "A"}
    found, bad, _ = read_source(source(good, "", "{oops", {"prompt": "Q", "completion": 3}, "[1]", "7", good))
    assert [document.where for document in found] == [f"{tmp_path}/my.jsonl:{line}" for line in (1, 7)]
    assert [where.rpartition(":")[2] for where, _ in bad] == ["3", "4", "5", "6"]
    assert [message.split(":")[0] for _, message in bad[:2]] == ["not valid JSON", "completion"]
    assert bad[2][1] == "expected a record with keys, found a list"
    assert bad[3][1] == "expected a record with keys, found a number"


def test_two_formats_in_a_file_are_an_error_that_names_both_and_their_lines(source, tmp_path):
    mixed = source({"prompt": "Q", "completion": "A"}, {"prompt": "Q", "completion": "A"}, {"text": "x"})
    with pytest.raises(UserError) as caught:
        read_source(mixed)
    file = f"{tmp_path}/my.jsonl"
    assert str(caught.value) == f"{file}:3: format text, but {file}:1 is prompt/completion; a file must have one format"


def test_two_files_may_have_two_formats(source, tmp_path):
    source({"prompt": "Q", "completion": "A"}, name="a.jsonl")
    source({"instruction": "Q", "output": "A"}, name="b.jsonl")
    found, _, formats = read_source(Source(path=str(tmp_path)))
    assert formats == {"prompt/completion", "alpaca"} and [document.messages for document in found] == [(Q, A)] * 2


def test_a_file_of_no_known_format_is_refused_with_its_line(source):
    strange = source({"colour": 1}, {"colour": 2})
    with pytest.raises(UserError, match=r"my\.jsonl:1: not a known format \(found colour\)"):
        make_preview(open_inputs(DataConfig(sources=[strange]), print))
    assert make_preview(open_inputs(DataConfig(sources=[strange], on_bad="skip"), print)).documents == []


# Columns

COLUMNS = (
    ({"text": "body"}, {"body": "T", "text": "no"}, "text"),
    ({"prompt": "ask", "completion": "say"}, {"ask": "Q", "say": "A", "text": "no"}, "prompt/completion"),
    ({"prompt": "a", "completion": "b", "system": "c"}, {"a": "Q", "b": "A", "c": "S"}, "prompt/completion"),
    ({"prompt": "a", "input": "b", "completion": "c"}, {"a": "Q", "b": "more", "c": "A"}, "prompt/completion"),
    ({"messages": "talk"}, {"talk": [_ASKED, _ONE]}, "messages"),
    ({"messages": "talk", "tools": "can"}, {"talk": [_ASKED, _ONE], "can": [FUNCTION]}, "messages"),
    ({"chosen": "good", "rejected": "bad"}, {"good": [_ASKED, _ONE], "bad": [_ASKED, _OTHER]}, "preference"),
    ({"prompt": "q", "chosen": "good", "rejected": "bad"}, {"q": "Q", "good": "A", "bad": "B"}, "preference"),
    ({"prompt": "q", "completion": "a", "history": "h"}, {"q": "Q", "a": "A", "h": [["Q", "A"]]}, "prompt/completion"),
)  # fmt: skip


@pytest.mark.parametrize(("columns", "record", "name"), COLUMNS, ids=lambda value: str(value)[:40])
def test_columns_say_what_other_names_hold(source, columns, record, name):
    everywhere = read_source(source(record), Columns(**columns))
    for_this_source = read_source(source(record, columns=Columns(**columns)))
    assert everywhere == for_this_source and everywhere[2] == {name} and not everywhere[1]
    assert detect_format(rename_columns(record, columns)) == name


def test_a_sources_own_columns_go_before_those_of_all(source):
    own = source({"a": "x", "b": "y"}, columns=Columns(text="b"))
    assert [document.text for document in read_source(own, Columns(text="a"))[0]] == ["y"]


def test_a_missing_column_is_reported_with_the_existing_ones(source):
    with pytest.raises(UserError, match=r"my\.jsonl:1: no column body \(it has text, url\)"):
        make_preview(
            open_inputs(DataConfig(sources=[source({"text": "x", "url": "y"})], columns=Columns(text="body")), print)
        )
    columns = Columns(prompt="ask", completion="say")
    with pytest.raises(UserError, match=r"my\.jsonl:1: no column say \(it has ask, told\)"):
        make_preview(open_inputs(DataConfig(sources=[source({"ask": "x", "told": "y"})], columns=columns), print))


def test_columns_work_for_tables_too(source):
    table = source("ask,say,more", "Q,A,", name="my.csv")
    found, bad, formats = read_source(table, Columns(prompt="ask", completion="say", input="more"))
    assert [document.messages for document in found] == [(Q, A)] and not bad and formats == {"prompt/completion"}


# Through to the artefact


@pytest.fixture
def ready(tmp_path, source):
    folder = tmp_path / "tokenizer"
    tokens = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    TokenizerBundle({"eos_token": "<|im_end|>"}, trained=train_bpe(["Q A"], 300, tokens)).save(folder, None, 64)

    def ready(*lines, **more):
        given = {"sources": [source(*lines)], "tokenizer": str(folder), "workers": 1, "eval_fraction": 0, **more}
        return prepare(DataConfig(**given), tmp_path / "prepared")

    return ready


@pytest.mark.parametrize("record", [listed[0][0] for listed in CHATS.values()], ids=list(CHATS))
def test_every_chat_format_gives_the_same_tokens(ready, record):
    artefact = ready(record)
    text = open_tokenizer(artefact.tokenizer).tokenizer.decode(artefact.train.tokens, skip_special_tokens=False)
    assert text == "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"


def test_a_bad_record_is_an_error_or_skipped_as_configured(ready, tmp_path):
    lines = ({"prompt": "Q", "completion": "A"}, {"prompt": "Q", "completion": 3})
    with pytest.raises(UserError, match=r"my\.jsonl:2: completion: .*1 of 2 records \(50\.00%\).*data\.on_bad=skip"):
        ready(*lines)
    assert not (tmp_path / "prepared").exists()
    artefact = ready(*lines, on_bad="skip")
    assert artefact.report["damaged"] == 1 and artefact.report["train"]["documents"] == 1
    assert artefact.report["damaged_examples"][0][0].endswith("my.jsonl:2")
    assert ready(*lines, max_bad=0.5).report["damaged"] == 1


def test_documents_that_differ_in_reasoning_or_tools_are_no_duplicates(ready):
    chat = openai(("user", "Q"), ("assistant", "A"))
    lines = (chat, {**chat, "tools": [FUNCTION]}, answered(content="A", reasoning_content="R"), chat)
    artefact = ready(*lines, clean={"duplicates": "exact"})
    assert artefact.report["train"]["documents"] == 3 and artefact.report["duplicates"] == 1


@pytest.mark.parametrize("place", ["~nobody-of-this-name/x.jinja", "x" * 300 + ".jinja"], ids=["no home", "too long"])
@pytest.mark.parametrize("key", ["sources", "tokenizer", "template"])
def test_a_place_that_cannot_be_is_refused_in_one_line(ready, key, place):
    given = {key: [Source(path=place)] if key == "sources" else place}
    with pytest.raises(UserError, match=f"data.{key}"):
        ready({"prompt": "Q", "completion": "A"}, **given)


def test_a_long_text_without_a_space_does_not_keep_a_new_tokenizer_busy(ready):
    began = time.monotonic()
    ready({"text": "=" * 100_000}, {"text": "a few words"}, tokenizer="bpe", vocab_size=320)
    assert time.monotonic() - began < 10


# Real data, where it is at hand

REAL = {
    "alpaca_en_demo.json": "alpaca",
    "alpaca_zh_demo.json": "alpaca",
    "identity.json": "alpaca",
    "c4_demo.jsonl": "text",
    "dpo_en_demo.json": "preference",
    "glaive_toolcall_en_demo.json": "sharegpt",
    "v1_sft_demo.jsonl": "messages",
}
_DATA, _TOKENIZER = os.environ.get("SOJOURN_REAL_DATA"), os.environ.get("SOJOURN_REAL_TOKENIZER")
with_real_data = pytest.mark.skipif(not _DATA, reason="SOJOURN_REAL_DATA names no folder of real data")


def real_documents(name):
    found, bad, formats = read_source(Source(path=str(Path(str(_DATA)) / "chat" / name)))
    assert not bad
    return found, formats


@with_real_data
@pytest.mark.parametrize(("name", "format"), REAL.items())
def test_formats_of_real_files_are_detected(name, format):
    found, formats = real_documents(name)
    assert formats == {format} and len(found) > 50


@with_real_data
@pytest.mark.skipif(not _TOKENIZER, reason="SOJOURN_REAL_TOKENIZER names no tokenizer")
def test_real_chats_get_the_tokens_that_plain_transformers_gives_them():
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(_TOKENIZER))
    words = open_tokenizer(str(_TOKENIZER))
    template = words.template("auto")
    tokenize = SpanTokenizer(words.tokenizer, words.added_tokens, template)
    sides = [
        (side, document.tools)
        for name, format in REAL.items()
        if format != "text"
        for document in islice(real_documents(name)[0], 400)
        for side in (document.messages, document.rejected)
        if side
    ]
    assert len(sides) >= 2000
    for messages, tools in sides[:2000]:
        ids, mask, _ = tokenize([SpannedText(*template.spans(messages, tools))])
        turns = [{"role": m.role, "content": m.content} for m in template.adapted(messages, tools)[0]]
        assert ids.tolist() == theirs.apply_chat_template(turns, tokenize=True, return_dict=False)
        assert 0 < mask.sum() < len(mask)
