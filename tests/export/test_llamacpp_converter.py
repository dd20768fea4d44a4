"""Our GGUF files beside those of llama.cpp's own converter: every tensor and every key is equal.

SOJOURN_LLAMACPP_CONVERTER names a checkout of llama.cpp. The converter knows byte-level tokenizers by a hash of what
they do to a text. Small ones of the same kind are used here, and it is given the name that it would find.
SOJOURN_REAL_TOKENIZERS names a folder with tokenizers of real models (llama3, qwen2, …), of which it finds the name
itself."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, normalizers, processors
from transformers import AutoConfig, AutoModelForCausalLM

from gguf_models import LLAMA3_ROPE, write_gguf
from sojourn.data.tokenize import sentencepiece_model
from sojourn.data.tokenize.bpe import train_bpe
from sojourn.infer.gguf.file import GgufFile

CHECKOUT = os.environ.get("SOJOURN_LLAMACPP_CONVERTER", "")
TOKENIZERS = os.environ.get("SOJOURN_REAL_TOKENIZERS", "")
pytestmark = pytest.mark.skipif(
    not (Path(CHECKOUT) / "convert_hf_to_gguf.py").is_file(), reason="SOJOURN_LLAMACPP_CONVERTER names no checkout"
)
CONVERT = """
import runpy, sys
checkout, pre = sys.argv[1:3]
sys.path[:0] = [checkout, checkout + "/gguf-py"]
if pre:
    from conversion.base import TextModel
    TextModel.get_vocab_base_pre = lambda self, tokenizer: pre
