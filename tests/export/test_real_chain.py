"""The whole way of a real model (`SOJOURN_REAL_MODEL`): LoRA training, merge, GGUF in four types, the LoRA alone as a
GGUF adapter, ONNX; each by its command, and what real llama.cpp and onnxruntime say beside base and adapter in peft."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from gguf_models import change_key
from real_lora import PROMPTS, REAL, TOKENS, RealLora, needs_model
from sojourn.export.formats import find_format
from sojourn.export.open_source import open_weights
from sojourn.export.progress import NoProgress
from sojourn.export.reference import load_reference
from sojourn.export.replay import replay_export
from sojourn.export.source_reference import reference_of
from sojourn.export.stage import ExportStage
from sojourn.infer.gguf.file import GgufFile
from sojourn.infer.runtimes import llamacpp, onnx_runtime
from sojourn.infer.runtimes.base import Runtime
from sojourn.infer.runtimes.registry import open_runtime

pytestmark = needs_model
needs_llamacpp = pytest.mark.skipif(bool(llamacpp.unavailable()), reason=llamacpp.unavailable() or "llama.cpp")
needs_onnxruntime = pytest.mark.skipif(bool(onnx_runtime.unavailable()), reason=onnx_runtime.unavailable() or "onnx")


@dataclass
class Said:
    text: str
    ids: list[int]
    tokens: list[int]
    logits: np.ndarray


@pytest.fixture(scope="session")
def wanted(lora: RealLora) -> list[Said]:
    """Base and adapter, not merged, in peft."""
    found = []
    with open_runtime("transformers", lora.final) as runtime:
        for prompt in PROMPTS:
            text = runtime.render([{"role": "user", "content": prompt}])
            assert text is not None
            ids = runtime.encode(text)
            tokens, logits = runtime.greedy(ids, TOKENS), runtime.logits(ids)
            assert tokens is not None and logits is not None
            found.append(Said(text, ids, tokens, logits))
    return found


@pytest.fixture(scope="session")
def merged(lora: RealLora, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("merged") / "lora"
    lora.export("merge", lora.name, out)
    return out


def assert_same_ids(runtime: Runtime, wanted: list[Said], out: Path) -> None:
    answers = load_reference(out).answers
    assert len(answers) > 10
    for answer in answers:
        assert runtime.encode(answer.text, answer.probe.add_special_tokens) == answer.ids, answer.text
    assert [runtime.encode(one.text) for one in wanted] == [one.ids for one in wanted]


def assert_same_words(runtime: Runtime, wanted: list[Said], most: float) -> None:
    for one in wanted:
        logits = runtime.logits(one.ids)
        assert logits is not None
        assert np.abs(logits - one.logits).max() < most * np.abs(one.logits).max(), one.text
        assert runtime.greedy(one.ids, TOKENS) == one.tokens, one.text


@needs_llamacpp
@pytest.mark.parametrize("quantization", ["f16", "q8_0", "q4_0", "q4_k_m"])
def test_the_merged_model_in_llama_cpp(
    merged: Path, lora: RealLora, wanted: list[Said], quantization: str, tmp_path: Path
) -> None:
    """A run's own K-quants have an importance matrix, measured on its data."""
    model = lora.name if quantization == "q4_k_m" else str(merged)
    gate = lora.export("export", model, tmp_path / "out", "--to", "gguf", "--quantize", quantization)
    assert gate["replay"]["runtime"] == "llama.cpp" and gate["tensors"] > 200
    assert not any("importance" in note for note in gate["notes"])
    print(quantization, gate["replay"]["figures"], gate["replay"]["compared"])
    with llamacpp.open_model(tmp_path / "out") as runtime:
        assert_same_ids(runtime, wanted, tmp_path / "out")
        if quantization == "f16":
            assert_same_words(runtime, wanted, most=1e-2)


@needs_llamacpp
def test_a_wrong_pre_tokenizer_is_caught_in_llama_cpp(tmp_path: Path) -> None:
    source = open_weights(REAL)
    with ExportStage(tmp_path / "out", "planted") as stage:
        find_format("gguf").writer()(source, stage, "f16", NoProgress())
        file = next(stage.finish({}).glob("*.gguf"))
    with open_runtime("transformers", Path(REAL)) as ours:
        reference = reference_of(ours, 2048)
    for pre in {"gpt-2", "smollm", "qwen2", "llama-bpe"} - {GgufFile(file)["tokenizer.ggml.pre"]}:
        change_key(file, "tokenizer.ggml.pre", pre)
        found = replay_export(file, "gguf", "f16", reference, print, ["llamacpp"])
        assert found.drift is not None and found.drift.startswith("token ids, "), (pre, found.facts())


@needs_llamacpp
def test_the_run_itself_becomes_the_same_file_as_its_merged_folder(
    merged: Path, lora: RealLora, tmp_path: Path
) -> None:
    lora.export("export", lora.name, tmp_path / "one", "--to", "gguf")
    lora.export("export", str(merged), tmp_path / "other", "--to", "gguf")
    one, other = (GgufFile(next((tmp_path / name).glob("*.gguf"))) for name in ("one", "other"))
    assert one.tensors.keys() == other.tensors.keys()
    assert all((one.raw(name) == other.raw(name)).all() for name in one.tensors)
    keys = [key for key in one.metadata if key.startswith(("tokenizer.", "llama."))]
    assert len(keys) > 20 and all(one[key] == other[key] for key in keys)


@needs_llamacpp
def test_the_adapter_beside_its_base_in_llama_cpp(lora: RealLora, wanted: list[Said], tmp_path: Path) -> None:
    gate = lora.export("export", lora.name, tmp_path / "adapter", "--to", "gguf-adapter")
    assert gate["replay"]["runtime"] == "llama.cpp" and gate["replay"]["figures"]["same greedy text"] > 0
    lora.export("export", REAL, tmp_path / "base", "--to", "gguf")
    together = tmp_path / "together"
    together.mkdir()
    for name in ("adapter", "base"):
        file = next((tmp_path / name).glob("*.gguf"))
        file.rename(together / file.name)
    with llamacpp.open_model(together) as runtime:
        assert_same_words(runtime, wanted, most=1e-2)
    (next(together.glob("*LoRA*"))).unlink()
    with llamacpp.open_model(together) as runtime:  # without it the base says something else
        assert [runtime.greedy(one.ids, TOKENS) for one in wanted[:4]] != [one.tokens for one in wanted[:4]]


@needs_onnxruntime
def test_the_merged_model_in_onnxruntime(lora: RealLora, wanted: list[Said], tmp_path: Path) -> None:
    gate = lora.export("export", lora.name, tmp_path / "out", "--to", "onnx")
    assert gate["replay"]["runtime"] == "onnxruntime"
    with onnx_runtime.open_model(tmp_path / "out") as runtime:
        assert_same_ids(runtime, wanted, tmp_path / "out")
        assert_same_words(runtime, wanted, most=1e-4)
