"""GGUF files in real llama.cpp: every family's logits, and SmolLM2 (`SOJOURN_REAL_MODEL`) word for word."""

from __future__ import annotations

import os
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
PROMPTS = tuple(f"Tell me about the number {number}." for number in range(10)) + tuple(
    f"Write a sentence about {thing}."
    for thing in ("cats", "rain", "Paris", "bread", "the sea", "trains", "snow", "books", "tea", "mountains")
)
REAL = os.environ.get("SOJOURN_REAL_MODEL")


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


@pytest.mark.skipif(REAL is None, reason="SOJOURN_REAL_MODEL names no model")
def test_the_real_model_says_the_same_in_llama_cpp(tmp_path: Path) -> None:
    expected = transformers_runtime.open_model(Path(str(REAL)))
    with llamacpp.open_model(write_gguf(Path(str(REAL)), tmp_path / "out", "f16")) as runtime:
        for prompt in PROMPTS:
            chat = [{"role": "user", "content": prompt}]
            text = runtime.render(chat)
            assert text == expected.render(chat) and text is not None
            ids = runtime.encode(text)
            assert ids == expected.encode(text)
            found, wanted = runtime.logits(ids), expected.logits(ids)
            assert np.abs(found - wanted).max() / np.abs(wanted).max() < 1e-2
            assert runtime.greedy(ids, 64) == expected.greedy(ids, 64)


@pytest.mark.skipif(REAL is None, reason="SOJOURN_REAL_MODEL names no model")
@pytest.mark.parametrize("quantization", ["q8_0", "q4_0", "q4_k_m"])
def test_smaller_types_keep_token_ids(tmp_path: Path, quantization: str) -> None:
    expected = transformers_runtime.open_model(Path(str(REAL)))
    with llamacpp.open_model(write_gguf(Path(str(REAL)), tmp_path / "out", quantization)) as runtime:
        assert all(runtime.encode(text) == expected.encode(text) for text in (*TEXTS, *PROMPTS))
        assert runtime.greedy(runtime.encode(PROMPTS[0]), 8)