sys.argv = ["convert_hf_to_gguf.py", *sys.argv[3:]]
runpy.run_path(checkout + "/convert_hf_to_gguf.py", run_name="__main__")
"""
TEXTS = [
    f"What colour is the {thing} of house {number}? It's {colour}.\n\n  中文，{number * 7} café — naïve"
    for number in range(200) for thing in ("cat", "boat") for colour in ("red", "gold")
]  # fmt: skip
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_CHAT = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA_CHAT = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def save(tokenizer: Tokenizer, folder: Path, **settings: Any) -> None:
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    added = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    decoder = {str(one["id"]): {key: value for key, value in one.items() if key != "id"} for one in added}
    text = json.dumps({"added_tokens_decoder": decoder, **settings}, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def begins_with(token: str, number: int) -> Any:
    pair = f"{token} $A {token}:1 $B:1"
    return processors.TemplateProcessing(single=f"{token} $A", pair=pair, special_tokens=[(token, number)])


def llama3(folder: Path) -> None:
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer = train_bpe(TEXTS, 500, special, split_digits=False)
    first = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), begins_with("<|begin_of_text|>", first)]
    )
    ends = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    save(tokenizer, folder, **ends, chat_template=LLAMA_CHAT, tokenizer_class="PreTrainedTokenizerFast")


def qwen(folder: Path) -> None:
    tokenizer = train_bpe(TEXTS, 500, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], split_digits=True)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    ends = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None}
    adds = {"add_bos_token": False, "add_prefix_space": False}
    more = {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "tokenizer_class": "Qwen2Tokenizer"}
    save(tokenizer, folder, **ends, **adds, **more, chat_template=CHATML)


def gemma3(folder: Path) -> None:
    import sentencepiece

    model, own = io.BytesIO(), ["<mask>", "<unused0>", "<unused1>", "<start_of_turn>", "<end_of_turn>", "<table>"]
    names = {"pad": "<pad>", "eos": "<eos>", "bos": "<bos>", "unk": "<unk>"}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=model, model_type="bpe", vocab_size=600, hard_vocab_limit=False,
        byte_fallback=True, split_digits=True, normalization_rule_name="identity", add_dummy_prefix=False,
        remove_extra_whitespaces=False, allow_whitespace_only_pieces=True, user_defined_symbols=own, minloglevel=2,
        **{f"{name}_id": number for number, name in enumerate(names)},
        **{f"{name}_piece": piece for name, piece in names.items()},
    )  # fmt: skip
    file = folder.with_suffix(".model")
    file.write_bytes(model.getvalue())
    tokenizer = sentencepiece_model.convert(file, ["<start_of_turn>", "<end_of_turn>"])
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in names.values()])
    tokenizer.post_processor = begins_with("<bos>", 2)
    ends = {f"{name}_token": piece for name, piece in names.items()}
    adds = {"add_bos_token": True, "add_eos_token": False}
    save(tokenizer, folder, **ends, **adds, chat_template=GEMMA_CHAT, tokenizer_class="PreTrainedTokenizerFast")
    file.rename(folder / "tokenizer.model")


# Family: transformers' type, a small tokenizer of its kind, its name for the converter, the real one's folder, changes
CASES: dict[str, tuple[str, Any, str, str, dict[str, Any]]] = {
    "llama": ("llama", llama3, "llama-bpe", "llama3", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": ("qwen2", qwen, "qwen2", "qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", qwen, "qwen2", "qwen3", {"head_dim": 32}),
    "gemma3": (
        "gemma3_text", gemma3, "", "gemma3",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 64, "num_hidden_layers": 7, "bos_token_id": 2,
         "eos_token_id": 1, "pad_token_id": 0},
    ),
}  # fmt: skip


def make(folder: Path, kind: str, tokenizer: Path, changed: dict[str, Any]) -> Path:
    definition = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
    numbers = [*definition["model"]["vocab"].values(), *(one["id"] for one in definition["added_tokens"])]
    given = {
        "vocab_size": -(-(max(numbers) + 1) // 64) * 64, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **changed,
    }  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **given))
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value) * 0.1)
    model.to(torch.bfloat16).save_pretrained(folder)
    for file in tokenizer.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def compare(folder: Path, pre: str, quantization: str, tmp_path: Path) -> list[str]:
    """What is not equal."""
    theirs = tmp_path / f"theirs-{quantization}.gguf"
    command = [sys.executable, "-c", CONVERT, CHECKOUT, pre, str(folder), "--outtype", quantization, "--outfile"]
    converted = subprocess.run(
        [*command, str(theirs)], capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": ""},
        timeout=600,
    )  # fmt: skip
    assert converted.returncode == 0, converted.stderr[-2000:]
    one, other = GgufFile(write_gguf(folder, tmp_path / f"ours-{quantization}", quantization)), GgufFile(theirs)
    keys = [key for key in sorted(one.metadata.keys() | other.metadata.keys()) if one[key] != other[key]]
    found = [f"{key}: ours {str(one[key])[:60]}, theirs {str(other[key])[:60]}" for key in keys]
    for name in sorted(one.tensors.keys() | other.tensors.keys()):
        ours, their = one.tensors.get(name), other.tensors.get(name)
        if ours is None or their is None or (ours.shape, ours.type) != (their.shape, their.type):
            found.append(f"{name}: ours {ours}, theirs {their}")
        elif not (one.raw(name) == other.raw(name)).all():
            found.append(f"{name}: other bytes")
    assert len(one.tensors) > 20 and len(one.metadata) > 20
    return [line for line in found if not line.startswith("general.name:")]


@pytest.mark.parametrize("quantization", ["f16", "bf16", "q8_0"])
@pytest.mark.parametrize("family", CASES)
def test_every_tensor_and_every_key_is_equal(family: str, quantization: str, tmp_path: Path) -> None:
    kind, make_tokenizer, pre, _, changed = CASES[family]
    make_tokenizer(tmp_path / "tokenizer")
    folder = make(tmp_path / "model", kind, tmp_path / "tokenizer", changed)
    assert compare(folder, pre, quantization, tmp_path) == []


@pytest.mark.parametrize("family", CASES)
def test_the_same_with_the_tokenizers_of_real_models(family: str, tmp_path: Path) -> None:
    kind, _, _, real, changed = CASES[family]
    tokenizer = Path(TOKENIZERS) / real
    if not TOKENIZERS or not (tokenizer / "tokenizer.json").is_file():
        pytest.skip(f"SOJOURN_REAL_TOKENIZERS has no {real}")
    assert compare(make(tmp_path / "model", kind, tokenizer, changed), "", "f16", tmp_path) == []
