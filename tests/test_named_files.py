"""A file, model or package that a setting names and that is not there is found before anything is tokenised."""

import importlib.util
import json
import shutil

import pytest

from conftest import called


@pytest.fixture
def words(base, chats, home):
    shutil.rmtree(home / "prepared")
    (home / "a-file.pt").write_bytes(b"PK")
    (home / "config-only").mkdir()
    shutil.copy(base / "config.json", home / "config-only")
    (home / "empty").mkdir()
    return [f"model.base={base}", f"data.sources={chats}", "data.max_length=64", "train.steps=1", "train.device=cpu"]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("save.resume=absent.pt", "save.resume: absent.pt: not a complete checkpoint (no such folder)"),
        ("save.resume=a-file.pt", "save.resume: a-file.pt: not a complete checkpoint"),
        ("save.resume=empty", "save.resume: empty: not a complete checkpoint"),
        ("method.adapter=absent", "method.adapter: absent: no adapter there"),
        ("method.adapter=empty", "method.adapter: empty: no adapter there"),
        ("model.base=config-only", "model.base: config-only: it has a config.json, but no weights"),
        ("model.base=./absent", "model.base: ./absent: no such folder or file"),
        ("method.targets=[q_prj]", "method.targets: this model has no “q_prj”; did you mean q_proj?"),
        ("method.modules_to_save=[lm_haed]", "method.modules_to_save: this model has no “lm_haed”"),
        ("data.tokenizer=./absent", "data.tokenizer: ./absent: no such file or folder"),
        ("data.template=absent.jinja", "data.template: “absent.jinja”: no such template"),
        ("data.eval_sources=absent.jsonl", "absent.jsonl"),
        ("parallel.deepspeed=absent.json", "absent.json: no such file"),
        ("train.optimizer=adamw_8bit", "train.optimizer: adamw_8bit needs the package bitsandbytes"),
        ("method.kind=qlora", "method.kind: qlora needs the package bitsandbytes"),
    ],
)
def test_what_a_setting_names_is_looked_for_first(words, home, setting, said, monkeypatch):
    find = importlib.util.find_spec
    if said.endswith("bitsandbytes"):  # a machine without it
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find(name))
    asked = called("train", *words, "method.kind=lora", setting)
    assert asked.returncode == 2 and asked.stderr.count("\n") == 1, asked.stderr
    assert said in asked.stderr
    assert not (home / "prepared").exists() and "reading and tokenizing" not in asked.stdout


def test_a_tokenizer_that_the_frozen_base_cannot_hold_is_found_first(words, home, base):
    larger = shutil.copytree(base, home / "larger")
    tokenizer = json.loads((larger / "tokenizer.json").read_text())
    last = max(tokenizer["model"]["vocab"].values())
    tokenizer["model"]["vocab"] |= {f"new{number}": last + number for number in range(1, 100)}
    (larger / "tokenizer.json").write_text(json.dumps(tokenizer))
    asked = called("train", *words, "method.kind=lora", f"data.tokenizer={larger}")
    assert asked.returncode == 2 and "data.tokenizer: " in asked.stderr and "but model.base has only" in asked.stderr
    assert not (home / "prepared").exists()
