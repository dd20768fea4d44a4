"""A GGUF file is unpacked once; what is kept is never that of another content."""

import os
import shutil

import gguf
import pytest
import torch

from conftest import called
from sojourn.data.tokenize.tokenizer import open_tokenizer
from sojourn.model.base import BaseModelSource, load_base_model, load_model_config
from test_gguf import write_gguf


@pytest.fixture
def file(base, home, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    return write_gguf(base, home / "tiny.gguf")


def _load(file, dtype=torch.float32):
    return load_base_model(BaseModelSource(str(file)), dtype, "cpu")


def _kept(home):
    return sorted(path.name for path in (home / "cache/sojourn/gguf").glob("*/*"))


def _same(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_second_time_nothing_is_unpacked_and_everything_is_the_same(file, home, monkeypatch, capsys):
    first, config, tokenizer = _load(file), load_model_config(BaseModelSource(str(file))), open_tokenizer(file)
    assert _kept(home) == ["config", "float32", "tokenizer"]
    assert capsys.readouterr().out == ""  # a line about it would spoil --json
    monkeypatch.setattr(gguf.GGUFReader, "__init__", lambda *given: pytest.fail("unpacked again"))
    again = _load(file)
    assert _same(first, again)
    ignored = {"_name_or_path", "dtype", "architectures"}
    strip = lambda config: {key: value for key, value in config.to_dict().items() if key not in ignored}  # noqa: E731
    assert strip(again.config) == strip(first.config)
    assert strip(load_model_config(BaseModelSource(str(file)))) == strip(config)
    assert again.generation_config.to_dict() == first.generation_config.to_dict()
    assert open_tokenizer(file).identity() == tokenizer.identity()
    assert _same(_load(file, torch.bfloat16), first.to(torch.bfloat16))  # float32 serves every dtype
    moved = file.rename(home / "renamed.gguf")
    assert _same(_load(moved), again)
    assert called("generate", str(moved), "--prompt", "What colour is the cat?", "--max-tokens", "2").returncode == 0


def test_a_changed_file_never_gives_the_old_weights(file, home, base):
    """Even with the size and the modification time of the old one, in the same inode."""
    os.utime(file, ns=(10**18, 10**18))
    before, was = _load(file), file.stat()
    data = bytearray(file.read_bytes())
    data[-4:] = b"\x00\x00\x80\x3f"  # the last weight is 1.0
    with file.open("r+b") as opened:
        opened.write(data)
    os.utime(file, ns=(10**18, 10**18))
    now = file.stat()
    assert (now.st_size, now.st_mtime_ns, now.st_ino) == (was.st_size, was.st_mtime_ns, was.st_ino)
    assert not _same(_load(file), before)


def test_a_damaged_copy_is_made_again(file, home):
    first = _load(file)
    kept = next((home / "cache/sojourn/gguf").glob("*/float32"))
    (kept / "model.safetensors").write_bytes(b"cut short")
    assert _same(_load(file), first) and (kept / "model.safetensors").stat().st_size > 1000


def test_where_it_cannot_be_kept_one_line_says_so(file, home, monkeypatch, capsys):
    (home / "no").write_text("")  # a file where the cache's folder belongs
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "no"))
    assert _load(file) is not None
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and "cannot be kept unpacked" in lines[0] and "Not a directory" in lines[0]
    assert open_tokenizer(file).tokenizer.get_vocab_size() > 300


def test_on_a_nearly_full_disk_nothing_large_is_kept(file, home, monkeypatch, capsys):
    free = shutil.disk_usage(home)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free._replace(free=100_000))
    assert _load(file) is not None
    assert "more than a quarter" in capsys.readouterr().err and _kept(home) == []


def test_two_at_once_and_one_that_was_killed(file, home):
    folder = home / "cache/sojourn/gguf"
    _load(file)
    kept = next(folder.glob("*/float32"))
    shutil.rmtree(kept)
    abandoned, live = kept.with_name(".stage-4194305-float32"), kept.with_name(f".stage-{os.getppid()}-float32")
    abandoned.mkdir()
    live.mkdir()
    assert _load(file) is not None and not kept.exists()  # the other one is at it
    assert live.exists() and not abandoned.exists()
    live.rmdir()
    _load(file)
    assert kept.is_dir() and not list(kept.parent.glob(".stage-*"))
