"""GGUF files of every family in real llama.cpp."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from gguf_models import FAMILIES, make_model, write_gguf
from shared import Shared
from sojourn.infer.runtimes import llamacpp, transformers_runtime

pytestmark = pytest.mark.skipif(bool(llamacpp.unavailable()), reason=llamacpp.unavailable() or "llama.cpp")
IDS = [5, 17, 3, 99, 42, 42, 8, 120, 7, 7, 31]
TEXTS = (
    "Hello, it's 12:45!\n\n  two  spaces",
    "第3章：数据（共128页）",
    "def f(x):\n    return x ** 2",
    "DON'T café 🙂 1,234.5",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_computes_what_the_model_computes(
    shared: Shared, tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, changed = FAMILIES[family]
    folder = make_model(shared.copy_base(tmp_path), tmp_path / "model", kind, **changed)
    expected = transformers_runtime.open_model(folder)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        logits = model(torch.tensor([IDS])).logits[0].numpy()
    with llamacpp.open_model(write_gguf(folder, tmp_path / "out")) as runtime:
        found = runtime.logits(IDS)
        assert np.abs(found - logits).max() / np.abs(logits).max() < 1e-3
        assert all(runtime.encode(text) == expected.encode(text) for text in TEXTS)
        assert runtime.greedy(IDS, 8) == expected.greedy(IDS, 8)
