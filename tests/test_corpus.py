"""Files as people have them: which rows they become, what of each is trained on, and what is reported as not used.

A row is written with its trained tokens between ‹ and ›; S:, U:, and A: begin a turn of system, user and assistant, ;
ends it, and $ is the end of a text. The first token of a row is never trained on.
"""
# ruff: noqa: E501 - the table below reads best with one case a line

import gzip
import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from sojourn.config.data import DataConfig, Source
from sojourn.config.schema import ModelConfig, RunConfig
from sojourn.data.prepare import prepare
from sojourn.data.settings import data_settings
from sojourn.data.sources.dataset_info import named_sources
from sojourn.data.tokenize.tokenizer import open_tokenizer
from sojourn.errors import UserError

SHORT = {"<|im_start|>system\n": "S:", "<|im_start|>user\n": "U:", "<|im_start|>assistant\n": "A:",
         "<|im_end|>›\n": ";›", "<|im_end|>\n": ";", "<|endoftext|>": "$"}  # fmt: skip


@dataclass
class Case:
    file: str
    content: Any  # text, bytes, or records
    rows: list[str] = field(default_factory=list)
    unused: tuple[str, ...] = ()
    left_out: dict[str, int] = field(default_factory=dict)
    error: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)  # other files
    source: str = ""


