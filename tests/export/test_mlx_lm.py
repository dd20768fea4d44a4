"""mlx-lm opens our folders and gives transformers' logits. On Linux: pip install 'mlx[cpu]' mlx-lm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decoder_cases import CASES, make_decoder
from sojourn.export.mlx.weights import quantize_groups
from sojourn.export.weights_check import relative_error
from sojourn.infer.runtimes import mlx_runtime
from sojourn.infer.weight_source import FolderWeights
from test_mlx import TIED, export

pytestmark = pytest.mark.skipif(bool(mlx_runtime.unavailable()), reason=mlx_runtime.unavailable())

IDS = np.random.default_rng(0).integers(0, 160, 40).tolist()
WIDE = {"sliding_window": 64}  # where mlx-lm ignores it
CHANGED: dict[str, dict[str, Any]] = {
    "qwen2: window on later layers": WIDE,
    "mistral: window": WIDE,
    "gemma2: soft caps, window": WIDE,
    "phi3: window": WIDE,
    "gemma3: two RoPEs, soft cap, window": {"final_logit_softcapping": None},
}


@pytest.fixture(autouse=True)
def no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlx_runtime, "open_tokenizer", lambda folder: None)


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][0] != "glm"])
def test_every_family_has_the_logits_of_transformers(case: str, tmp_path: Path) -> None:
    model = make_decoder(tmp_path / "model", case, **CHANGED.get(case, {}))
    ids = IDS[:14] if "longrope" in case else IDS
    runtime = mlx_runtime.open_model(export(tmp_path / "model")[0])
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0].numpy()
    found = runtime.logits(ids)
    assert found is not None
    assert np.abs(found - wanted).max() / np.abs(wanted).max() < 1e-5
    tokens = runtime.greedy(ids[:5], 8)
    rows = runtime.logits([*ids[:5], *(tokens or [])])
    assert tokens and rows is not None
    assert [int(row.argmax()) for row in rows[4 : 4 + len(tokens)]] == tokens


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_groups_are_equal_to_mlx_core_quantize_bit_for_bit(bits: int, dtype: torch.dtype) -> None:
    import mlx.core as mx

    rows = torch.randn(64, 256).to(dtype)
    rows[0], rows[1], rows[2, :64] = 0, rows[1].abs(), 1.5
    theirs = mx.array(rows.float().numpy()).astype(getattr(mx, str(dtype).removeprefix("torch.")))
    packed, scales, biases = mx.quantize(theirs, group_size=64, bits=bits)
    ours = quantize_groups(rows, bits)
    assert (np.array(packed) == ours[0].numpy()).all()
    for found, wanted in ((scales, ours[1]), (biases, ours[2])):
        assert (np.array(found.astype(mx.float32)) == wanted.to(dtype).float().numpy()).all()


@pytest.mark.parametrize(("quantization", "most"), [("q8", 0.05), ("q4", 0.6)])
def test_a_quantized_folder_opens_and_is_near(quantization: str, most: float, tmp_path: Path) -> None:
    model = make_decoder(tmp_path / "model", TIED)
    runtime = mlx_runtime.open_model(export(tmp_path / "model", quantization)[0])
    with torch.no_grad():
        wanted = model(torch.tensor([IDS])).logits[0].numpy()
    found = runtime.logits(IDS)
    assert found is not None
    assert np.abs(found - wanted).max() / np.abs(wanted).max() < most
    source, read = FolderWeights(tmp_path / "model"), dict(runtime.weights() or ())
    assert set(read) == set(source.names())
    assert max(relative_error(read[name], source.load(name)) for name in read) < most / 3
