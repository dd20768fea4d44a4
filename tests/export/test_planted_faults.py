"""Faults planted in exports are caught by the gate in the program that the export is for: real llama.cpp, onnxruntime.
The writers' own checks are off where they would refuse first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gguf_models import change_key
from sojourn.data.tokenize.bpe import train_bpe
from sojourn.data.tokenize.gguf_pre_tokenizers import known
from sojourn.export.formats import find_format
from sojourn.export.gguf import tensors, tokenizer
from sojourn.export.open_source import Source, open_weights
from sojourn.export.progress import NoProgress
from sojourn.export.reference import Reference
from sojourn.export.replay import GateResult, replay_export
from sojourn.export.source_reference import source_reference
from sojourn.export.stage import ExportStage
from sojourn.infer.runtimes.registry import available
from test_gate import adapter  # noqa: F401 - fixtures
from test_gate_gguf import folder  # noqa: F401

Patch = pytest.MonkeyPatch
RENAMED = {"<|im_end|>": "<turn_end>", "<|endoftext|>": "<text_end>"}  # llama.cpp would stop at the old names by itself
CODE = ["def f():\n    for i in range(10):\n\t\tprint(i)\n"] * 20  # pre-tokenizers differ in what follows a colon
UP = "model.layers.{}.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def source(folder: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Source:  # noqa: F811
    train_bpe(CODE, 300, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]).save(str(folder / "tokenizer.json"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text(encoding="utf-8")
        for old, new in RENAMED.items():
            text = text.replace(old, new)
        for one in (folder, adapter):
            (one / name).write_text(text, encoding="utf-8")
    return open_weights(str(adapter), base=str(folder))


@pytest.fixture(scope="module")
def reference(source: Source) -> Reference:
    return source_reference(source, print)


@dataclass
class Faulty:
    """A model's weights, each as `fault` returns it."""

    weights: Any
    fault: Callable[[Any, str], torch.Tensor]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.weights, name)

    def load(self, name: str) -> torch.Tensor:
        return self.fault(self.weights, name)

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self.load(name)[start:stop]


def swapped(weights: Any, name: str) -> torch.Tensor:
    others = {UP.format(0): UP.format(1), UP.format(1): UP.format(0)}
    return weights.load(others.get(name, name))


def transposed_head(weights: Any, name: str) -> torch.Tensor:
    found = weights.load(name)
    return found.T.reshape(found.shape) if name == "lm_head.weight" else found


def merged_into_the_quantized_base(weights: Any, name: str) -> torch.Tensor:
    import gguf

    kind, base = gguf.GGMLQuantizationType.Q4_1, weights.base.load(name)
    if base.ndim < 2 or "layers" not in name:
        return weights.load(name)
    rounded = gguf.quants.dequantize(gguf.quants.quantize(base.float().numpy(), kind), kind)
    return weights.load(name) - base + torch.from_numpy(rounded)


def replayed(source: Source, reference: Reference, format: str, quantization: str, target: Path) -> GateResult:
    given = find_format(format)
    with ExportStage(target, "planted") as stage:
        given.writer()(source, stage, quantization, NoProgress())
        path = stage.finish({})
    true = source.weights.weights if isinstance(source.weights, Faulty) else source.weights
    return replay_export(path, format, quantization, reference, print, given.runtimes[:1], true)


FORMATS = [("gguf", "f16"), ("gguf", "q4_0"), ("gguf", "q4_k_m"), ("onnx", "fp32"), ("hf", "auto")]


@pytest.fixture
def here(request: pytest.FixtureRequest) -> tuple[str, str]:
    format, quantization = request.param
    reason = available(find_format(format).runtimes[0])
    if reason:
        pytest.skip(reason)
    return format, quantization


@pytest.mark.parametrize("here", FORMATS, ids="-".join, indirect=True)
def test_a_healthy_export_passes(source: Source, reference: Reference, here: tuple[str, str], tmp_path: Path) -> None:
    found = replayed(source, reference, *here, tmp_path / "out")
    assert found.drift is None and found.tensors == 21, found.facts()


@pytest.mark.parametrize("fault", [swapped, transposed_head, merged_into_the_quantized_base])
@pytest.mark.parametrize("here", FORMATS, ids="-".join, indirect=True)
def test_wrong_weights_are_caught(
    source: Source, reference: Reference, here: tuple[str, str], fault: Any, tmp_path: Path
) -> None:
    wrong: Any = Faulty(source.weights, fault)
    found = replayed(replace(source, weights=wrong), reference, *here, tmp_path / "out")
    assert found.drift is not None and found.drift.startswith(("logits, ", "weights, ", "greedy text, ")), found.facts()


def not_permuted(patch: Patch) -> None:
    patch.setattr(tensors, "interleave", lambda rows, heads: rows)


def wrong_pre_tokenizer(patch: Patch) -> None:
    patch.setattr(tokenizer, "identify", lambda *_: known("gpt-2"))
    patch.setattr(tokenizer, "_first_difference", lambda *_: "")


def wrong_template(patch: Patch) -> None:
    real = tokenizer.templates_of
    wrong: Any = lambda one: {name: text.replace("assistant", "Assistant") for name, text in real(one).items()}  # noqa: E731
    patch.setattr(tokenizer, "templates_of", wrong)


def missing_eos(patch: Patch) -> None:
    real = tokenizer.add_special_tokens
    without: Any = lambda writer, ids, adds: real(writer, {"bos": ids["eos"]}, adds)  # noqa: E731
    patch.setattr(tokenizer, "add_special_tokens", without)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (not_permuted, ("logits, ", "weights, ")),
        (wrong_pre_tokenizer, "token ids, "),
        (wrong_template, "template, "),
        (missing_eos, "stop token, "),
    ],
)
@pytest.mark.parametrize("here", FORMATS[:3], ids="-".join, indirect=True)
def test_faults_of_a_gguf_writer_are_caught(
    source: Source, reference: Reference, here: tuple[str, str], fault: Any, kind: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    fault(monkeypatch)
    found = replayed(source, reference, *here, tmp_path / "out")
    assert found.drift is not None and found.drift.startswith(kind), found.facts()


@pytest.mark.parametrize(("key", "value"), [("tokenizer.ggml.pre", "gpt-2"), ("tokenizer.ggml.eos_token_id", 5)])
@pytest.mark.parametrize("here", FORMATS[:1], ids="-".join, indirect=True)
def test_a_file_that_was_changed_afterwards_is_caught(
    source: Source, reference: Reference, here: tuple[str, str], key: str, value: Any, tmp_path: Path
) -> None:
    """By `verify --against`, which knows nothing of how it was written."""
    format, quantization = here
    assert replayed(source, reference, *here, tmp_path / "out").drift is None
    file = next((tmp_path / "out").glob("*.gguf"))
    change_key(file, key, value)
    found = replay_export(file, format, quantization, reference, print, ["llamacpp"])
    assert found.drift is not None and found.drift.startswith(("token ids, ", "stop token, ")), found.facts()
