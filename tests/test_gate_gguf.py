"""Faults in a 4-bit GGUF file, where rounding alone changes the logits of a small model as much as a fault does: the
weights that transformers reads from the file tell them apart."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import pytest

from sojourn.export.replay import GateResult, replay_export
from sojourn.export.source_reference import reference_of
from sojourn.infer.runtimes.transformers_runtime import open_model
from sojourn.infer.weight_source import FolderWeights
from test_gate import CONTEXT, change
from test_gguf import write_gguf

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from sojourn.export.reference import Reference

Q4_0, Q4_1 = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q4_1


@pytest.fixture(scope="module")
def folder(shared, tmp_path_factory) -> Path:
    folder = shared.copy_base(tmp_path_factory.mktemp("gate"))
    change(folder, lambda w: {n: v * 6 if v.ndim == 2 and "layers" in n else v for n, v in w.items()})
    return folder


@pytest.fixture(scope="module")
def reference(folder) -> Reference:
    with open_model(folder) as runtime:
        return reference_of(runtime, CONTEXT)


def replay_file(folder: Path, file: Path, reference: Reference, fault: Callable | None, patch) -> GateResult:
    """A file in Q4_0 whose tensors went through `fault` first, replayed in transformers."""

    class Quantizing(gguf.GGUFWriter):
        def add_tensor(self, name: str, tensor: np.ndarray) -> None:
            if fault is not None:
                name, tensor = fault(name, tensor)
            if tensor.ndim < 2:
                super().add_tensor(name, tensor)
            else:
                super().add_tensor(name, gguf.quants.quantize(tensor, Q4_0), raw_dtype=Q4_0)

    patch.setattr(gguf, "GGUFWriter", Quantizing)
    write_gguf(folder, file)
    weights = FolderWeights(folder)
    return replay_export(file, "gguf", "q4_0", reference, print, ["transformers"], weights)


def not_permuted(name: str, tensor: np.ndarray) -> tuple[str, np.ndarray]:
    """Undoes the interleaving, as a writer that forgot it."""
    heads = {"attn_q": 4, "attn_k": 2}
    kind = next((one for one in heads if one in name), None)
    if kind is None:
        return name, tensor
    rows, columns = tensor.shape
    halves = tensor.reshape(heads[kind], rows // heads[kind] // 2, 2, columns)
    return name, halves.swapaxes(1, 2).reshape(rows, columns)


def swapped(name: str, tensor: np.ndarray) -> tuple[str, np.ndarray]:
    other = {"blk.0.ffn_up.weight": "blk.1.ffn_up.weight", "blk.1.ffn_up.weight": "blk.0.ffn_up.weight"}
    return other.get(name, name), tensor


def transposed_head(name: str, tensor: np.ndarray) -> tuple[str, np.ndarray]:
    return name, tensor.T.reshape(tensor.shape) if name == "output.weight" else tensor


def rounded_before(name: str, tensor: np.ndarray) -> tuple[str, np.ndarray]:
    """As if an adapter had been merged into a base that was 4-bit already."""
    return name, gguf.quants.dequantize(gguf.quants.quantize(tensor, Q4_1), Q4_1) if tensor.ndim > 1 else tensor


def test_a_healthy_four_bit_file_passes(folder, reference, tmp_path, monkeypatch):
    found = replay_file(folder, tmp_path / "x.gguf", reference, None, monkeypatch)
    assert found.drift is None and found.tensors == 21, found.drift


@pytest.mark.parametrize("fault", [not_permuted, swapped, transposed_head, rounded_before])
def test_faults_are_caught_in_a_four_bit_file(folder, reference, tmp_path, monkeypatch, fault):
    found = replay_file(folder, tmp_path / "x.gguf", reference, fault, monkeypatch)
    assert found.drift is not None and found.drift.startswith(("weights, ", "logits, ")), found.facts()
