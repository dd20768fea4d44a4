"""transformers' model from a `WeightSource`, in fp32 on the CPU."""

from __future__ import annotations

from typing import Any

from sojourn.errors import RunFailed
from sojourn.infer.weight_source import WeightSource

_TIED = "lm_head.weight"


def build_model(weights: WeightSource, what: str) -> Any:
    """`what`: for messages. Every parameter must be there, in its shape."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    try:
        config = CONFIG_MAPPING[str(weights.config["model_type"])].from_dict(dict(weights.config))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:  # transformers checks values in many ways
        raise RunFailed(f"{what}: no model can be built from its config: {_reason(error)}") from None
    parameters = dict(model.named_parameters())
    for name in weights.names():
        place = parameters.pop(name, None)
        if place is None or tuple(place.shape) != tuple(weights.shape(name)):
            raise RunFailed(f"{what}: {name} does not fit its config")
        place.data = weights.load(name).float()
    missing = [name for name in parameters if name != _TIED or not config.tie_word_embeddings]
    if missing:
        raise RunFailed(f"{what}: {missing[0]} is missing")
    return model.eval()


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
