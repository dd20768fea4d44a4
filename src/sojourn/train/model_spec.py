"""The model that is to be trained, before a weight is read: from transformers' own reading of its settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sojourn.catalog.models import ModelSpec
from sojourn.config.schema import RunConfig
from sojourn.errors import UserError
from sojourn.model.base import base_of, load_model_config
from sojourn.resolve.config_json import spec_of_settings
from sojourn.resolve.new_model import llama_spec, new_model_spec

# Older families have other names for these in their files; transformers' objects answer to both.
_NAMES = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "tie_word_embeddings",
          "attention_dropout", "attn_pdrop", "attn_logit_softcapping")  # fmt: skip


def local_model_spec(config: RunConfig) -> ModelSpec:
    if config.model.base is None:
        return new_model_spec(config.model, int(config.data.vocab_size))
    settings = load_model_config(base_of(config)).get_text_config()
    known = {**settings.to_dict(), **{key: getattr(settings, key, None) for key in _NAMES}}
    try:
        model = spec_of_settings({**known, "model_type": settings.model_type}, str(config.model.base))
    except UserError:  # transformers knows it, and that counts; it is estimated as a Llama of its sizes
        model = replace(_llama_of_sizes(known), family=settings.model_type)
    return replace(model, positions=getattr(settings, "max_position_embeddings", None) or 0)


def _llama_of_sizes(settings: dict[str, Any]) -> ModelSpec:
    d, heads = int(settings["hidden_size"]), int(settings["num_attention_heads"])
    model = llama_spec(
        d, int(settings["num_hidden_layers"]), heads, int(settings.get("num_key_value_heads") or heads),
        int(settings.get("intermediate_size") or 4 * d), int(settings["vocab_size"]),
        bool(settings.get("tie_word_embeddings", True)),
    )  # fmt: skip
    return replace(
        model,
        head_dim=int(settings.get("head_dim") or model.head_dim),
        softcap=settings.get("attn_logit_softcapping") is not None,
        attention_dropout=bool(settings.get("attention_dropout") or settings.get("attn_pdrop")),
    )
