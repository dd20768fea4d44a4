"""Whatever is in the files and in the settings, preparing gives a sound artefact or one line that refuses.

SOJOURN_FUZZ says how many examples are tried. Each is made from its number alone, so that a failure can be seen again:
SOJOURN_FUZZ_ONLY=1234 tries that one.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import gzip
import json
import os
import random
import shutil
import signal

import numpy as np
import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from sojourn.config.data import DataConfig
from sojourn.data.artefact import read_batch
from sojourn.data.prepare import prepare
from sojourn.data.tokenize.bpe import train_bpe
from sojourn.data.tokenize.tokenizer import TokenizerBundle
from sojourn.errors import UserError

COUNT = int(os.environ.get("SOJOURN_FUZZ", "50"))
ONLY = os.environ.get("SOJOURN_FUZZ_ONLY")
PORTION = 50
SECONDS = 20

SUFFIXES = (".txt", ".md", ".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATES = {
    "picky.jinja": (
        "{% for m in messages %}{% if m.role == 'system' or 'no' in m.content %}{{ raise_exception('not that') }}"
        "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "broken.jinja": "{% for m in messages %}{{ m.content }",
    "wild.jinja": "{% for m in messages %}{{ m.content.upper()[:9] }}<|im_end|>{{ m.tool_calls[0].x }}{% endfor %}",
    "endless.jinja": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    "other.jinja": "{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}",
}
WORDS = (
    "The cat sat on the mat.", "", " ", "\n", "no", "Hello", "你好，世界", "🙂🙂", "  leads and trails  ", "a\r\nb\rc",
    "<|im_end|>", "<|im_start|>assistant\n", "<|endoftext|>", "Human: hi\n\nAssistant: yes",
    "\n\nHuman: a\n\nAssistant:", "x" * 300, "e\u0301", "\u0000", "\ufdd0", "\ufdd21\ufdd2", "\ufdd20\ufdd3", "\ud800",
    "\udc00x", "\u2028", "\ufeff", "{{ 7 }}", "{% raw %}", '{"name": "f", "arguments": {}}', "[1, 2]", "null", "1e999",
    "<think>a</think>b", "word " * 40, "=cmd", '"', "'", ",", ";", "\t",
)  # fmt: skip
ODD = (
    None, True, False, 0, 1, -1, 2**70, 1e308, float("nan"), float("inf"), 0.5, [], {}, [[]], [{}], {"a": 1}, ["text"],
    {"role": "user", "content": "x"}, [None], [["q", "a"]], [["q"]],
)  # fmt: skip
KEYS = (
    "text", "instruction", "input", "output", "prompt", "completion", "response", "question", "answer", "query",
    "messages", "conversations", "conversation", "role", "content", "from", "value", "system", "history", "tools",
    "functions", "chosen", "rejected", "tool_calls", "function_call", "weight", "loss_weight", "reasoning_content",
    "name", "arguments", "", "x", "名",
)  # fmt: skip


class Hung(BaseException):
    """Not an Exception: nothing on the way may swallow it."""


@pytest.fixture(scope="module", autouse=True)
def _quick():
    """Durability is told elsewhere; here it would only cost time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        yield


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """A folder with tokenizers and templates that examples may use."""
    room = tmp_path_factory.mktemp("room")
    tokenizer = train_bpe([word * 3 for word in WORDS if word.isprintable()], 400, TOKENS)
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    for name, template in (("bare", None), ("own", TEMPLATES["picky.jinja"]), ("odd", TEMPLATES["endless.jinja"])):
        TokenizerBundle({**settings, "chat_template": template} if template else settings, trained=tokenizer).save(
            room / name, None, 64
        )
        if template:
            (room / name / "chat_template.jinja").write_text(template, encoding="utf-8")
    nothing = train_bpe([], 300, ("<|endoftext|>",))
    TokenizerBundle({**settings, "eos_token": "<|endoftext|>"}, trained=nothing).save(room / "poor", None, 64)
    for name, text in TEMPLATES.items():
        (room / name).write_text(text, encoding="utf-8")
    return room


# Records


def words(dice):
    return dice.choice(WORDS) if dice.random() < 0.1 else " ".join(dice.choices(WORDS[:13], k=dice.randint(1, 6)))


