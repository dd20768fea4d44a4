"""The parity gate: a healthy export passes, and every planted fault is caught and named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sojourn.export import hf
from sojourn.export.gate import check
from sojourn.export.open_source import open_weights
from sojourn.export.probes import builtin_probes
from sojourn.export.progress import NoProgress
from sojourn.export.reference import build_reference, load_reference, save_reference
from sojourn.export.source_reference import source_reference
from sojourn.export.stage import ExportStage
from sojourn.export.tolerances import find_tolerance
from sojourn.infer.runtimes.transformers_runtime import open_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from sojourn.export.gate import Replay
    from sojourn.export.open_source import Source
    from sojourn.export.reference import Reference

CONTEXT = 128
LAYERS = "model.layers"


@pytest.fixture(scope="module")
def folder(shared, tmp_path_factory) -> Path:
    """A tiny Llama whose layers change its logits as much as those of a trained one do."""
    folder = shared.copy_base(tmp_path_factory.mktemp("gate"))
    change(folder, lambda w: {n: v * 12 if v.ndim == 2 and "layers" in n else v for n, v in w.items()})
    return folder


@pytest.fixture(scope="module")
def reference(folder, tmp_path_factory) -> Reference:
    """Of the model above, as an export stores it."""
    stored = tmp_path_factory.mktemp("reference")
    save_reference(build_reference(open_model(folder), builtin_probes(), CONTEXT), stored)
    return load_reference(stored)


@pytest.fixture
def export(folder, tmp_path) -> Path:
    return shutil.copytree(folder, tmp_path / "export")


def replay(reference: Reference, path: Path, quantization: str = "fp32") -> Replay:
    with open_model(path) as runtime:
        return check(reference, runtime, find_tolerance(quantization))


def change(folder: Path, changed: Callable[[dict], dict]) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    weights = changed(load_file(file))
    save_file({name: value.contiguous() for name, value in weights.items()}, file, {"format": "pt"})


def edit(file: Path, changed: Callable[[dict], None]) -> None:
    value = json.loads(file.read_text())
    changed(value)
    file.write_text(json.dumps(value))


def test_a_healthy_copy_passes(reference, export):
    found = replay(reference, export)
    assert found.passed, found.differences
    assert found.figures["relative error"] < 1e-5 and found.figures["same greedy text"] == 1
    assert found.compared["templates"] >= 7 and found.compared["positions"] > 60 and not found.not_compared


def swap(one: str, other: str) -> Callable[[dict], dict]:
    return lambda w: {**w, one: w[other], other: w[one]}


def interleave(weights: dict) -> dict:
    """The rows of q and k as llama.cpp has them, in a folder where transformers' order belongs."""
    heads = {"q_proj": 4, "k_proj": 2}
    found = dict(weights)
    for name, value in weights.items():
        kind = next((one for one in heads if one in name), None)
        if kind:
            rows, columns = value.shape
            halves = value.view(heads[kind], 2, rows // heads[kind] // 2, columns)
            found[name] = halves.transpose(1, 2).reshape(rows, columns)
    return found


def transpose_head(weights: dict) -> dict:
    head = weights["lm_head.weight"]
    return {**weights, "lm_head.weight": head.T.reshape(head.shape)}


WEIGHT_FAULTS = {
    "q and k rows not permuted": interleave,
    "q and k of one layer": lambda w: {**w, **{n: v for n, v in interleave(w).items() if f"{LAYERS}.1." in n}},
    "two layers swapped": swap(f"{LAYERS}.0.mlp.up_proj.weight", f"{LAYERS}.1.mlp.up_proj.weight"),
    "gate and up swapped": swap(f"{LAYERS}.0.mlp.gate_proj.weight", f"{LAYERS}.0.mlp.up_proj.weight"),
    "k and v swapped": swap(f"{LAYERS}.1.self_attn.k_proj.weight", f"{LAYERS}.1.self_attn.v_proj.weight"),
    "head transposed": transpose_head,
}


@pytest.mark.parametrize("fault", WEIGHT_FAULTS.values(), ids=WEIGHT_FAULTS.keys())
def test_wrong_weights_are_seen_in_the_logits(reference, export, fault):
    change(export, fault)
    found = replay(reference, export)
    assert found.differences[0].kind == "logits", found.figures
    assert found.figures["relative error"] > 5 * find_tolerance("bf16").error


def test_a_wrong_pre_tokenizer_is_seen_in_the_token_ids(reference, export):
    edit(
        export / "tokenizer.json",
        lambda t: t.update(
            pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
        ),
    )
    found = replay(reference, export)
    assert found.differences[0].kind == "token ids" and "expected [" in str(found.differences[0])


def test_a_wrong_template_is_shown_at_its_first_character(reference, export):
    edit(
        export / "tokenizer_config.json",
        lambda t: t.update(chat_template=t["chat_template"].replace("<|im_start|>", "<|im_end|>")),
    )
    first = replay(reference, export).differences[0]
    assert first.kind == "template" and first.where == "chat 1" and "at character 6" in first.message


def test_a_missing_eos_is_seen(reference, export):
    edit(export / "generation_config.json", lambda g: g.pop("eos_token_id"))
    edit(export / "config.json", lambda g: g.pop("eos_token_id"))
    assert replay(reference, export).differences[0].kind == "stop token"


def test_an_embedding_without_the_last_tokens_is_a_difference_not_a_crash(reference, export):
    rows = 300
    cut = ("model.embed_tokens.weight", "lm_head.weight")
    change(export, lambda w: {n: v[:rows] if n in cut else v for n, v in w.items()})
    edit(export / "config.json", lambda c: c.update(vocab_size=rows))
    found = replay(reference, export)
    assert found.differences[0].kind == "logits" and "transformers fails: index out of range" in str(
        found.differences[0]
    )


def test_logits_that_are_not_finite_are_a_difference(reference, export):
    change(export, lambda w: {**w, "model.norm.weight": w["model.norm.weight"] * 3e38})  # finite; its products are not
    found = replay(reference, export)
    assert found.differences[0].kind == "logits" and found.facts()["figures"]["relative error"] is None


@pytest.fixture(scope="module")
def adapter(folder, tmp_path_factory) -> Path:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    made = tmp_path_factory.mktemp("adapter")
    get_peft_model(model, config).save_pretrained(made)
    for file in folder.glob("tokenizer*"):
        shutil.copy(file, made)
    return made


def test_merging_into_the_quantized_base_is_seen(folder, adapter, tmp_path):
    """The source is the adapter beside its base, not merged."""
    import gguf

    def rounded(weights: dict) -> dict:
        kind = gguf.GGMLQuantizationType.Q4_0
        for name, value in weights.items():
            if value.ndim == 2 and "layers" in name:
                written = gguf.quants.dequantize(gguf.quants.quantize(value.numpy(), kind), kind)
                value.copy_(torch.from_numpy(written))
        return weights

    import torch

    source = open_weights(str(adapter), base=str(folder))
    reference = source_reference(source, print)
    assert replay(reference, merged(source, tmp_path / "healthy"), quantization="auto").passed
    wrong = shutil.copytree(folder, tmp_path / "base")
    change(wrong, rounded)
    found = replay(
        reference, merged(open_weights(str(adapter), base=str(wrong)), tmp_path / "wrong"), quantization="bf16"
    )
    assert found.differences[0].kind == "logits" and found.figures["relative error"] > 0.02, found.figures


def merged(source: Source, target: Path) -> Path:
    with ExportStage(target, source.fingerprint) as stage:
        hf.write(source, stage, "auto", NoProgress())
        return stage.finish({})
