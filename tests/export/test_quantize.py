"""`sojourn quantize`: what it writes is what plain transformers opens, measured beside its source. Kinds of torchao
are tested where it is installed."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import called
from sojourn.export.quantize import calibration, measure
from sojourn.export.stage import MANIFEST
from sojourn.infer.runtimes.managed_environment import LLM_COMPRESSOR
from sojourn.storage.files import read_json_object
from tiny import LORA, Tiny

IDS = torch.tensor([[5, 17, 3, 99, 42, 42, 8]])
KINDS = ["nf4", "int8", "int8-dynamic"]
needs_llm_compressor = pytest.mark.skipif(
    bool(LLM_COMPRESSOR.why_unavailable()) or find_spec("compressed_tensors") is None,
    reason="SOJOURN_LLMCOMPRESSOR_PYTHON names no Python with llm-compressor, or compressed-tensors is not installed",
)


def logits(folder: Path, dtype: torch.dtype | str) -> torch.Tensor:
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)  # 4-bit weights go to a GPU by themselves
        return model(IDS.to(model.device)).logits.float().cpu()


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_merged_quantized_and_measured(
    tiny: Tiny, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = "bitsandbytes" if kind == "nf4" else "torchao"
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    monkeypatch.setattr(measure, "_REPEATS", 1)
    run, out = tiny.whole(*LORA), tmp_path / kind
    done = called("quantize", run.path.name, "--to", kind, "--out", str(out), "--json")
    assert done.returncode == 0, done.stderr
    manifest = json.loads(done.stdout)
    found, source = manifest["measured"]["quantized"], manifest["measured"]["source"]
    assert manifest["gate"]["passed"] and manifest["gate"]["tensors"] > 10
    assert found["bytes"] < source["bytes"] and found["prefill"] > 0 and found["decode"] > 0
    assert manifest["measured"]["data"] == "held-out rows of the run"
    assert found["perplexity"] == pytest.approx(source["perplexity"], rel=0.1)
    assert found["perplexity"] != source["perplexity"]
    merged = called("merge", run.path.name, "--out", str(tmp_path / "merged"))
    assert merged.returncode == 0, merged.stderr
    ours, plain = logits(out, "auto"), logits(tmp_path / "merged", torch.float32)
    assert 1e-4 < float((ours - plain).norm() / plain.norm()) < 0.2
    card = (out / "README.md").read_text(encoding="utf-8")
    assert f"| {kind} |" in card and "tokens/s" in card
    assert set(read_json_object(out / MANIFEST)["files"]) | {MANIFEST} == {path.name for path in out.iterdir()}
    again = called("quantise", run.path.name, "--to", kind, "--out", str(out))
    assert "was there already" in again.stdout and "perplexity" in again.stdout and "change" in again.stdout


def test_an_interrupted_quantization_leaves_no_target(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    base, out = str(tiny.base), tmp_path / "out"  # `base` is made by the first test that asks
    with monkeypatch.context() as patch:
        patch.setattr("transformers.PreTrainedModel.save_pretrained", interrupt)
        stopped = called("quantize", base, "--to", "nf4", "--out", str(out))
    assert stopped.returncode == 130 and not out.exists() and "to go on where it was" in stopped.stderr
    monkeypatch.setattr(measure, "_REPEATS", 1)
    done = called("quantize", base, "--to", "nf4", "--out", str(out), "--data", str(tiny.chats))
    assert done.returncode == 0, done.stderr
    assert "chats.jsonl" in done.stdout and (out / "model.safetensors").is_file()
    assert not list(tmp_path.glob(".partial-*"))


@needs_llm_compressor
@pytest.mark.parametrize("kind", ["gptq", "awq", "fp8-vllm"])
def test_llm_compressor_quantizes_for_vllm_calibrated_on_the_runs_own_rows(
    tiny: Tiny, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(measure, "_REPEATS", 1)
    monkeypatch.setitem(calibration.TOKENS, "cpu", 1024)
    monkeypatch.delenv("SOJOURN_VLLM_PYTHON", raising=False)
    run, out = tiny.whole(*LORA), tmp_path / kind
    done = called("quantize", run.path.name, "--to", kind, "--out", str(out), "--json")
    assert done.returncode == 0, done.stderr
    assert ("rows of the run's training data" in done.stderr) == (kind != "fp8-vllm")
    assert "%|" not in done.stderr  # no progress bars of libraries
    manifest = json.loads(done.stdout)
    found, source = manifest["measured"]["quantized"], manifest["measured"]["source"]
    assert manifest["gate"]["passed"] and found["bytes"] < source["bytes"]
    assert found["perplexity"] == pytest.approx(source["perplexity"], rel=0.2)
    config = read_json_object(out / "config.json")
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert config["quantization_config"]["ignore"] == ["lm_head"] and "torch_dtype" in config
    weights = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["type"]) == ((8, "float") if kind == "fp8-vllm" else (4, "int"))
    assert kind == "fp8-vllm" or weights["group_size"] in (32, 64, 128)
    assert set(read_json_object(out / MANIFEST)["files"]) | {MANIFEST} == {path.name for path in out.iterdir()}
    verified = called("verify", str(out))
    assert verified.returncode == 0, verified.stderr