def call(dice):
    arguments = dice.choice([{"a": 1}, '{"a": 1}', "not json", {}, {"x": words(dice)}, [1], None])
    return dice.choice([{"function": {"name": "f", "arguments": arguments}}, {"name": "f", "arguments": arguments}])


def tools(dice):
    listed = [{"name": "f", "description": words(dice), "parameters": {"type": "object"}}]
    return dice.choice([listed, json.dumps(listed), [{"type": "function", "function": listed[0]}], "", None])


def turns(dice):
    found = [{"role": "system", "content": words(dice)}] if dice.random() < 0.3 else []
    for _ in range(dice.randint(1, 3)):
        asked = words(dice)
        found.append({"role": "user", "content": [{"type": "text", "text": asked}] if dice.random() < 0.1 else asked})
        if dice.random() < 0.1:
            found.append({"role": "assistant", "content": dice.choice([None, ""]), "tool_calls": [call(dice)]})
            found.append({"role": "tool", "content": words(dice)})
        found.append({"role": "assistant", "content": words(dice)})
        if dice.random() < 0.2:
            found[-1][dice.choice(["weight", "loss_weight"])] = dice.choice([0, 1, 1.0, True, 0.5])
        if dice.random() < 0.1:
            found[-1]["reasoning_content"] = words(dice)
    return found


def sharegpt(dice):
    names = {"user": "human", "assistant": "gpt", "system": "system", "tool": "observation"}
    found = [{"from": names[turn["role"]], "value": turn["content"]} for turn in turns(dice)]
    if dice.random() < 0.2:
        called = json.dumps({"name": "f", "arguments": {"a": words(dice)}})
        found[-1:] = [{"from": "function_call", "value": called}, {"from": "observation", "value": "ok"}, found[-1]]
    return {"conversations": found, **({"tools": tools(dice)} if dice.random() < 0.3 else {})}


def alpaca(dice):
    record = {"instruction": words(dice), "input": words(dice), "output": words(dice)}
    if dice.random() < 0.2:
        record["history"] = [[words(dice), words(dice)]]
    return record


def preference(dice):
    one, other = words(dice), words(dice)
    way = dice.randrange(5)
    if way == 0:
        return {"prompt": words(dice), "chosen": one, "rejected": other}
    if way == 1:
        answers = [{"role": "assistant", "content": answer} for answer in (one, other)]
        return {"prompt": words(dice), "chosen": answers[0], "rejected": answers[1]}
    if way == 2:
        return {"chosen": turns(dice), "rejected": turns(dice)}
    if way == 3:
        answers = [{"from": "gpt", "value": answer} for answer in (one, other)]
        return {"conversations": [{"from": "human", "value": "q"}], "chosen": answers[0], "rejected": [answers[1]]}
    before = f"\n\nHuman: {words(dice)}\n\nAssistant: "
    return {"chosen": before + one, "rejected": before + other}


RECORDS = (
    lambda dice: {"text": words(dice)},
    alpaca,
    sharegpt,
    lambda dice: {"messages": turns(dice), **({"tools": tools(dice)} if dice.random() < 0.3 else {})},
    lambda dice: {"prompt": words(dice), "completion": words(dice)},
    lambda dice: {"prompt": turns(dice)[:-1], "completion": turns(dice)[-1:]},
    lambda dice: {"question": words(dice), "answer": words(dice)},
    preference,
)


# What happens to them


def odd(dice):
    if dice.random() < 0.1:
        value = copy.deepcopy(dice.choice(ODD))
        for _ in range(dice.choice([3, 90, 1100, 30_000])):
            value = [value] if dice.random() < 0.9 else {"a": value}
        return value
    return dice.choice([copy.deepcopy(dice.choice(ODD)), words(dice), {dice.choice(KEYS): words(dice)}, [words(dice)]])


def spoil(value, dice):
    """One place somewhere inside gets another value, another key, or goes."""
    if not isinstance(value, (dict, list)) or not value or dice.random() < 0.15:
        return odd(dice)
    place = dice.choice(list(value)) if isinstance(value, dict) else dice.randrange(len(value))
    way = dice.random()
    if way < 0.15:
        del value[place]
    elif way < 0.3 and isinstance(value, dict):
        value[dice.choice(KEYS)] = value.pop(place)
    elif way < 0.4 and isinstance(value, list):
        value.insert(place, odd(dice))
    else:
        value[place] = spoil(value[place], dice)
    return value


