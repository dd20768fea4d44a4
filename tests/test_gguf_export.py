"""GGUF files: a reader that reads them as llama.cpp does gets the source's logits and token ids, or is refused."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import called
from gguf_models import FAMILIES, Said, make_model, write_gguf
from shared import Shared
from sojourn.data.tokenize import sentencepiece_model
from sojourn.data.tokenize.bpe import train_bpe
from sojourn.data.tokenize.gguf_pre_tokenizers import identify
from sojourn.data.tokenize.templates import named_template
from sojourn.errors import RunFailed, UserError
from sojourn.export.gguf import adapter as gguf_adapter
from sojourn.export.gguf import tensors
from sojourn.export.gguf.turns import find_turns
from sojourn.export.open_source import open_weights
from sojourn.export.progress import NoProgress
from sojourn.export.stage import ExportStage
from sojourn.infer.gguf import families
from sojourn.infer.gguf.file import GgufFile
from sojourn.infer.gguf.tokenizer import CONTROL, UNUSED, GgufTokenizer
from sojourn.infer.runtimes import gguf_runtime
from sojourn.infer.runtimes.llamacpp_process import LlamaCpp
from tiny import LORA, Tiny

IDS = [5, 17, 3, 99, 42, 42, 8, 120, 7, 7, 31]
TEXT = "What colour is the cat of house 12?\n\n  It's RED, isn't it?  café 你好"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory, shared: Shared) -> Path:
    return shared.copy_base(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def llama(tokenizer: Path, tmp_path: Path) -> Path:
    return make_model(tokenizer, tmp_path / "llama", "llama", num_hidden_layers=1)


def logits(folder: Path) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0].numpy()


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def change(folder: Path, file: str, **values: Any) -> None:
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_file_computes_what_the_model_computes(tokenizer: Path, tmp_path: Path, family: str) -> None:
    kind, changed = FAMILIES[family]
    folder = make_model(tokenizer, tmp_path / "model", kind, **changed)
    runtime = gguf_runtime.open_model(write_gguf(folder, tmp_path / "out"))
    assert relative_error(runtime.logits(IDS), logits(folder)) < 1e-4
    assert runtime.encode(TEXT) == AutoTokenizer.from_pretrained(folder)(TEXT, add_special_tokens=False)["input_ids"]
    config = json.loads((folder / "config.json").read_text())
    assert ("output.weight" in GgufFile(next((tmp_path / "out").glob("*.gguf"))).tensors) != config[
        "tie_word_embeddings"
    ]


@pytest.mark.parametrize(("quantization", "most"), [("f16", 2e-3), ("bf16", 2e-2), ("q8_0", 5e-2), ("q4_0", 0.7)])
def test_every_type_is_near_the_source(llama: Path, tmp_path: Path, quantization: str, most: float) -> None:
    file = write_gguf(llama, tmp_path / "out", quantization)
    assert relative_error(gguf_runtime.open_model(file).logits(IDS), logits(llama)) < most
    kinds = {name: info.type.name for name, info in GgufFile(file).tensors.items()}
    assert kinds["blk.0.attn_q.weight"] == quantization.upper()
    assert kinds["output.weight"] == ("Q8_0" if quantization == "q4_0" else quantization.upper())
    assert kinds["output_norm.weight"] == "F32"


def test_rows_that_are_not_permuted_give_other_logits(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "interleave", lambda rows, heads: rows)
    assert (
        relative_error(gguf_runtime.open_model(write_gguf(llama, tmp_path / "out")).logits(IDS), logits(llama)) > 0.05
    )


def test_pieces_make_the_same_file_as_whole_tensors(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = write_gguf(llama, tmp_path / "whole", "q8_0").read_bytes()
    monkeypatch.setattr(tensors, "PIECE_ELEMENTS", 1500)
    assert write_gguf(llama, tmp_path / "pieces", "q8_0").read_bytes() == whole


@pytest.mark.parametrize(("split_digits", "name"), [(True, "qwen2"), (False, "llama-bpe")])
def test_the_pre_tokenizer_is_known_by_what_it_does(split_digits: bool, name: str) -> None:
    trained = train_bpe(["some text 123 of 4567"], 300, ["<|endoftext|>"], split_digits)
    assert identify(trained, "llama", not split_digits).name == name


def test_a_pre_tokenizer_of_one_s_own_is_refused_in_one_line(llama: Path, tmp_path: Path) -> None:
    own = Tokenizer.from_file(str(llama / "tokenizer.json"))
    own.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{L}+|\d{4}"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    own.save(str(llama / "tokenizer.json"))
    with pytest.raises(UserError, match=r"none of llama\.cpp's pre-tokenizers"):
        write_gguf(llama, tmp_path / "out")


def test_a_wrong_pre_tokenizer_in_a_file_gives_other_token_ids(llama: Path, tmp_path: Path) -> None:
    trained = train_bpe(["Is it?\nIs it?\n\nIs it?\n"] * 20, 290, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    trained.save(str(llama / "tokenizer.json"))
    metadata = GgufFile(write_gguf(llama, tmp_path / "out")).metadata
    right, wrong = (
        GgufTokenizer({**metadata, "tokenizer.ggml.pre": name}).encode("Is it?\nIs it?") for name in ("qwen2", "gpt-2")
    )
    assert metadata["tokenizer.ggml.pre"] == "qwen2"
    assert right == trained.encode("Is it?\nIs it?").ids != wrong


def test_ids_without_a_token_are_padded_and_tokens_without_a_row_are_left_out(tokenizer: Path, tmp_path: Path) -> None:
    folder = make_model(tokenizer, tmp_path / "model", "llama", num_hidden_layers=1, vocab_size=448)
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    count = own.get_vocab_size()
    own.add_special_tokens([f"<|extra_{number}|>" for number in range(200)])
    own.save(str(folder / "tokenizer.json"))
    said = Said()
    file = GgufFile(write_gguf(folder, tmp_path / "out", said=said))
    tokens, types = file["tokenizer.ggml.tokens"], file["tokenizer.ggml.token_type"]
    assert len(tokens) == 448 and tokens[count] == "<|extra_0|>" and types[count] == CONTROL
    assert any("tokens are left out" in line for line in said.lines)
    padded = make_model(tokenizer, tmp_path / "padded", "llama", num_hidden_layers=1, vocab_size=512)
    types = GgufFile(write_gguf(padded, tmp_path / "out2"))["tokenizer.ggml.token_type"]
    assert types[count:] == [UNUSED] * (512 - count)


def test_stop_tokens_are_named(llama: Path, tmp_path: Path) -> None:
    change(llama, "generation_config.json", eos_token_id=[0, 10, 20])
    file = GgufFile(write_gguf(llama, tmp_path / "out"))
    eos = json.loads((llama / "tokenizer_config.json").read_text())["eos_token"]
    assert file["tokenizer.ggml.tokens"][file["tokenizer.ggml.eos_token_id"]] == eos
    assert {file["tokenizer.ggml.eot_token_id"], file["tokenizer.ggml.eom_token_id"]} == {10, 20}
    assert file["tokenizer.ggml.add_bos_token"] is False and file["tokenizer.ggml.bos_token_id"] is None


def test_a_tokenizer_without_an_end_is_refused(llama: Path, tmp_path: Path) -> None:
    change(llama, "tokenizer_config.json", eos_token=None)
    change(llama, "config.json", eos_token_id=None)
    with pytest.raises(UserError, match="no eos_token"):
        write_gguf(llama, tmp_path / "out")


@pytest.mark.parametrize(
    ("kind", "changed", "says"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "RoPE scaling"),
        ("qwen2", {"hidden_act": "gelu"}, "the activation gelu"),
        ("gemma3_text", {"head_dim": 32, "query_pre_attn_scalar": 99}, "query_pre_attn_scalar=99"),
        ("smollm3", {"no_rope_layers": [0, 1]}, "every fourth"),
        ("gpt_neox", {}, "does not write models of type"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    tokenizer: Path, tmp_path: Path, kind: str, changed: dict[str, Any], says: str
) -> None:
    folder = make_model(tokenizer, tmp_path / "model", kind, **changed)
    with pytest.raises(UserError, match=says) as refused:
        write_gguf(folder, tmp_path / "out")
    assert "\n" not in str(refused.value)


def test_values_beyond_f16_are_refused(llama: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = 1e6
    model.save_pretrained(llama)
    with pytest.raises(RunFailed, match="beyond F16's range"):
        write_gguf(llama, tmp_path / "out", "f16")


@pytest.mark.parametrize("keep_model_file", [True, False])
def test_sentencepiece_tokenizers_keep_their_ids(llama: Path, tmp_path: Path, keep_model_file: bool) -> None:
    texts = [f"What colour is the {thing} of house {n}?" for n in range(200) for thing in ("cat", "boat", "lamp")]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    sentencepiece_model.train(iter(texts), 340, special, True, tmp_path).save(str(llama / "tokenizer.json"))
    if keep_model_file:
        (tmp_path / "tokenizer.model").rename(llama / "tokenizer.model")
    settings = {"eos_token": "<|im_end|>", "chat_template": named_template("chatml", "<|endoftext|>")}
    change(llama, "tokenizer_config.json", **settings, tokenizer_class="PreTrainedTokenizerFast")
    file = write_gguf(llama, tmp_path / "out")
    expected = AutoTokenizer.from_pretrained(llama)
    for text in (TEXT, f"<|im_start|>user\n{TEXT}<|im_end|>\n"):
        assert gguf_runtime.open_model(file).encode(text) == expected(text, add_special_tokens=False)["input_ids"]
    assert GgufFile(file)["tokenizer.ggml.model"] == "llama"


def test_the_modelfile_writes_chats_as_the_template_does(llama: Path, tmp_path: Path) -> None:
    text = write_gguf(llama, tmp_path / "out").with_name("Modelfile").read_text()
    assert text.startswith("FROM ./llama-F32.gguf\nPARAMETER num_ctx 128\n")
    assert 'PARAMETER stop "<|im_end|>"' in text
    assert '{{ if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n{{ else if' in text
    assert text.endswith('<|im_start|>assistant\n"""\n')