def u(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def a(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def info(**entry: Any) -> dict[str, Any]:
    """A dataset_info.json whose `mine` is the case's file."""
    return {"data/dataset_info.json": json.dumps({"mine": {"file_name": "f.json", **entry}, "no": {"file_name": "x"}})}


QA = [{"prompt": "Q", "completion": "yes"}]
ROW = ["U:Q;A:‹yes;›"]
TWO = ["U:a;A:no;U:b;A:‹yes;›"]
GBK = "问：今天天气怎么样？答：今天天气很好。"
OTHER_TAGS = [{"talk": [{"who": "Q", "says": "Q"}, {"who": "R", "says": "yes"}], "n": 1}]
TAGS = {"role_tag": "who", "content_tag": "says", "user_tag": "Q", "assistant_tag": "R"}
CASES = {
    # Formats
    "text": Case("a.jsonl", [{"text": "Hello"}], ["H‹ello$›"]),
    "text with a class": Case("a.jsonl", [{"text": "Hello", "label": 0}], ["H‹ello$›"], ("label",)),
    "C4": Case("a.jsonl", [{"text": "Hi", "url": "x", "timestamp": "t"}], ["H‹i$›"], ("url", "timestamp")),
    "txt": Case("a.txt", "One.\n\nTwo.", ["O‹ne.\n\nTwo.$›"]),
    "txt with separators": Case("a.txt", "One.<|endoftext|>Two.", ["O‹ne.$›", "T‹wo.$›"]),
    "txt with headings": Case("a.txt", " = Aa = \n\nx\n = Bb = \n\ny\n", ["=‹ Aa = \n\nx$›", "=‹ Bb = \n\ny$›"]),
    "txt with long paragraphs": Case("a.txt", "x" * 4000 + "\n\ny", ["x‹" + "x" * 3999 + "$›", "y‹$›"]),
    "Alpaca": Case("a.json", [{"instruction": "Q", "input": "", "output": "yes"}], ROW),
    "Alpaca with input": Case("a.json", [{"instruction": "Q", "input": "in", "output": "yes"}], ["U:Q\nin;A:‹yes;›"]),
    "Alpaca with history": Case("a.json", [{"instruction": "Q", "output": "yes", "system": "s", "history": [["a", "b"]]}],
                                ["S:s;U:a;A:‹b;›U:Q;A:‹yes;›"]),
    "Alpaca with two answers": Case("a.json", [{"instruction": "Q", "output": "yes", "response": "no"}], ROW, ("response",)),
    "ShareGPT": Case("a.json", [{"id": "1", "conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "yes"}]}],
                     ROW, ("id",)),
    "ShareGPT with tools": Case("a.json", [{"conversations": [
        {"from": "human", "value": "Q"}, {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
        {"from": "observation", "value": "3"}, {"from": "gpt", "value": "yes"}], "tools": "[]"}],
        ['U:Q;A:‹<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>;›U:<tool_response>\n3\n</tool_response>;A:‹yes;›']),
    "messages": Case("a.jsonl", [{"messages": [u("Q"), a("yes")]}], ROW),
    "messages of a table": Case("a.csv", 'messages\n"[{""role"": ""user"", ""content"": ""Q""}, {""role"": ""assistant"", ""content"": ""yes""}]"\n', ROW),
    "messages with names": Case("a.jsonl", [{"messages": [{**u("Q"), "name": "Bo"}, a("yes", id=7, audio=None)]}], ROW,
                                ("messages.name", "messages.id")),
    "prompt and completion": Case("a.jsonl", QA, ROW),
    "prompt and completion of messages": Case("a.jsonl", [{"prompt": [u("Q")], "completion": [a("yes")]}], ROW),
    "question and answer": Case("a.jsonl", [{"question": "Q", "answer": "yes", "source": "s"}], ROW, ("source",)),
    "CSV with pandas' index": Case("a.csv", ",question,answer\n0,Q,yes\n", ROW, ("",)),
    "TSV": Case("a.tsv", "question\tanswer\nQ\tyes\n", ROW),
    "gzip": Case("a.jsonl.gz", gzip.compress(json.dumps(QA[0]).encode()), ROW),
    "byte order mark and CRLF": Case("a.jsonl", b"\xef\xbb\xbf" + json.dumps(QA[0]).encode() + b"\r\n", ROW),
    "preference": Case("a.jsonl", [{"prompt": "Q", "chosen": "yes", "rejected": "no", "score": 3}], ["U:Q;A:‹yes;›U:Q;A:‹no;›"], ("score",)),
    "chosen_messages": Case("a.jsonl", [{"chosen_messages": [u("Q"), a("yes")], "rejected_messages": [u("Q"), a("no")]}],
                            ["U:Q;A:‹yes;›U:Q;A:‹no;›"]),
    "null columns are nobody's": Case("a.jsonl", [{**QA[0], "id": None, "tags": []}], ROW),
    # Not to be learned
    "KTO": Case("a.jsonl", [{**QA[0], "label": True}, {"prompt": "Q", "completion": "bad", "label": False}], ROW, (), {"label_false": 1}),
    "KTO with messages": Case("a.jsonl", [{"messages": [u("Q"), a("bad")], "label": False}, {"messages": [u("Q"), a("yes")], "label": True}],
                              ROW, (), {"label_false": 1}),
    "KTO in CSV": Case("a.csv", "prompt,completion,label\nQ,yes,True\nQ,bad,False\n", ROW, (), {"label_false": 1}),
    "class of an answer": Case("a.jsonl", [{**QA[0], "label": "polite"}], ROW, ("label",)),
    "record of weight 0": Case("a.jsonl", [{**QA[0], "weight": 1}, {"prompt": "Q", "completion": "no", "weight": 0}], ROW, (), {"weight_false": 1}),
    "record of train false": Case("a.jsonl", [QA[0], {"prompt": "Q", "completion": "no", "train": False}], ROW, (), {"train_false": 1}),
    "train that names a split": Case("a.jsonl", [{**QA[0], "train": "fold 3"}], ROW, ("train",)),
    "record of weight 0.5": Case("a.jsonl", [{**QA[0], "weight": 0.5}], error="weight 0.5: only 0 and 1"),
    "turn of weight 0": Case("a.jsonl", [{"messages": [u("a"), a("no", weight=0), u("b"), a("yes", weight=1)]}], TWO),
    "turn of train false": Case("a.jsonl", [{"messages": [u("a"), a("no", train=False), u("b"), a("yes")]}], TWO),
    "turn of loss false": Case("a.jsonl", [{"messages": [u("a"), a("no", loss=False), u("b"), a("yes", loss=True)]}], TWO),
    "ShareGPT turn of train false": Case("a.jsonl", [{"conversations": [
        {"from": "human", "value": "a"}, {"from": "gpt", "value": "no", "train": False},
        {"from": "human", "value": "b"}, {"from": "gpt", "value": "yes", "train": True}]}], TWO),
    "turn of train false where all is trained": Case(
        "a.jsonl", [{"messages": [u("a"), a("no", train=False), u("b"), a("yes")]}],
        ["<|im_start|>‹user\na;A:›no<|im_end|>‹\nU:b;A:yes;›"], settings={"train_on": "all"}),
    "turn of weight 0.3": Case("a.jsonl", [{"messages": [u("Q"), a("yes", weight=0.3)]}], error="weight 0.3: only 0 and 1"),
    # Media
    "images": Case("a.jsonl", [{"messages": [u("<image>Q"), a("yes")], "images": ["a.png"]}], error="images: media cannot be trained on"),
    "LLaVA": Case("a.json", [{"image": "a.jpg", "conversations": [{"from": "human", "value": "<image>\nQ"}, {"from": "gpt", "value": "y"}]}],
                  error="image: media cannot be trained on"),
    "audios": Case("a.jsonl", [{"messages": [u("<audio>Q"), a("yes")], "audios": ["a.wav"]}], error="audios: media cannot be trained on"),
    "videos": Case("a.jsonl", [{"messages": [u("<video>Q"), a("yes")], "videos": ["a.mp4"]}], error="videos: media cannot be trained on"),
    "image_url": Case("a.jsonl", [{"messages": [u([{"type": "image_url", "image_url": {"url": "x"}}]), a("yes")]}],
                      error="content part of type “image_url”: only text can be read, no media"),
    "no images after all": Case("a.jsonl", [{"messages": [u("Q"), a("yes")], "images": []}], ROW),
    "media left out": Case("a.jsonl", [QA[0], {**QA[0], "images": ["x"]}], ROW, settings={"on_bad": "skip"}),
    "the text of a picture book": Case("a.jsonl", [{**QA[0], "images": ["x"]}], ROW, ("images",),
                                       settings={"columns": {"prompt": "prompt", "completion": "completion"}}),
    # Reasoning
    "reasoning_content": Case("a.jsonl", [{"messages": [u("Q"), a("yes", reasoning_content="hm")]}], ["U:Q;A:‹<think>\nhm\n</think>\n\nyes;›"]),
    "think in the content": Case("a.jsonl", [{"messages": [u("Q"), a("<think>hm</think>yes")]}], ["U:Q;A:‹<think>hm</think>yes;›"]),
    "parts of reasoning": Case("a.jsonl", [{"messages": [u("Q"), a([{"type": "reasoning", "text": "hm"}, {"type": "text", "text": "yes"}])]}],
                               ["U:Q;A:‹<think>\nhm\n</think>\n\nyes;›"]),
    "parts of thinking": Case("a.jsonl", [{"messages": [u("Q"), a([{"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "yes"}])]}],
                              ["U:Q;A:‹<think>\nhm\n</think>\n\nyes;›"]),
    "reasoning beside an answer": Case("a.jsonl", [{"question": "Q", "answer": "yes", "reasoning_content": "hm"}], ["U:Q;A:‹<think>\nhm\n</think>\n\nyes;›"]),
    # Columns, tags, registries
    "columns of another name": Case("a.jsonl", [{"ask": "Q", "told": "yes", "by": "me"}], ROW, ("by",),
                                    settings={"columns": {"prompt": "ask", "completion": "told"}}),
    "label of another name": Case("a.jsonl", [{"ask": "Q", "told": "no", "good": False}, {"ask": "Q", "told": "yes", "good": True}], ROW, (),
                                  {"label_false": 1}, settings={"columns": {"prompt": "ask", "completion": "told", "label": "good"}}),
    "dataset_info, Alpaca": Case("data/f.json", [{"instruction": "Q", "input": "", "output": "yes"}], ROW, source="mine", more=info()),
    "dataset_info, columns": Case("data/f.json", [{"ask": "Q", "told": "yes", "x": 1}], ROW, ("x",), source="mine",
                                  more=info(columns={"prompt": "ask", "response": "told"})),
    "dataset_info, tags": Case("data/f.json", OTHER_TAGS, ROW, ("n",), source="mine",
                               more=info(formatting="sharegpt", columns={"messages": "talk"}, tags=TAGS)),
    "dataset_info, ranking": Case("data/f.json", [{"conversations": [{"from": "human", "value": "Q"}], "chosen": {"from": "gpt", "value": "yes"},
                                                   "rejected": {"from": "gpt", "value": "no"}}], ["U:Q;A:‹yes;›U:Q;A:‹no;›"], source="mine",
                                  more=info(formatting="sharegpt", ranking=True, columns={"messages": "conversations", "chosen": "chosen", "rejected": "rejected"})),
    "dataset_info, KTO": Case("data/f.json", [{"messages": [u("Q"), a("no")], "ok": False}, {"messages": [u("Q"), a("yes")], "ok": True}], ROW, (),
                              {"label_false": 1}, source="mine", more=info(formatting="sharegpt", columns={"messages": "messages", "kto_tag": "ok"})),
    "dataset_info, media": Case("data/f.json", QA, source="mine", error="mine: it has images: media cannot be trained on",
                                more=info(columns={"images": "images"})),
    "dataset_info, elsewhere": Case("data/f.json", QA, ROW, source="mine", settings={"dataset_dir": "data"}, more=info()),
    "dataset_info, misspelt": Case("data/f.json", QA, source="mein", settings={"dataset_dir": "data"}, more=info(), error="mein: not in data/dataset_info.json"),
    "dataset_info, its folder": Case("data/f.json", QA, source="data", more=info(), error="name its data sets: data.sources=mine data.dataset_dir=data"),
    "two names": Case("data/f.json", QA, ROW * 2, source="mine,data/f.json", more=info()),
    "marks of turns that are no targets": Case("a.jsonl", [{"messages": [{"role": "system", "content": "s", "weight": 1},
                                               {"role": "user", "content": "Q", "train": True}, a("yes", train=True)]}],
                                               ["S:s;U:Q;A:‹yes;›"], ("messages.weight of system turns", "messages.train of user turns")),
    "a question marked as no target": Case("a.jsonl", [{"messages": [{"role": "user", "content": "Q", "train": False}, a("yes")]}], ROW),
    # Encodings
    "GBK": Case("a.txt", GBK.encode("gbk"), error="looks like GBK, convert it with data.encoding=gbk"),
    "GBK in JSON lines": Case("a.jsonl", json.dumps({"text": GBK}, ensure_ascii=False).encode("gbk"), error="convert it with data.encoding=gbk"),
    "GBK in a JSON list": Case("a.json", json.dumps([{"text": GBK}], ensure_ascii=False).encode("gbk"), error="convert it with data.encoding=gbk"),
    "GBK in CSV": Case("a.csv", f"text\n{GBK}\n".encode("gbk"), error="convert it with data.encoding=gbk"),
    "GBK converted": Case("a.jsonl", json.dumps({"prompt": "问", "completion": GBK}, ensure_ascii=False).encode("gbk"), [f"U:问;A:‹{GBK};›"],
                          settings={"encoding": "gbk"}),
    "UTF-8 among GBK": Case("a.jsonl", [{"prompt": "问", "completion": GBK}], [f"U:问;A:‹{GBK};›"], settings={"encoding": "gbk"}),
    "neither": Case("a.txt", b"\xff\xff\xff", error="neither UTF-8 nor gb18030", settings={"encoding": "gbk"}),
    "UTF-16 converted": Case("a.csv", "question,answer\nQ,yes\n".encode("utf-16"), ROW, settings={"encoding": "utf-16"}),
    "Latin-1": Case("a.txt", "café crème".encode("latin-1"), error="save it as UTF-8"),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """One token for each byte, and ChatML's."""
    home = tmp_path_factory.mktemp("bytes")
    (home / "a.txt").write_text("x")
    data = DataConfig(sources=[Source(path=str(home / "a.txt"))], vocab_size=256, eval_fraction=0.0)
    return prepare(data, home / "p").tokenizer


def write(path, content) -> str:
    path.parent.mkdir(exist_ok=True)
    if isinstance(content, list):
        whole = json.dumps(content, ensure_ascii=False)
        content = whole if path.suffix == ".json" else "\n".join(json.dumps(one, ensure_ascii=False) for one in content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def marked(tokenizer, ids, mask) -> str:
    parts, start = [], 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or mask[end] != mask[start]:
            text = tokenizer.decode(ids[start:end].tolist(), skip_special_tokens=False)
            parts.append(f"‹{text}›" if mask[start] else text)
            start = end
    text = "".join(parts)
    for long, short in SHORT.items():
        text = text.replace(long, short)
    return text


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_file_becomes_these_rows(case, tokenizer, home):
    for name, content in {case.file: case.content, **case.more}.items():
        write(home / name, content)
    shown: list[dict[str, Any]] = []
    data = DataConfig.model_validate({
        "sources": case.source or case.file, "tokenizer": str(tokenizer), "eval_fraction": 0.0, "max_length": 5000,
        "packing": "off", **case.settings,
    })  # fmt: skip
    config = RunConfig(model=ModelConfig(depth=2), data=data)
    if case.error:
        with pytest.raises(UserError) as raised:
            prepare(data_settings(config), home / "p")
        assert case.error in str(raised.value) and "\n" not in str(raised.value)
        return
    artefact = prepare(data_settings(config), home / "p", show=lambda formats, examples: shown.extend(examples))
    fast = open_tokenizer(tokenizer).tokenizer
    rows = [artefact.train.row(row)[:2] for row in range(len(artefact.train))]
    assert sorted(marked(fast, *row) for row in rows) == sorted(case.rows)
    report = artefact.report
    assert tuple(name for source in report["unused_columns"] for name in source["columns"]) == case.unused
    assert report["left_out"] == case.left_out
    trained = [example["text"][start:end] for example in shown for start, end in example["spans"]]
    targets = [fast.decode(ids[mask == 1].tolist(), skip_special_tokens=False) for ids, mask in rows]
    assert trained and "".join(trained) in "".join(targets)


def test_a_data_set_of_a_folder_in_the_users_home_comes_before_a_file_of_that_name(home, monkeypatch):
    monkeypatch.setenv("HOME", str(home))
    write(home / "lf/dataset_info.json", json.dumps({"mine": {"file_name": "f.json"}}))
    write(home / "mine", "not this one")
    [source] = named_sources([Source(path="mine")], "~/lf")
    assert source.path == str(home / "lf/f.json")
