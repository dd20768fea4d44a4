"""Every damaged or malicious model is refused in one line by the real verbs; nothing of it is executed."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest

from conftest import called
from hostile_models import ADAPTERS, FOLDERS, GGUF, edit, gguf, gguf_tensor, gguf_text
from sojourn.data.tokenize import template_sandbox
from sojourn.data.tokenize.backtracking import may_backtrack
from sojourn.errors import UserError
from sojourn.export.open_source import open_weights
from sojourn.model import adapter as adapter_module

_AT_RENDERING = "template"  # such cases are found where a chat is rendered


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(template_sandbox, "MOST_SECONDS", 0.1)
    monkeypatch.setattr(template_sandbox, "MOST_MEMORY", 64 << 20)
    monkeypatch.setattr(adapter_module, "_MATCHING_SECONDS", 0.1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, shared) -> Path:
    return shared.copy_base(tmp_path_factory.mktemp("sound"))


@pytest.fixture(scope="module")
def sound_adapter(tmp_path_factory: pytest.TempPathFactory, sound: Path) -> Path:
    """A LoRA adapter of peft on the base."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("adapter") / "adapter"
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(sound), LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(folder)
    for file in sound.glob("tokenizer*"):
        shutil.copy(file, folder)
    edit("adapter_config.json", base_model_name_or_path=str(sound))(folder, folder)
    return folder


def _generate(model: Path) -> tuple[int, str]:
    done = called(
        "generate", str(model), "--prompt", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!", "--max-tokens", "1", "--device", "cpu"
    )
    return done.returncode, done.stderr


def _refused_in_one_line(code: int, text: str, expected: str) -> None:
    assert code in (1, 2), text
    assert text.startswith("sojourn: ") and len(text.splitlines()) == 1, text
    assert expected in text and "Traceback" not in text, text


def test_the_corpus_is_large_and_starts_from_a_sound_model(sound, sound_adapter):
    assert len(FOLDERS) + len(ADAPTERS) + len(GGUF) >= 120
    for model in (sound, sound_adapter):
        code, text = _generate(model)
        assert code == 0, text
        open_weights(str(model))


@pytest.mark.parametrize("case", FOLDERS)
def test_a_hostile_folder_is_refused(case, sound, tmp_path):
    change, expected = FOLDERS[case]
    folder, canary = shutil.copytree(sound, tmp_path / "model"), tmp_path / "executed"
    change(folder, canary)
    _refused_in_one_line(*_generate(folder), expected)
    if _AT_RENDERING not in case and case not in _GOOD_TO_EXPORT:
        with pytest.raises(UserError) as error:
            open_weights(str(folder))
        assert "\n" not in str(error.value) and expected in str(error.value)
    assert not canary.exists()


_GOOD_TO_EXPORT = {"weights with a NaN", "an unknown model_type", "tokenizer code of its own",
                   "an activation that is none", "another hidden size", "no merges"}  # fmt: skip


@pytest.mark.parametrize("case", ADAPTERS)
def test_a_hostile_adapter_is_refused(case, sound_adapter, tmp_path):
    change, expected = ADAPTERS[case]
    folder, canary = shutil.copytree(sound_adapter, tmp_path / "adapter"), tmp_path / "executed"
    change(folder, canary)
    _refused_in_one_line(*_generate(folder), expected)
    assert not canary.exists()


@pytest.mark.parametrize("case", GGUF)
def test_a_hostile_gguf_file_is_refused(case, tmp_path):
    data, expected = GGUF[case]
    file = tmp_path / "m.gguf"
    file.write_bytes(data)
    _refused_in_one_line(*_generate(file), expected)
    with pytest.raises(UserError):
        open_weights(str(file))


def test_a_fifo_as_a_gguf_file_is_refused(tmp_path):
    import os

    os.mkfifo(tmp_path / "m.gguf")
    _refused_in_one_line(*_generate(tmp_path / "m.gguf"), "")


def test_code_that_no_setting_needs_is_not_run(sound, tmp_path):
    """A known model that also names code of its own is opened by transformers' own class."""
    folder, canary = shutil.copytree(sound, tmp_path / "model"), tmp_path / "executed"
    for name in ("modeling_evil.py", "__init__.py", "sitecustomize.py", "torch.py", "custom_generate.py"):
        (folder / name).write_text(f"from pathlib import Path\nPath({str(canary)!r}).touch()\n")
    edit("config.json", auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})(folder, canary)
    code, text = _generate(folder)
    assert code == 0 and not canary.exists(), text


def test_a_folder_that_is_an_adapter_too_does_not_open_another_base(sound, sound_adapter, tmp_path):
    folder = shutil.copytree(sound, tmp_path / "model")
    for file in sound_adapter.glob("adapter_*"):
        shutil.copy(file, folder)
    edit("adapter_config.json", base_model_name_or_path=str(folder))(folder, folder)
    _refused_in_one_line(*_generate(folder), "an adapter and a model at once")


@pytest.mark.parametrize("case", ["weights pickled as .bin", "a shard of the parent folders", "a fifo as weights"])
def test_training_refuses_it_before_data_is_prepared(case, sound, tmp_path, monkeypatch):
    monkeypatch.setenv("SOJOURN_HOME", str(tmp_path))
    change, expected = FOLDERS[case]
    folder, canary = shutil.copytree(sound, tmp_path / "model"), tmp_path / "executed"
    change(folder, canary)
    (tmp_path / "a.jsonl").write_text('{"text": "a b c"}\n' * 50)
    words = [
        f"model.base={folder}",
        "method.kind=lora",
        f"data.sources={tmp_path / 'a.jsonl'}",
        "data.max_length=64",
        "name=x",
    ]
    done = called("train", *words)
    _refused_in_one_line(done.returncode, done.stderr, expected)
    assert not canary.exists() and not (tmp_path / "prepared").exists()


def test_links_within_the_hubs_cache_and_to_other_weights_are_followed(sound, tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    shutil.copytree(sound, blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    open_weights(str(snapshot))
    elsewhere = shutil.copytree(sound, tmp_path / "elsewhere")
    (elsewhere / "model.safetensors").unlink()
    (elsewhere / "model.safetensors").symlink_to(sound / "model.safetensors")
    open_weights(str(elsewhere))


def test_a_template_in_a_gguf_file_is_limited_too(tmp_path):
    """Its text is as long as a file allows, and is rendered in the same sandbox."""
    values = gguf_text(b"tokenizer.chat_template") + struct.pack("<I", 8) + gguf_text(b"x" * (17 << 20))
    (tmp_path / "m.gguf").write_bytes(gguf(values, 2, gguf_tensor(b"a", [32], 0, 0), 1))
    _refused_in_one_line(*_generate(tmp_path / "m.gguf"), "17,825,792 bytes")


@pytest.mark.parametrize("pattern", [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{M}]*[\p{Ll}\p{M}]+(?i:'s|'t|'ll)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*",
    r" ?[^(\s|[.,!?…。，、।۔،])]+", r"\d{1,3}(?=(?:\d{3})*\b)", r"(?=(\d{3})+(?!\d))", r"[一-龥]+", r" {2,}",
])  # fmt: skip
def test_patterns_of_published_tokenizers_are_no_danger(pattern):
    assert not may_backtrack(pattern)


@pytest.mark.parametrize(
    "pattern", [r"(a+)+$", r"(?:a*)*", r"((a+)b?)+", r"(a?){50}", r"(?:a|ab)+c", r"(?<n>a+)*", r"(.*x){12}"]
)
def test_patterns_that_backtrack_are_found(pattern):
    assert may_backtrack(pattern)