def test_a_template_that_is_more_than_turns_is_left_to_ollama() -> None:
    counting = "{% for m in messages %}{{ loop.index }}: {{ m.content }}\n{% endfor %}"
    assert find_turns(counting, {}) is None
    default = "{% if messages[0].role != 'system' %}<s>system Be kind.</s>{% endif %}" + (
        "{% for m in messages %}<s>{{ m.role }} {{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant {% endif %}"
    )
    turns = find_turns(default, {})
    assert turns is not None and turns.system == "Be kind." and turns.around["user"] == ("<s>user ", "</s>")


def test_an_adapter_is_the_change_that_peft_makes(tiny: Tiny, tmp_path: Path) -> None:
    run = tiny.whole(*LORA)
    source = open_weights(run.path.name)
    with ExportStage(tmp_path / "out", source.fingerprint) as stage:
        gguf_adapter.write(source, stage, "f32", NoProgress())
        stage.finish({})
    file = GgufFile(next((tmp_path / "out").glob("*.gguf")))
    assert file["general.type"] == "adapter" and file["adapter.type"] == "lora"
    name = "blk.0.attn_q.weight"
    a, b = (torch.from_numpy(file.rows(f"{name}.lora_{part}").copy()) for part in "ab")
    merged = source.weights.load("model.layers.0.self_attn.q_proj.weight").float()
    base = source.base.load("model.layers.0.self_attn.q_proj.weight").float()
    heads = int(source.base.config["num_attention_heads"])
    expected = families.interleave(merged - base, heads)
    torch.testing.assert_close(file["adapter.lora.alpha"] / a.shape[0] * b @ a, expected, rtol=1e-3, atol=1e-5)


