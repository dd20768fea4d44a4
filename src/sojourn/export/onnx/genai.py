"""genai_config.json: what onnxruntime-genai reads of a folder."""

from __future__ import annotations

from typing import Any

from sojourn.export.onnx.architecture import Architecture
from sojourn.export.onnx.decoder import PAST, PRESENT

GRAPH_FILE = "model.onnx"
_TYPES = {"glm": "chatglm", "glm4": "chatglm"}  # the others have transformers' names
_NUMBER = "%d"


def genai_config(architecture: Architecture, generation: dict[str, Any]) -> dict[str, Any]:
    """`generation`: generation_config.json. Greedy unless that asks for sampling."""
    config = architecture.config
    stops = _tokens(generation, config, "eos_token_id")
    start, padding = (_tokens(generation, config, name) for name in ("bos_token_id", "pad_token_id"))
    decoder = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "filename": GRAPH_FILE,
        "head_size": architecture.head_dim,
        "hidden_size": int(config.hidden_size),
        "inputs": {"input_ids": "input_ids", "attention_mask": "attention_mask", **_cache_names("past", PAST)},
        "outputs": {"logits": "logits", **_cache_names("present", PRESENT)},
        "num_attention_heads": architecture.heads,
        "num_hidden_layers": len(architecture.layers),
        "num_key_value_heads": architecture.kv_heads,
    }
    model = {
        "type": _TYPES.get(architecture.model_type, architecture.model_type),
        "bos_token_id": (start or stops or [0])[0],
        "eos_token_id": stops,
        "pad_token_id": (padding or stops or [0])[0],
        "context_length": architecture.context,
        "vocab_size": int(config.vocab_size),
        "decoder": decoder,
    }
    sampled = {name: generation[name] for name in ("temperature", "top_k", "top_p") if generation.get(name) is not None}
    search = {
        "do_sample": bool(generation.get("do_sample")),
        "max_length": architecture.context,
        "past_present_share_buffer": True,
        "repetition_penalty": float(generation.get("repetition_penalty") or 1.0),
        **sampled,
    }
    return {"model": model, "search": search}


def _cache_names(when: str, pattern: str) -> dict[str, str]:
    return {f"{when}_{kind}_names": pattern.format(_NUMBER, kind) for kind in ("key", "value")}


def _tokens(generation: dict[str, Any], config: Any, name: str) -> list[int]:
    found = generation.get(name)
    found = getattr(config, name, None) if found is None else found
    return [one for one in (found if isinstance(found, list) else [found]) if type(one) is int]
