"""Inverse frequencies of rotary embeddings, from transformers' own functions."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sojourn.config.messages import printable
from sojourn.errors import UserError
from sojourn.export.onnx.architecture import Architecture

if TYPE_CHECKING:
    import numpy as np

_STATIC = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """Angles are positions times `frequencies` [rotated dimensions / 2]; cosine and sine are multiplied by `scaling`.
    Texts longer than `long_from` tokens have `long_frequencies`."""

    frequencies: np.ndarray
    scaling: float
    long_frequencies: np.ndarray | None = None
    long_from: int = 0


def read_ropes(architecture: Architecture) -> dict[str, Rope]:
    """By the key in the layers' `rope`."""
    return {key: _read(architecture, key) for key in dict.fromkeys(one.rope for one in architecture.layers) if key}


def _read(architecture: Architecture, key: str) -> Rope:
    prefix = architecture.family.prefix
    module_name = "gemma3" if architecture.model_type == "gemma3_text" else architecture.model_type
    module = importlib.import_module(f"transformers.models.{module_name}.modeling_{module_name}")
    parameters = architecture.config.rope_parameters if key == "all" else architecture.config.rope_parameters[key]
    kind = parameters["rope_type"]
    if kind not in (*_STATIC, "longrope"):
        raise UserError(f"config.json: RoPE of the type “{printable(kind)}” is in no graph here")
    rotary = getattr(module, f"{prefix}RotaryEmbedding")(architecture.config)
    start = "" if key == "all" else f"{key}_"
    scaling = float(getattr(rotary, f"{start}attention_scaling"))
    frequencies = getattr(rotary, f"{start}inv_freq").float().numpy()
    if kind != "longrope":
        return Rope(frequencies, scaling)
    original = int(parameters["original_max_position_embeddings"])
    return Rope(frequencies, scaling, _long_frequencies(architecture.config, key, original), original)


def _long_frequencies(config: Any, key: str, original: int) -> np.ndarray:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    layer_type = None if key == "all" else key
    found, _ = ROPE_INIT_FUNCTIONS["longrope"](config, None, seq_len=original + 1, layer_type=layer_type)
    frequencies: np.ndarray = found.float().numpy()
    return frequencies
