"""The prepared artefact: made once, whole or not at all, and batches that keep documents apart."""

import json

import numpy as np
import pytest

from sojourn.config.load import load_run
from sojourn.data import prepare as preparing
from sojourn.data.artefact import read_batch
from sojourn.data.prepare import prepare
from sojourn.data.words.tokenizer import load_tokenizer
from sojourn.errors import RunFailed, UserError


@pytest.fixture
def data(words):
    return load_run(words).config.data


def test_the_same_inputs_give_the_same_folder_and_no_work(data, home):
    first = prepare(data, home / "prepared")
    stamp = (first.path / "train" / "tokens.bin").stat().st_mtime_ns
    said = []
    again = prepare(data, home / "prepared", said.append)
    assert again.path == first.path and (again.path / "train" / "tokens.bin").stat().st_mtime_ns == stamp
    assert said == [f"prepared before: {first.path}"]


def test_any_change_of_content_or_settings_gives_another_folder(data, home, chats):
    first = prepare(data, home / "prepared")
    longer = data.model_copy(update={"max_length": 128})
    assert prepare(longer, home / "prepared").path != first.path
    chats.write_text(chats.read_text() + '\n{"prompt": "a", "completion": "b"}')
    assert prepare(data, home / "prepared").path != first.path


def test_every_document_is_in_the_rows_of_one_split(data, home, chats):
    artefact = prepare(data, home / "prepared")
    tokenizer = load_tokenizer(artefact.tokenizer)
    found = set()
    for split in (artefact.train, artefact.eval):
        for number in range(len(split)):
            ids, _, starts = split.row(number)
            assert len(ids) <= 64 and starts[0] == 0
            for part in np.split(ids, starts[1:]):
                found.add(tokenizer.decode(part.tolist(), skip_special_tokens=False))
    asked = [json.loads(line) for line in chats.read_text().splitlines()]
    assert found == {
        f"<|im_start|>user\n{a['prompt']}<|im_end|>\n<|im_start|>assistant\n{a['completion']}<|im_end|>\n"
        for a in asked
    }
    report = artefact.report
    assert report["train"]["documents"] + report["eval"]["documents"] == 400
    assert report["train"]["fill"] > 0.8


def test_labels_never_cross_documents_and_positions_restart(data, home):
    artefact = prepare(data, home / "prepared")
    split = artefact.train
    batch = read_batch(split, np.arange(8), 64, artefact.pad_id)
    for i in range(8):
        ids, mask, starts = split.row(i)
        for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
            assert batch.positions[i, start:stop].tolist() == list(range(stop - start))
            assert batch.labels[i, stop - 1] == -100
            inner = [int(ids[t + 1]) if mask[t + 1] else -100 for t in range(start, stop - 1)]
            assert batch.labels[i, start : stop - 1].tolist() == inner
        assert (batch.labels[i, len(ids) :] == -100).all() and (batch.documents[i, len(ids) :] == -1).all()


def test_the_split_stays_when_data_is_appended(data, home, chats):
    def held_out(artefact):
        split = artefact.eval
        return {split.row(i)[0].tobytes() for i in range(len(split))}

    tokenizer = prepare(data, home / "prepared").tokenizer
    fixed = data.model_copy(update={"tokenizer": str(tokenizer), "eval_fraction": 0.1, "max_length": 32})
    before = prepare(fixed, home / "prepared")
    chats.write_text(chats.read_text() + "".join(f'\n{{"prompt": "new {i}", "completion": "b"}}' for i in range(100)))
    after = prepare(fixed, home / "prepared")
    kept = {bytes(d) for d in held_out(before)}
    assert len(before.eval) > 10 and kept <= {bytes(d) for d in held_out(after)}


def test_an_interrupted_preparation_leaves_nothing(data, home, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(preparing, "pack", full)
    with pytest.raises(RunFailed, match="No space left on device; nothing was kept"):
        prepare(data, home / "prepared")
    assert list((home / "prepared").iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a", "completion": "b"}\n{"text": "c"}', r"jsonl:2: format text, but .*:1 is prompt/completion"),
        ('{"prompt": "a", "completion": "b"}\n{oops', r"bad.jsonl:2: not valid JSON"),
        ('{"colour": 3}', r"bad.jsonl:1: not a format that is known here \(found colour\)"),
        ('{"prompt": "a", "completion": 3}', r"bad.jsonl:1: completion: expected text, found int"),
        ('{"messages": [{"role": "user", "content": "hi"}]}', r"bad.jsonl:1: the last message is not the assistant's"),
        ('{"messages": [{"role": "boss", "content": "hi"}]}', r"role “boss” is not one of"),
        ('{"prompt": "\\ud800", "completion": "b"}', r"bad.jsonl:1: prompt: half a character"),
        ("", "no document to train on"),
    ],
)  # fmt: skip
def test_bad_data_is_an_error_that_says_where(home, data, content, message):
    path = home / "bad.jsonl"
    path.write_text(content, encoding="utf-8")
    source = data.sources[0].model_copy(update={"path": str(path)})
    with pytest.raises(UserError, match=message):
        prepare(data.model_copy(update={"sources": [source]}), home / "prepared")
    assert list((home / "prepared").iterdir()) == []


def test_what_a_killed_preparation_left_is_cleared_away(data, home):
    (home / "prepared" / ".stage-999999-abc").mkdir(parents=True)
    artefact = prepare(data, home / "prepared")
    assert [path.name for path in (home / "prepared").iterdir()] == [artefact.path.name]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]},
        {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
        {"instruction": "Q", "input": "", "output": "A"},
        {"prompt": "Q", "completion": "A"},
        {"question": "Q", "answer": "A"},
    ],
    ids=lambda record: next(iter(record)),
)
def test_each_chat_format_is_recognised(home, data, record):
    path = home / "one.json"
    path.write_text(json.dumps([record] * 5), encoding="utf-8")
    source = data.sources[0].model_copy(update={"path": str(path)})
    artefact = prepare(data.model_copy(update={"sources": [source], "eval_fraction": 0.0}), home / "prepared")
    ids = artefact.train.row(0)[0].tolist()
    text = load_tokenizer(artefact.tokenizer).decode(ids, skip_special_tokens=False)
    assert text.startswith("<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n")
