"""What most tests start from, made once per worker and copied into the home of a test: chats, their prepared data, a
tiny base model."""

from __future__ import annotations

import json
import os
import shutil
from functools import cached_property
from pathlib import Path

from budget import shared_cost

MORE = 10 if "SOJOURN_FUZZ" in os.environ else 1  # times as many random examples: `make test-long`

COLOURS = ("red", "green", "blue", "gold", "grey", "pink", "black", "white")
THINGS = ("cat", "boat", "lamp", "tree", "stone", "river", "cloud", "bell")


def write_chats(path: Path) -> Path:
    """400 short chats."""
    lines = [
        {"prompt": f"What colour is the {THINGS[i % 8]} of house {i}?", "completion": f"It is {COLOURS[i // 8 % 8]}."}
        for i in range(400)
    ]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
# What makes each family with fused forwards compute all that it can.
FUSED_CHANGES = {
    "llama": {"tie_word_embeddings": True, "attention_bias": True},
    "qwen2": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "mistral": {"sliding_window": 7},
    "smollm3": {"no_rope_layers": [1, 0]},
    "gemma3_text": {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {"sliding_window": 7, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}},
}


def make_base(chats: Path, home: Path, family: str, **changed: object) -> Path:
    """A tiny model with random weights and a tokenizer of the chats, as plain transformers writes it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from sojourn.config.load import load_run
    from sojourn.data.prepare import prepare

    args = ["smoke", f"data.sources={chats}", "data.vocab_size=400", "data.max_length=64"]
    artefact = prepare(load_run(args).config.data, home / "prepared")
    sizes = {
        "vocab_size": artefact.vocab_size, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
        "bos_token_id": None, "eos_token_id": artefact.stop_ids[0], "pad_token_id": artefact.pad_id,
    }  # fmt: skip
    torch.manual_seed(1)
    folder = home / family
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**sizes, **changed})).save_pretrained(folder)
    for file in artefact.tokenizer.iterdir():
        shutil.copy(file, folder / file.name)
    return folder


class Shared:
    """`copy_prepared` and `copy_base` make what they copy on their first call."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def copy_prepared(self, home: Path) -> None:
        """Prepared data of a new model on the chats, so that a run in `home` need not prepare it."""
        shutil.copytree(self._prepared, home / "prepared", dirs_exist_ok=True)

    def copy_base(self, home: Path) -> Path:
        """A tiny Llama, with the prepared data of a run that starts from it."""
        shutil.copytree(self._base.parent / "prepared", home / "prepared", dirs_exist_ok=True)
        return shutil.copytree(self._base, home / self._base.name)

    @cached_property
    def _chats(self) -> Path:
        return write_chats(self._folder / "chats.jsonl")

    @cached_property
    def _prepared(self) -> Path:
        from sojourn.config.load import load_run
        from sojourn.data.prepare import prepare

        args = ["smoke", f"data.sources={self._chats}", "data.vocab_size=400", "data.max_length=64"]
        with shared_cost():
            prepare(load_run(args).config.data, self._folder / "new" / "prepared")
        return self._folder / "new" / "prepared"

    @cached_property
    def _base(self) -> Path:
        from sojourn.config.load import load_run
        from sojourn.data.prepare import prepare
        from sojourn.data.settings import data_settings

        home = self._folder / "base"
        shutil.copytree(self._prepared, home / "prepared")
        with shared_cost():
            base = make_base(self._chats, home, "llama")
            args = [f"model.base={base}", f"data.sources={self._chats}", "data.max_length=64", "method.kind=lora"]
            prepare(data_settings(load_run(args).config), home / "prepared")
        return base