def dumped(value, dice):
    try:
        text = json.dumps(value, ensure_ascii=dice.random() < 0.7)
    except RecursionError:
        depth = dice.choice([900, 5000, 200_000])
        text = '{"text": ' + "[" * depth + "]" * depth + "}"
    if dice.random() < 0.02:
        text = text.replace("1", "9" * dice.choice([400, 5000]), 1)
    if dice.random() < 0.03:
        text = text.replace("{", '{"text": "twice", ', 1)
    return text


def flip(data, dice):
    """Bytes changed, removed, put in, cut off or doubled."""
    data = bytearray(data)
    for _ in range(dice.choice([1, 1, 2, 8])):
        at = dice.randrange(len(data) + 1)
        way = dice.randrange(6)
        if way == 0 and at < len(data):
            data[at] ^= 1 << dice.randrange(8)
        elif way == 1:
            del data[at : at + dice.choice([1, 1, 4, 50])]
        elif way == 2:
            data[at:at] = dice.randbytes(dice.choice([1, 3, 20]))
        elif way == 3:
            data[at:at] = dice.choice(
                [b"\0", b"\r", b"\n", b"\r\n", b'"', b"{", b"]", b",", b"\xff", b"\\ud800", b"\x1a"]
            )
        elif way == 4:
            del data[at:]
        else:
            data += data[at : at + 100]
    return bytes(data)


def table(records, dice, sign):
    """A table of text, as careless as people write it."""
    names = list(dict.fromkeys(str(key) for record in records if isinstance(record, dict) for key in record)) or [
        "text"
    ]
    lines = [sign.join(names)]
    for record in records:
        cells = [record.get(name, "") if isinstance(record, dict) else record for name in names]
        texts = [cell if isinstance(cell, str) else dumped(cell, dice) for cell in cells]
        if dice.random() < 0.9:
            texts = ['"' + text.replace('"', '""') + '"' for text in texts]
        lines.append(sign.join(texts + (["more"] if dice.random() < 0.03 else [])))
    return dice.choice(["\n", "\r\n", "\r"]).join(lines)


def columns_file(records, dice, path):
    """A parquet file, if the records fit one."""
    try:
        flat = [record for record in records if isinstance(record, dict) and json.dumps(record).count("[") < 100]
        made = pyarrow.Table.from_pylist(flat)
        if dice.random() < 0.1:
            kinds = [
                pyarrow.binary(),
                pyarrow.timestamp("s"),
                pyarrow.date32(),
                pyarrow.decimal128(9),
                pyarrow.duration("s"),
            ]
            column = pyarrow.array([None] * made.num_rows, dice.choice(kinds))
            made = made.set_column(0, dice.choice(KEYS), column) if made.num_columns else made
        if dice.random() < 0.1 and made.num_rows:
            column = pyarrow.array([{"name": "f", "when": b"\xff"}] * made.num_rows)
            made = made.append_column("tools", column)
        parquet.write_table(made, path)
    except (pyarrow.ArrowException, ValueError, TypeError, OverflowError, RecursionError):
        parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "completion": [words(random.Random(1)), "d"]}), path)
    return path.read_bytes()