def test_an_adapter_is_replayed_on_its_base_and_names_no_path(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOJOURN_LLAMACPP_PYTHON", "/nowhere/bin/python")
    name, out = tiny.whole(*LORA).path.name, tmp_path / "out"
    done = called("export", name, "--to", "gguf-adapter", "--out", str(out))
    assert done.returncode == 0, done.stderr
    written = (out / "sojourn_export.json").read_text()
    gate = json.loads(written)["gate"]
    assert gate["replay"]["compared"]["positions"] > 20 and gate["replay"]["runtime"] == "GGUF as llama.cpp reads it"
    assert [path.name for path in out.glob("*.gguf")] == [f"{name}-LoRA-F16.gguf"]
    assert "/nowhere" not in written and str(tiny.home) not in written, gate["notes"]
    alone = called("verify", str(out))
    assert alone.returncode == 1 and "put the base's GGUF file beside it" in alone.stderr
    called("export", str(tiny.base), "--to", "gguf", "--out", str(tmp_path / "base"))
    (base,) = (tmp_path / "base").glob("*.gguf")
    base.rename(out / base.name)
    assert called("verify", str(out)).returncode == 0


def test_an_adapter_with_rows_in_another_order_is_refused(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOJOURN_LLAMACPP_PYTHON", "/nowhere/bin/python")
    monkeypatch.setattr(gguf_adapter, "interleave", lambda rows, heads: rows)
    done = called(
        "export", tiny.whole(*LORA, "train.lr=0.05").path.name, "--to", "gguf-adapter", "--out", str(tmp_path / "out")
    )
    assert done.returncode == 1 and "the export differs from its source: logits" in done.stderr, done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("split_digits", "name"), [(True, "qwen2"), (False, "llama-bpe")])
def test_a_gguf_file_is_exported_again_with_the_pre_tokenizer_that_it_names(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split_digits: bool, name: str
) -> None:
    """Both in a Llama: transformers goes by the architecture."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SOJOURN_LLAMACPP_PYTHON", "/nowhere/python")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trained = train_bpe(["Of 1234567 it's 890.\n\nIs it?\n"] * 9, 290, special, split_digits)
    trained.save(str(llama / "tokenizer.json"))
    first = write_gguf(llama, tmp_path / "first")
    done = called("export", str(first), "--to", "gguf", "--quantize", "f32", "--out", str(tmp_path / "second"))
    assert done.returncode == 0, done.stderr
    one, other = GgufFile(first), GgufFile(next((tmp_path / "second").glob("*.gguf")))
    assert one["tokenizer.ggml.pre"] == name
    different = [key for key in one.metadata.keys() | other.metadata.keys() if one[key] != other[key]]
    lost = {"tokenizer.ggml.token_type", "tokenizer.ggml.bos_token_id"}  # of tokens that no text has, by transformers
    assert set(different) <= {"general.name", *lost}, different
    assert one.tensors.keys() == other.tensors.keys()
    assert all((one.raw(name) == other.raw(name)).all() for name in one.tensors)
    found = AutoTokenizer.from_pretrained(open_weights(str(first)).weights.tokenizer_folder)
    text = "In 1234567 years?\nIs it?\n"
    assert found(text, add_special_tokens=False)["input_ids"] == trained.encode(text).ids


def test_a_k_quant_without_llama_cpp_says_what_to_install(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOJOURN_LLAMACPP_PYTHON", "/nowhere/python")
    done = called("export", str(llama), "--to", "gguf", "--quantize", "q4_k_m", "--out", str(llama.parent / "out"))
    assert done.returncode == 2 and "-m pip install llama-cpp-python" in done.stderr.splitlines()[-1]
    assert not (llama.parent / "out").exists()


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_crash_of_llama_cpp_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -c ] && exit 0\nread line\nkill -ILL $$\n')
    python.chmod(0o755)
    monkeypatch.setenv("SOJOURN_LLAMACPP_PYTHON", str(python))
    child = LlamaCpp("model.gguf")
    with pytest.raises(RunFailed, match=re.escape("this CPU refuses")) as crashed:
        child.ask("open", path="model.gguf", threads=1)
    child.close()
    assert "\n" not in str(crashed.value) and "GGML_NATIVE=OFF" in str(crashed.value)
