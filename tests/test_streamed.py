"""A model that is read while it computes has the logits of the same model in plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sojourn.errors import UserError
from sojourn.infer.streamed import streamed_logits
from sojourn.infer.weight_source import FolderWeights
from sojourn.storage.files import read_json_object, write_json
from test_merge import make_model

LISTS = [[5, 17, 3, 99, 42, 42, 8, 7, 11, 23, 54, 3], [9], [1, 2, 3, 4, 5]]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_logits_are_those_of_transformers(family: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Several lists at once do not see each other, also with a sliding window."""
    monkeypatch.setattr("sojourn.infer.weight_source._PIECE", 500)  # the LM head in several pieces
    folder = make_model(tmp_path / family, family, **FAMILIES[family])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for ids, ours in zip(LISTS, streamed_logits(FolderWeights(folder), LISTS), strict=True):
        with torch.no_grad():
            theirs = model(torch.tensor([ids])).logits[0]
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_model_that_names_code_is_of_transformers_own_class(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "llama")
    expected = streamed_logits(FolderWeights(folder), LISTS)
    config = read_json_object(folder / "config.json")
    write_json(folder / "config.json", {**config, "auto_map": {"AutoModelForCausalLM": "own.OwnForCausalLM"}})
    (folder / "own.py").write_text("1 / 0")
    torch.testing.assert_close(streamed_logits(FolderWeights(folder), LISTS), expected, rtol=0, atol=0)


def test_a_model_that_lacks_a_weight_is_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "llama")
    config = read_json_object(folder / "config.json")
    write_json(folder / "config.json", {**config, "num_hidden_layers": 3})
    with pytest.raises(UserError, match=r"model.layers.2.self_attn.q_proj.weight is not among the model's weights"):
        streamed_logits(FolderWeights(folder), LISTS)