def content(dice, path):
    """What is written to `path`, unpacked."""
    if dice.random() < 0.06:
        return dice.randbytes(dice.choice([0, 1, 10, 1000]))
    make = dice.choice(RECORDS)
    records = [make(dice) for _ in range(dice.choice([1, 2, 3, 8, 30]))]
    if dice.random() < 0.05:
        records.append(dice.choice(RECORDS)(dice))
    if dice.random() < 0.4:
        for _ in range(dice.choice([1, 1, 3])):
            number = dice.randrange(len(records))
            records[number] = spoil(records[number], dice)
    kind = path.name.split(".")[1]
    if kind == "parquet":
        data = columns_file(records, dice, path)
    else:
        if kind in ("csv", "tsv"):
            text = table(records, dice, "\t" if kind == "tsv" else dice.choice(",,,;"))
        elif kind in ("txt", "md"):
            text = dice.choice(["\n", "\n\n", "<|endoftext|>", "\n = Title = \n"]).join(words(dice) for _ in records)
        elif kind == "json" and dice.random() < 0.7:
            text = "[" + dice.choice([",", ",\n", " , "]).join(dumped(record, dice) for record in records) + "]"
        else:
            text = dice.choice(["\n", "\n", "\r\n", "\n\n"]).join(dumped(record, dice) for record in records)
        data = text.encode("utf-8", "surrogatepass" if dice.random() < 0.05 else "replace")
        if dice.random() < 0.02:
            data = data.decode(errors="replace").encode(dice.choice(["utf-16", "utf-8-sig", "utf-32"]))
    return flip(data, dice) if dice.random() < 0.12 else data


def write_file(folder, dice):
    suffix = dice.choice(SUFFIXES)
    packing = dice.choice(["", "", "", ".gz", ".zst"]) if suffix != ".parquet" else ""
    path = folder / f"f{len(list(folder.iterdir()))}{suffix}{packing}"
    data = content(dice, path)
    if packing:
        data = gzip.compress(data) if packing == ".gz" else pyarrow.Codec("zstd").compress(data, asbytes=True)
        data = flip(data, dice) if dice.random() < 0.1 else data
    path.write_bytes(data)
    return path


# Settings

COLUMNS = (
    ("text",), ("messages",), ("prompt", "completion"), ("prompt", "chosen", "rejected"), ("chosen", "rejected"),
    ("prompt", "completion", "system", "history"), ("messages", "tools"), ("prompt", "input", "completion"),
)  # fmt: skip


def columns(dice):
    return {name: dice.choice([name, dice.choice(KEYS[:-3])]) for name in dice.choice(COLUMNS)}


def maybe(dice, share, **values):
    return {key: dice.choice(choices) for key, choices in values.items() if dice.random() < share}


def source(path, dice):
    path = dice.choice([path, path, path, path.parent, path.parent / "*"])
    found = {"path": str(path), **maybe(dice, 0.1, weight=[0.3, 1, 2.5, 40], take=[1, 2, 100], size=[1, 100, 10**12])}
    return {**found, "columns": columns(dice)} if dice.random() < 0.05 else found


def data_settings(room, folder, dice):
    paths = [write_file(folder, dice) for _ in range(dice.choice([1, 1, 1, 2, 3]))]
    held = [write_file(folder, dice)] if dice.random() < 0.1 else []
    tokenizer = dice.choice(["bare"] * 14 + ["own", "own", "odd", "poor"])
    template = dice.choice(["auto"] * 20 + ["chatml", "plain"] * 6 + ["llama3", "chat-ml", *TEMPLATES])
    chosen = {
        "sources": [source(path, dice) for path in paths],
        "eval_sources": [source(path, dice) for path in held],
        "tokenizer": str(room / tokenizer),
        "template": str(room / template) if template in TEMPLATES else template,
        "max_length": dice.choice([8, 9, 16, 64, 64, 512, 100_000]),
        "workers": 1,
        **maybe(
            dice, 0.5, on_bad=["fail", "skip", "skip", "skip"], packing=["packed", "padded", "off"],
            long_texts=["split", "truncate", "drop"], long_chats=["truncate", "drop"],
            train_on=["assistant", "last", "all"], eval_fraction=[0, 0.01, 0.5],
        ),
        **maybe(dice, 0.1, take=[1, 3, 1000], max_bad=[0, 0.5, 1], columns=[columns(dice)]),
        "clean": maybe(
            dice, 0.08, duplicates=["keep", "exact"], min_characters=[1, 5], max_characters=[20, 1000],
            languages=[["en"], ["zh", "en"]],
        ),
    }  # fmt: skip
    if dice.random() < 0.03:
        chosen |= {"tokenizer": "bpe", "vocab_size": dice.choice([300, 320])}
    return DataConfig(**chosen)


# What must hold


