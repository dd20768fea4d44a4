"""The prepared artefact as training reads it: documents apart, labels and positions within them."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from sojourn.config.load import load_run, read_config
from sojourn.data.artefact import read_batch
from sojourn.data.inputs import open_inputs
from sojourn.data.prepare import prepare, prepare_run
from sojourn.data.settings import data_settings
from sojourn.data.tokenize.tokenizer import open_tokenizer
from sojourn.errors import UserError
from sojourn.storage.file_digests import FileDigests
from sojourn.train.batcher import Batcher

OLD = Path(__file__).parent / "fixtures/old_run"  # made by the version before settings were renamed


@pytest.fixture
def data(words, home):
    """Nothing is prepared yet."""
    shutil.rmtree(home / "prepared")
    return load_run(words).config.data


def test_the_same_inputs_give_the_same_folder_and_no_work(data, home):
    first = prepare(data, home / "fresh")
    stamp = (first.path / "train" / "tokens.bin").stat().st_mtime_ns
    said = []
    again = prepare(data, home / "fresh", said.append)
    assert again.path == first.path and (again.path / "train" / "tokens.bin").stat().st_mtime_ns == stamp
    assert said == [f"already prepared: {first.path}"]


def test_every_document_is_in_the_rows_of_one_split(data, home, chats):
    artefact = prepare(data, home / "fresh")
    tokenizer = open_tokenizer(artefact.tokenizer).tokenizer
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
    artefact = prepare(data, home / "fresh")
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


def test_the_trained_tokens_of_the_report_are_the_targets_of_training(data, home):
    artefact = prepare(data, home / "fresh")
    rows = np.arange(len(artefact.train))
    assert read_batch(artefact.train, rows, 64, artefact.pad_id).targets == artefact.report["train"]["trained_tokens"]


def test_without_packing_a_batch_is_only_as_wide_as_its_longest_document(data, home):
    artefact = prepare(data.model_copy(update={"packing": "off"}), home / "fresh")
    lengths = np.diff(artefact.train.rows)
    batcher = Batcher(4, artefact.max_length, artefact.pad_id, "cpu", pad_to_longest=True)
    for start, batch in enumerate(batcher.batches(artefact.train, np.arange(40))):
        longest = lengths[start * 4 : start * 4 + 4].max()
        assert longest <= batch.ids.shape[1] < longest + 8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a", "completion": "b"}\n{"text": "c"}', r"jsonl:2: format text, but .*:1 is prompt/completion"),
        ('{"prompt": "a", "completion": "b"}\n{oops', r"bad.jsonl:2: not valid JSON"),
        ('{"colour": 3}', r"bad.jsonl:1: not a known format \(found colour\)"),
        ('{"prompt": "a", "completion": 3}', r"bad.jsonl:1: completion: expected text, found a number"),
        ('{"messages": [{"role": "user", "content": "hi"}]}', r"bad.jsonl:1: the last message is not the assistant's"),
        ('{"messages": [{"role": "boss", "content": "hi"}]}', r"role “boss” is not one of"),
        ('{"prompt": "\\ud800", "completion": "b"}', r"bad.jsonl:1: prompt: half a character"),
        ("", "no document to train on"),
    ],
)  # fmt: skip
def test_bad_data_is_an_error_that_says_where_and_leaves_nothing(home, data, content, message):
    path = home / "bad.jsonl"
    path.write_text(content, encoding="utf-8")
    source = data.sources[0].model_copy(update={"path": str(path)})
    with pytest.raises(UserError, match=message):
        prepare(data.model_copy(update={"sources": [source]}), home / "fresh")
    assert not (home / "fresh").exists()


def test_what_a_killed_preparation_left_is_cleared_away(data, home):
    (home / "fresh" / ".stage-999999-abc").mkdir(parents=True)
    artefact = prepare(data, home / "fresh")
    left = {path.name for path in (home / "fresh").iterdir()} - {".digests.json"}
    assert left == {artefact.path.name}


@pytest.mark.parametrize("file", ["old.yaml", "runs/old/run.yaml"])
def test_an_artefact_of_an_older_version_is_found_by_its_hash(home, file):
    config = load_run([str(OLD / file)]).config if file == "old.yaml" else read_config(OLD / file)
    inputs = open_inputs(data_settings(config), print, config.advanced.split_digits)
    assert inputs.artefact_hash(FileDigests(home / "digests.json")) == "d0b46f7a91b524cb"
    prepared = shutil.copytree(OLD / "prepared", home / "fresh")
    notes = []
    artefact = prepare_run(config, prepared, notes.append)
    assert notes == [f"already prepared: {prepared / 'd0b46f7a91b524cb'}"]
    assert artefact.damaged_files() == [] and len(artefact.train) == 191


def test_the_same_inputs_still_give_the_bytes_that_an_older_version_wrote(home):
    artefact = prepare_run(load_run([str(OLD / "old.yaml")]).config, home / "fresh")
    old = json.loads((OLD / "prepared/d0b46f7a91b524cb/artefact.json").read_text())
    assert artefact.path.name == "d0b46f7a91b524cb" and artefact.facts == old
    report = json.loads((OLD / "prepared/d0b46f7a91b524cb/report.json").read_text())
    del report["examples"]  # shown as the model sees them now, row by row
    assert {key: artefact.report[key] for key in report} == report
