"""Models and data made to harm: one line, no memory filled, nothing executed."""

from __future__ import annotations

import gzip
import json
import pickle
import signal
import struct
from pathlib import Path

import pytest
import torch

from conftest import called
from sojourn.data.sources import files
from sojourn.data.sources.document import Message
from sojourn.data.sources.tables import parquet_rows
from sojourn.data.sources.values import BadRecord
from sojourn.data.tokenize import template_sandbox
from sojourn.data.tokenize.chat_template import Template
from sojourn.errors import UserError
from sojourn.model.base import BaseModelSource, load_base_model, load_model_config


class _Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture
def base(tmp_path, shared):
    return shared.copy_base(tmp_path)


def _refused(base: Path) -> str:
    with pytest.raises(UserError) as error:
        load_base_model(BaseModelSource(str(base)), torch.float32, "cpu")
    assert "\n" not in str(error.value) and str(error.value).startswith("model.base: ")
    return str(error.value)


def test_a_pickle_of_weights_executes_nothing(base, tmp_path):
    (base / "model.safetensors").unlink()
    (base / "pytorch_model.bin").write_bytes(pickle.dumps(_Touch(tmp_path / "executed")))
    _refused(base)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("data", [b"", b"\0" * 7, struct.pack("<Q", 2**62) + b"{}", struct.pack("<Q", 2) + b"[]",
                                  struct.pack("<Q", 4) + b"\xff" * 4])  # fmt: skip
def test_broken_safetensors_are_refused_in_one_line(base, data):
    (base / "model.safetensors").write_bytes(data)
    _refused(base)


def test_truncated_safetensors_are_refused_in_one_line(base):
    whole = (base / "model.safetensors").read_bytes()
    (base / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    _refused(base)


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 10**9}, {"vocab_size": 10**12}, {"hidden_size": -64},
                                     {"num_hidden_layers": "many"}, {"num_hidden_layers": 0}, {"model_type": 5},
                                     {"model_type": "none"}, {"num_attention_heads": [4]}])  # fmt: skip
def test_an_odd_config_is_refused_before_anything_is_built(base, changes):
    config = base / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    with pytest.raises(UserError) as error:
        load_model_config(BaseModelSource(str(base)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "3", "[" * 100_000, '{"a": '])
def test_a_broken_config_is_refused_in_one_line(base, text):
    (base / "config.json").write_text(text)
    assert "config.json" in _refused(base)


@pytest.mark.parametrize("size", [0, 3, 4, 24, 300])
def test_a_truncated_gguf_is_refused_in_one_line(tmp_path, size):
    pytest.importorskip("gguf")
    data = b"GGUF" + struct.pack("<IQQ", 3, 2**40, 2**40) + b"\xff" * 300
    (tmp_path / "m.gguf").write_bytes(data[:size])
    _refused(tmp_path / "m.gguf")


_DOUBLING = "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x OP n.x %}{% endfor %}{{ n.x }}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10**10 }}", "{{ 10**10 * 'x' }}", "{{ 9**9**9 }}", "{{ [1] * 10**10 }}",
        "{{ 'x'.center(10000000000) }}", "{{ 'x'|center(10000000000) }}", "{{ 'x'|indent(width=10000000000) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '{:>10000000000}'.format('x') }}", "{{ 'x'.ljust(10 * 1000000000) }}", _DOUBLING.replace("OP", "+"),
        _DOUBLING.replace("OP", "~"),
    ],
)  # fmt: skip
def test_a_template_that_would_fill_the_memory_is_refused(source):
    with pytest.raises((BadRecord, UserError), match=r"more than|number over"):
        Template(source, {}, []).text([Message("user", "a")])


def test_a_template_that_takes_years_is_interrupted(monkeypatch):
    monkeypatch.setattr(template_sandbox, "MOST_SECONDS", 0.2)
    loops = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
    with pytest.raises((BadRecord, UserError), match=r"more than 0\.2 s of CPU time"):
        Template(loops, {}, []).text([Message("user", "a")])
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_concatenation_in_a_template_is_what_jinja_makes_of_it():
    source = "{{ 1 ~ none ~ missing ~ 'a' ~ [2] ~ true }}{{ 'b' ~ ('c' ~ 3) }}{{ '%s-%03d' % ('x', 7) }}{{ 1 + 2 }}"
    import jinja2

    assert Template(source, {}, []).text([Message("user", "a")]) == jinja2.Template(source).render()


def test_a_parquet_file_that_unpacks_to_gigabytes_is_refused(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    monkeypatch.setattr(files, "_LARGE", 1 << 20)
    monkeypatch.setattr(files, "_MOST_RATIO", 100)
    for name, options in (("dictionary", {}), ("zstd", {"use_dictionary": False, "compression": "zstd"})):
        path = tmp_path / f"{name}.parquet"
        parquet.write_table(pyarrow.table({"text": ["x" * 1000] * 100_000}), path, **options)
        with pytest.raises(UserError, match="unpacks to more than"):
            list(parquet_rows(path, 1 << 20))


def test_a_gzip_bomb_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_LARGE", 1 << 20)
    monkeypatch.setattr(files, "_MOST_RATIO", 100)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"\n" * (64 << 20)))
    with pytest.raises(UserError, match="unpacks to more than"):
        list(files.read_bytes(tmp_path / "a.jsonl.gz", 1 << 20))


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 100_000, '{"model": {"type": "BPE", "vocab": 5}}'])
def test_a_broken_tokenizer_is_refused_in_one_line(base, tmp_path, monkeypatch, text):
    monkeypatch.setenv("SOJOURN_HOME", str(tmp_path / "home"))
    (base / "tokenizer.json").write_text(text)
    (tmp_path / "a.jsonl").write_text('{"text": "a b c"}\n' * 50)
    done = called("prepare", "smoke", f"model.base={base}", "method.kind=lora", f"data.sources={tmp_path / 'a.jsonl'}")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