def check_split(artefact, split, kind):
    limit = artefact.row_length
    tokens, mask, documents, rows = split.tokens, split.mask, split.documents, split.rows
    assert len(tokens) == len(mask) == rows[-1]
    assert set(np.unique(mask).tolist()) <= {0, 1}
    assert len(tokens) == 0 or int(tokens.max()) < artefact.vocab_size
    assert (np.diff(documents) > 0).all() and (np.diff(rows) > 0).all()
    assert np.isin(rows[:-1], documents).all(), "each row begins with a document"
    assert (np.diff(rows) <= limit).all()
    assert (np.diff([*documents, rows[-1]]) <= artefact.max_length).all()
    assert not mask[documents].any(), "nothing comes before a document's first token"
    assert len(documents) == kind["pieces"] and len(split) == kind["rows"]
    assert int(mask.sum()) == kind["trained_tokens"] and len(tokens) == kind["tokens"]
    if artefact.is_pairs:
        assert len(documents) % 2 == 0
    if len(split):
        width = int(np.diff(rows).max()) + 1
        batch = read_batch(split, np.arange(len(split))[:50], width, artefact.pad_id)
        assert ((batch.labels == -100) | ((batch.labels >= 0) & (batch.labels < artefact.vocab_size))).all()
        assert (batch.ids >= 0).all() and (batch.ids < artefact.vocab_size).all()


def check(artefact, prepared):
    names = {path.name for path in prepared.iterdir()}
    assert names - {".digests.json"} == {artefact.path.name}
    assert artefact.damaged_files() == []
    report = artefact.report
    for name in ("train", "eval"):
        check_split(artefact, getattr(artefact, name), report[name])
    assert len(artefact.train) > 0
    assert all(0 <= number < artefact.vocab_size for number in (*artefact.stop_ids, artefact.pad_id))
    assert report["damaged"] <= report["records"]


def left_behind(prepared):
    return [path.name for path in prepared.iterdir() if path.name != ".digests.json"] if prepared.exists() else []


@contextlib.contextmanager
def guarded():
    """No example may take longer than SECONDS. What no signal interrupts is ended with a traceback, much later."""
    faulthandler.dump_traceback_later(10 * SECONDS, exit=True)

    def hung(*_):
        raise Hung(f"no end after {SECONDS} seconds")

    posix = hasattr(signal, "SIGALRM")
    before = signal.signal(signal.SIGALRM, hung) if posix else None
    if posix:
        signal.alarm(SECONDS)
    try:
        yield
    finally:
        if posix:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
        faulthandler.cancel_dump_traceback_later()


def try_example(dice, room, folder):
    files = folder / "files"
    files.mkdir(parents=True)
    data = data_settings(room, files, dice)
    prepared = folder / "prepared"
    with guarded():
        try:
            artefact = prepare(data, prepared, split_digits=dice.random() < 0.5)
        except UserError as error:
            assert str(error).strip(), "a refusal says why"
            assert left_behind(prepared) == []
            return False
        check(artefact, prepared)
        return True


def examples():
    if ONLY:
        return [range(int(ONLY), int(ONLY) + 1)]
    return [range(first, min(first + PORTION, COUNT)) for first in range(0, COUNT, PORTION)]


@pytest.mark.parametrize("numbers", examples(), ids=lambda numbers: f"{numbers.start}-{numbers.stop - 1}")
def test_any_input_gives_a_sound_artefact_or_one_line_that_refuses(room, tmp_path, numbers):
    made, failed = 0, []
    for number in numbers:
        folder = tmp_path / str(number)
        try:
            made += try_example(random.Random(number), room, folder)
        except (Exception, Hung) as error:
            failed.append(f"SOJOURN_FUZZ_ONLY={number}: {type(error).__name__}: {error}")
            if ONLY:
                raise
        shutil.rmtree(folder, ignore_errors=True)
    assert not failed, "\n".join(failed)
    assert made or len(numbers) < PORTION, "some examples must get as far as an artefact"


@settings(max_examples=COUNT, database=None, suppress_health_check=list(HealthCheck))
@given(dice=st.randoms(use_true_random=False))
def test_any_input_that_hypothesis_makes_does_too(room, tmp_path_factory, dice):
    folder = tmp_path_factory.mktemp("example")
    try:
        try_example(dice, room, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
