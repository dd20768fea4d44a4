"""What is to be trained, as far as choices depend on it: known before any weight is read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sojourn.catalog.models import ModelSpec
from sojourn.config.schema import RunConfig
from sojourn.errors import UserError
from sojourn.model.base import Base, load_model_config
from sojourn.resolve.model_spec import of_settings
from sojourn.resolve.new_model import new_shape, scratch_shape


@dataclass(frozen=True)
class Subject:
    """`positions`: how many tokens it holds; None where any length does."""

    family: str
    shape: ModelSpec
    softcap: bool = False
    dropout: bool = False
    positions: int | None = None


def base_of(config: RunConfig) -> Base:
    model, method = config.model, config.method
    bits = method.bits if method.kind == "qlora" else None
    cut = config.parallel.engine == "fsdp"
    return Base(str(model.base), model.revision, model.trust_remote_code, bits, method.double_quant, cut)


def subject_of(config: RunConfig) -> Subject:
    if config.model.base is None:
        return Subject("llama", scratch_shape(config.model, int(config.data.vocab_size)))
    settings = load_model_config(base_of(config)).get_text_config()
    known = {**settings.to_dict(), **{key: getattr(settings, key, None) for key in _NAMES}}
    try:
        shape = of_settings({**known, "model_type": settings.model_type}, str(config.model.base))
    except UserError:  # transformers knows it, and that counts; it is planned as a usual model
        shape = _usual(known)
    return Subject(
        family=settings.model_type,
        shape=shape,
        softcap=getattr(settings, "attn_logit_softcapping", None) is not None,
        dropout=bool(getattr(settings, "attention_dropout", 0.0) or getattr(settings, "attn_pdrop", 0.0)),
        positions=getattr(settings, "max_position_embeddings", None),
    )


# Older families have other names for these in their files; transformers' objects answer to both.
_NAMES = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "tie_word_embeddings")


def _usual(settings: dict[str, Any]) -> ModelSpec:
    d, heads = int(settings["hidden_size"]), int(settings["num_attention_heads"])
    shape = new_shape(
        d, int(settings["num_hidden_layers"]), heads, int(settings.get("num_key_value_heads") or heads),
        int(settings.get("intermediate_size") or 4 * d), int(settings["vocab_size"]),
        bool(settings.get("tie_word_embeddings", True)),
    )  # fmt: skip
    return replace(shape, head_dim=int(settings.get("head_dim") or shape.head_dim))
