"""A QLoRA run is merged into the unquantized base, never into the NF4 one that it was trained on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from conftest import called
from tiny import Tiny

IDS = torch.tensor([[5, 17, 3, 99, 42, 42, 8]])


def test_a_qlora_run_is_merged_into_the_unquantized_base(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes")
    # bitsandbytes repacks weights on such CPUs, and fails where rows are no multiple of its blocks.
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)
    run = tiny.whole("method.kind=qlora", "method.rank=4", "train.lr=1e-2")
    done = called("merge", run.path.name, "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)(IDS).logits
        plain = AutoModelForCausalLM.from_pretrained(tiny.base, dtype=torch.float32)
        adapted = PeftModel.from_pretrained(plain, str(run.final)).eval()(IDS).logits
        nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
        quantized = AutoModelForCausalLM.from_pretrained(tiny.base, quantization_config=nf4)
        on_nf4 = PeftModel.from_pretrained(quantized, str(run.final)).eval()(IDS).logits
    torch.testing.assert_close(ours, adapted, rtol=1e-5, atol=1e-5)
    assert (ours - on_nf4).abs().max() > 1e-3
