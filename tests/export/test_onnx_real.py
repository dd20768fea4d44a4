"""A real model with an adapter merged says the same in onnxruntime and onnxruntime-genai as in peft."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sojourn.export.onnx.write import write
from sojourn.export.open_source import open_weights
from sojourn.export.progress import NoProgress
from sojourn.export.stage import ExportStage
from sojourn.infer.runtimes import onnx_runtime
from sojourn.infer.runtimes.onnx_runtime import OnnxRuntime
from sojourn.infer.runtimes.transformers_runtime import TransformersRuntime
from sojourn.infer.runtimes.transformers_tokenizer import open_tokenizer

MODEL = os.environ.get("SOJOURN_REAL_MODEL", "")
pytestmark = pytest.mark.skipif(not Path(MODEL).is_dir() or not MODEL, reason="SOJOURN_REAL_MODEL names no folder")

TOKENS = 64
QUESTIONS = [
    "What is the capital of France?", "Write a haiku about rain.", "Explain gravity to a child.", "Who wrote Hamlet?",
    "List three prime numbers.", "Translate 'good morning' to Spanish.", "How do I boil an egg?", "What is 12 * 7?",
    "Give me a synonym for happy.", "Describe a cat in one sentence.", "Why is the sky blue?", "Tell me a short joke.",
    "Name a planet with rings.", "Write a Python function that adds two numbers.", "What is photosynthesis?",
    "What does HTTP stand for?", "Summarise the water cycle.", "Suggest a name for a dog.", "再见，你好吗？",
    "What is the opposite of cold?",
]  # fmt: skip


@dataclass
class Said:
    text: str
    ids: list[int]
    tokens: list[int]
    logits: np.ndarray


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random, but small: the model still speaks."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(3)
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    targets = ["q_proj", "v_proj", "down_proj"]
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.004)
    model.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module")
def wanted(adapter: Path) -> list[Said]:
    """Base and adapter, unmerged, in peft."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(adapter)).eval()
    runtime, found = TransformersRuntime(model, open_tokenizer(Path(MODEL))), []
    for question in QUESTIONS:
        text = runtime.render([{"role": "user", "content": question}]) or question
        ids = runtime.encode(text)
        tokens, logits = runtime.greedy(ids, TOKENS), runtime.logits(ids)
        assert tokens is not None and logits is not None
        found.append(Said(text, ids, tokens, logits))
    return found


@pytest.fixture(scope="module")
def folder(adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = open_weights(MODEL, adapters=[(str(adapter), 1.0)])
    with ExportStage(tmp_path_factory.mktemp("onnx") / "model", source.fingerprint) as stage:
        write(source, stage, "fp32", NoProgress())
        return stage.finish({})


@pytest.fixture(scope="module")
def runtime(folder: Path) -> Iterator[OnnxRuntime]:
    with onnx_runtime.open_model(folder) as opened:
        yield opened


def test_onnxruntime_says_the_same_with_and_without_cache(runtime: OnnxRuntime, wanted: list[Said]) -> None:
    for one, question in zip(wanted, QUESTIONS, strict=True):
        text = runtime.render([{"role": "user", "content": question}])
        assert text == one.text
        assert runtime.encode(text or "") == one.ids
        logits = runtime.logits(one.ids)
        assert logits is not None
        assert np.abs(logits - one.logits).max() < 1e-4 * np.abs(one.logits).max()
        assert runtime.greedy(one.ids, TOKENS) == one.tokens
        rows = runtime.logits([*one.ids, *one.tokens])  # all at once: without the cache of single tokens
        assert rows is not None
        assert rows[len(one.ids) - 1 : -1].argmax(-1).tolist() == one.tokens


def test_a_left_padded_batch_says_the_same(runtime: OnnxRuntime, wanted: list[Said]) -> None:
    longest = max(len(one.ids) for one in wanted)
    ids, mask = np.zeros((len(wanted), longest), int), np.zeros((len(wanted), longest), int)
    for row, one in enumerate(wanted):
        ids[row, longest - len(one.ids) :], mask[row, longest - len(one.ids) :] = one.ids, 1
    logits, cache = runtime.step(ids, mask, runtime.empty_cache(len(wanted)))
    found: list[Any] = []
    for _ in range(8):
        found.append(logits[:, -1].argmax(-1))
        mask = np.concatenate([mask, np.ones((len(wanted), 1), int)], 1)
        logits, cache = runtime.step(found[-1][:, None], mask, cache)
    for row, one in enumerate(wanted):
        assert [int(tokens[row]) for tokens in found][: len(one.tokens)] == one.tokens[:8]


def test_onnxruntime_genai_says_the_same(folder: Path, wanted: list[Said]) -> None:
    genai = pytest.importorskip("onnxruntime_genai")
    model = genai.Model(str(folder))
    tokenizer = genai.Tokenizer(model)
    for one in wanted:
        assert [int(token) for token in tokenizer.encode(one.text)] == one.ids
        settings = genai.GeneratorParams(model)
        settings.set_search_options(max_length=len(one.ids) + TOKENS, do_sample=False)
        generator = genai.Generator(model, settings)
        generator.append_tokens(one.ids)
        tokens = []
        while not generator.is_done():
            generator.generate_next_token()
            tokens.append(int(generator.get_next_tokens()[0]))
        assert tokens == one.tokens
