"""The MLX folder has the layout that mlx-lm documents. `tests/export/test_mlx_lm.py` opens it with mlx-lm itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from decoder_cases import make_decoder
from sojourn.errors import UserError
from sojourn.export.mlx.weights import MlxWeights, quantize_groups
from sojourn.export.mlx.write import write
from sojourn.export.open_source import Source
from sojourn.export.progress import NoProgress
from sojourn.export.stage import ExportStage
from sojourn.infer.weight_source import FolderWeights
from sojourn.storage.files import read_json_object

TIED = "llama: tied head, heads wider than the width"


class Said(NoProgress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def export(folder: Path, quantization: str = "auto") -> tuple[Path, list[str]]:
    weights, said = FolderWeights(folder), Said()
    source = Source("tiny", weights, weights, (), {}, [], folder)
    with ExportStage(folder.with_name(f"{folder.name}-{quantization}"), source.fingerprint) as stage:
        write(source, stage, quantization, said)
        return stage.finish({}), said.lines


def test_groups_are_what_mlx_core_quantize_gives() -> None:
    """Recorded from mlx 0.32: 64 values from −2.5 to 5.375."""
    row = (torch.arange(64.0) - 20)[None] / 8
    packed, scales, biases = quantize_groups(row, 4)
    assert [hex(word) for word in packed[0].tolist()[:3]] == ["0xdddeeeef", "0xbbccccdd", "0x9aaaaabb"]
    assert (scales.item(), biases.item()) == pytest.approx((-0.5375000238418579, 5.375))
    packed, scales, biases = quantize_groups(row, 8)
    assert [hex(word) for word in packed[0].tolist()[:3]] == ["0xf3f7fbff", "0xe3e7ebef", "0xd2d6dbdf"]
    assert (scales.item(), biases.item()) == pytest.approx((-0.030890803784132004, 5.375))


@pytest.mark.parametrize(("bits", "steps"), [(4, 15), (8, 255)])
def test_values_are_off_by_half_a_step_at_most_and_zeros_stay_zero(bits: int, steps: int) -> None:
    rows = torch.randn(6, 128)
    rows[0] = 0
    packed, scales, biases = quantize_groups(rows, bits)
    values = packed.view(torch.uint8)
    if bits == 4:
        values = torch.stack([values & 15, values >> 4], -1).flatten(1)
    plain = values.float().unflatten(1, (-1, 64)) * scales[..., None] + biases[..., None]
    limit = (rows.unflatten(1, (-1, 64)).amax(-1) - rows.unflatten(1, (-1, 64)).amin(-1)) / steps
    assert ((plain - rows.unflatten(1, (-1, 64))).abs() <= limit[..., None] * 1.01).all()
    assert (plain[0] == 0).all()


def test_a_quantized_folder_has_packed_weights_scales_and_biases(tmp_path: Path) -> None:
    make_decoder(tmp_path / "model", TIED)
    folder, _ = export(tmp_path / "model", "q4")
    assert read_json_object(folder / "config.json")["quantization"] == {"group_size": 64, "bits": 4, "mode": "affine"}
    with safe_open(folder / "model.safetensors", "pt") as file:
        slices = {name: file.get_slice(name) for name in list(file.keys())}
        kinds = {name: (one.get_dtype(), one.get_shape()) for name, one in slices.items()}
    embedding = {kind: kinds[f"model.embed_tokens.{kind}"] for kind in ("weight", "scales", "biases")}
    assert embedding == {"weight": ("U32", [160, 8]), "scales": ("BF16", [160, 1]), "biases": ("BF16", [160, 1])}
    assert kinds["model.norm.weight"] == ("BF16", [64])
    assert "model.layers.0.self_attn.o_proj.scales" not in kinds  # 96 values are no multiple of 64
    assert "lm_head.weight" not in kinds


def test_rows_of_a_weight_are_the_same_whatever_pieces_it_is_read_in(tmp_path: Path) -> None:
    make_decoder(tmp_path / "model", TIED)
    weights = MlxWeights(FolderWeights(tmp_path / "model"), {}, 8)
    for name in ("model.embed_tokens.weight", "model.embed_tokens.scales"):
        whole = weights.load(name)
        assert tuple(whole.shape) == weights.shape(name)
        pieces = [weights.rows(name, start, start + 40).view(torch.uint8) for start in range(0, 160, 40)]
        assert torch.equal(torch.cat(pieces), whole.view(torch.uint8))


def test_plain_weights_are_the_sources_own(tmp_path: Path) -> None:
    make_decoder(tmp_path / "model", TIED)
    folder, _ = export(tmp_path / "model")
    wanted = load_file(tmp_path / "model" / "model.safetensors")
    found = load_file(folder / "model.safetensors")
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())
    assert set(wanted) - set(found) <= {"lm_head.weight"}


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        (TIED, {"rope_theta": 10000.0, "rope_scaling": None, "head_dim": 24, "tie_word_embeddings": True}),
        ("llama: llama3 RoPE, biases", {"rope_theta": 5e5, "attention_bias": True, "mlp_bias": True}),
        ("glm4: interleaved, four norms", {"partial_rotary_factor": 0.5}),
        ("smollm3: no RoPE on some layers", {"no_rope_layers": [1, 0]}),
    ],
)
def test_settings_have_the_names_that_mlx_lm_reads(case: str, wanted: dict[str, Any], tmp_path: Path) -> None:
    """Its models have silent defaults: a RoPE base of 10,000 where it finds none at the top level."""
    make_decoder(tmp_path / "model", case)
    config = read_json_object(export(tmp_path / "model")[0] / "config.json")
    assert {key: config.get(key) for key in wanted} == wanted
    assert "rope_parameters" not in config


def test_scaled_rope_has_its_older_spelling(tmp_path: Path) -> None:
    make_decoder(tmp_path / "model", "llama: llama3 RoPE, biases")
    scaling = read_json_object(export(tmp_path / "model")[0] / "config.json")["rope_scaling"]
    assert (scaling["type"], scaling["rope_type"], scaling["factor"]) == ("llama3", "llama3", 8.0)


def test_gemma3_has_the_pattern_of_its_windows_and_both_bases(tmp_path: Path) -> None:
    make_decoder(tmp_path / "model", "gemma3: two RoPEs, soft cap, window", final_logit_softcapping=None)
    config = read_json_object(export(tmp_path / "model")[0] / "config.json")
    names = ("sliding_window_pattern", "rope_theta", "rope_local_base_freq")
    assert [config[name] for name in names] == [2, 1e6, 1e4]


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("gemma3: two RoPEs, soft cap, window", "--to mlx: it has a soft cap, which mlx-lm's gemma3_text has not"),
        ("glm: interleaved", "--to mlx: not for the family “glm”"),
    ],
)
def test_what_mlx_lm_does_not_have_is_refused_in_a_line(case: str, says: str, tmp_path: Path) -> None:
    make_decoder(tmp_path / "model", case)
    with pytest.raises(UserError, match=says):
        export(tmp_path / "model")


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("phi3: window", "ignores the sliding window of 9 tokens"),
        ("phi3: longrope, partial", "the one for up to 16 tokens"),
    ],
)
def test_what_mlx_lm_does_otherwise_is_said(case: str, says: str, tmp_path: Path) -> None:
    make_decoder(tmp_path / "model", case)
    assert any(says in line for line in export(tmp_path / "model")[1])
