"""The ModelSpec that a config.json describes, with what each family's file leaves out.

The file may come from anywhere: every figure is checked before it is used.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from sojourn.catalog.models import ModelSpec, models
from sojourn.config.messages import printable
from sojourn.errors import UserError
from sojourn.resolve.families import check_trainable, stored_as

_MAX_FILE_BYTES = 4 << 20  # of a config.json; real ones have a few kilobytes
_LARGEST = {"layers": 1000, "hidden": 200_000, "heads": 4096, "head_dim": 4096, "ffn": 2_000_000,
            "expert_ffn": 2_000_000, "vocab": 10_000_000, "experts": 10_000}  # fmt: skip
_FIX = "take the publisher's config.json, or plan with a name such as model.base=qwen2.5-7b"
# Older families have names of their own for the same things.
_NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "kv_heads": ("num_key_value_heads", "multi_query_group_num"),
    "head_dim": ("head_dim", "kv_channels"),
    "ffn": ("intermediate_size", "n_inner", "ffn_hidden_size"),
    "vocab": ("vocab_size", "padded_vocab_size"),
    "positions": ("max_position_embeddings", "n_positions", "seq_length"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "active_experts": ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_k"),
    "expert_ffn": ("moe_intermediate_size",),
    "q_rank": ("q_lora_rank",),
    "kv_rank": ("kv_lora_rank",),
    "rope_dim": ("qk_rope_head_dim",),
    "nope_dim": ("qk_nope_head_dim",),
    "v_dim": ("v_head_dim",),
    "window": ("sliding_window",),
}
_BIASED = ("qwen2", "qwen2_moe", "glm4", "glm", "chatglm")  # on queries, keys and values, though their files do not say
_QK_NORM = ("qwen3", "qwen3_moe", "gemma3_text", "gemma3", "olmo2")
_BIASED_THROUGHOUT = ("gpt2", "gpt_neox", "gpt_bigcode", "opt", "bloom", "phi", "starcoder2")  # and LayerNorm's bias
_UNGATED = (*_BIASED_THROUGHOUT, "falcon", "mpt", "gptj", "codegen", "nemotron", "persimmon", "arcee")
_LEARNED_POSITIONS = ("gpt2", "gpt_bigcode", "opt")
_ROUTER_BIAS = ("gpt_oss", "ernie4_5_moe")  # trained; DeepSeek-V3 and GLM-4.5 have a buffer
# Planned by formulas of their own, beside those that the catalogue has.
_KNOWN = (
    *_UNGATED, *_ROUTER_BIAS,
    *("deepseek_v2", "deepseek_v3", "glm4_moe", "llama4_text", "llama4", "mixtral", "qwen2_moe", "qwen3_moe", "olmo"),
    *("cohere", "granite", "internlm2", "internlm3", "stablelm", "ministral", "seed_oss", "minicpm", "baichuan", "yi"),
)  # fmt: skip
_FOUR_NORMS = ("gemma2", "gemma3_text", "gemma3", "glm4")
# What transformers fills in where a file is silent, as the publisher's own files of Gemma 3 that also sees are.
_SILENT = {
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208},
}
# Families that ignore a `sliding_window` in their file unless `use_sliding_window` or `layer_types` is there too.
_IGNORES_WINDOW = ("llama", "gemma", "glm", "glm4", "chatglm", "olmo2", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6}  # where the file does not list its layers; other families: no full layer
_TIED = ("gemma", "gemma2", "gemma3", "gemma3_text", "gpt2")  # where the file is silent; others then are not


def spec_of_file(path: Path) -> ModelSpec:
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise UserError(f"{path}: {path.stat().st_size:,} bytes, and no model's is so large; {_FIX}")
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({type(error).__name__}); {_FIX}") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not valid JSON: {error}; {_FIX}") from None
    except (ValueError, RecursionError):  # numbers and nesting without end
        raise UserError(f"{path}: no model's config.json has such numbers or nesting; {_FIX}") from None
    if not isinstance(settings, dict):
        raise UserError(f"{path}: a model's config.json is a table, but this is a {type(settings).__name__}; {_FIX}")
    check_trainable(settings, str(path))
    inner = settings.get("text_config")
    if isinstance(inner, dict):  # of models that also see or hear
        outer = ("tie_word_embeddings", "quantization_config")
        settings = {**{key: settings[key] for key in outer if key in settings}, **inner}
        check_trainable(settings, str(path))
    return _noted(spec_of_settings(settings, str(path)))


def _noted(shape: ModelSpec) -> ModelSpec:
    usual = (one.family for one in models() if not (one.attention_total or one.other))
    known = {*usual, *_BIASED, *_QK_NORM, *_KNOWN}
    if shape.family in known:
        return shape
    return replace(
        shape, note=f"models of type {shape.family} are planned like a Llama of their sizes; rehearse to be sure"
    )


def spec_of_settings(settings: dict[str, Any], where: str) -> ModelSpec:
    """From the settings of a model of transformers."""
    family = settings.get("model_type")
    family = family if isinstance(family, str) and family.isprintable() and len(family) < 60 else "llama"
    settings = {**_SILENT.get(family, {}), **settings}
    found = {key: _number(settings, key, where) for key in _NAMES}
    for key in ("hidden", "layers", "heads", "vocab"):
        if found[key] is None:
            raise UserError(f"{where}: `{_NAMES[key][0]}` is missing, which a language model's has; {_FIX}")
    hidden, heads = found["hidden"] or 0, found["heads"] or 0
    kv_heads = found["kv_heads"] or heads
    if heads % kv_heads:
        raise UserError(f"{where}: {kv_heads} key/value heads do not divide {heads} heads")
    head_dim = (found["nope_dim"] or 0) + (found["rope_dim"] or 0) if found["kv_rank"] else found["head_dim"]
    if not head_dim and hidden % heads:
        raise UserError(f"{where}: {heads} heads do not divide a width of {hidden}, and no `head_dim` is given")
    experts = found["experts"] if (found["experts"] or 0) > 1 else None
    biased = _BIASED_THROUGHOUT
    tied = settings.get("tie_word_embeddings")
    ffn = found["ffn"] or 4 * hidden
    window, full_every = _sliding_window(settings, family, found["window"], found["layers"] or 0)
    shape = ModelSpec(
        name=Path(where).parent.name or where, hub="", family=family, hidden=hidden, layers=found["layers"] or 0,
        heads=heads, kv_heads=kv_heads, head_dim=head_dim or hidden // heads, ffn=ffn,
        vocab=found["vocab"] or 0, positions=found["positions"] or 0, source=where, date="",
        tied=bool(tied) if isinstance(tied, bool) else family in _TIED,
        qkv_bias=(bool(settings.get("attention_bias")) and not found["kv_rank"]) or family in (*_BIASED, *biased),
        o_bias=family in (*biased, "gpt_oss"),
        mlp_bias=bool(settings.get("mlp_bias")) or family in (*biased, "gpt_oss"),
        norm_bias=family in biased, gated=family not in _UNGATED, learned_positions=family in _LEARNED_POSITIONS,
        qk_norm=family in _QK_NORM or (family == "glm4_moe" and settings.get("use_qk_norm") is True),
        q_rank=found["q_rank"] if found["kv_rank"] else None, kv_rank=found["kv_rank"],
        rope_dim=found["rope_dim"] if found["kv_rank"] else None, v_dim=found["v_dim"] if found["kv_rank"] else None,
        sinks=family == "gpt_oss", router_bias=family in _ROUTER_BIAS,
        stored=stored_as((settings.get("quantization_config") or {}).get("quant_method")
                         if isinstance(settings.get("quantization_config"), dict) else None),
        norms=4 if family in _FOUR_NORMS else 2, sliding_window=window, full_every=full_every,
        softcap=settings.get("attn_logit_softcapping") is not None,
        attention_dropout=bool(settings.get("attention_dropout") or settings.get("attn_pdrop")),
    )  # fmt: skip
    return shape if experts is None else _with_experts(shape, experts, found, settings, where)


def _sliding_window(
    settings: dict[str, Any], family: str, window: int | None, layers: int
) -> tuple[int | None, int | None]:
    """Its size, and every how many-th layer attends to the whole document (None: no layer), as transformers reads
    `use_sliding_window`, `layer_types`, `max_window_layers` and `sliding_window_pattern`."""
    used, types = settings.get("use_sliding_window"), settings.get("layer_types")
    first, pattern = settings.get("max_window_layers"), settings.get("sliding_window_pattern")
    if window is None or used is False:
        return None, None
    if isinstance(types, list) and types:
        windowed = types.count("sliding_attention")
        full = layers - min(layers, windowed)
    elif used is True and isinstance(first, int):  # the first layers attend to everything
        full = max(0, min(layers, first))
        windowed = layers - full
    elif used is None and family in _IGNORES_WINDOW:
        return None, None
    else:
        every = pattern if isinstance(pattern, int) and 0 < pattern <= layers else _FULL_EVERY.get(family)
        return window, every
    return (window, layers // full if full else None) if windowed else (None, None)


def _with_experts(
    shape: ModelSpec, experts: int, found: dict[str, int | None], settings: dict[str, Any], where: str
) -> ModelSpec:
    active = found["active_experts"]
    if active is None or active > experts:
        raise UserError(
            f"{where}: `num_experts_per_tok` is {active}, with {experts} experts; it must be 1 to {experts}"
        )
    expert_ffn = found["expert_ffn"] or shape.ffn
    if shape.family in ("llama4_text", "llama4"):  # its `intermediate_size` is that of an expert
        whole = settings.get("intermediate_size_mlp")
        ffn = whole if isinstance(whole, int) and 0 < whole <= _LARGEST["ffn"] else shape.ffn
        shape = replace(shape, ffn=ffn)
        settings = {**settings, "n_shared_experts": 1}
    shape = replace(shape, dense_layers=_dense_layers(settings, shape.layers) or None)
    shared = settings.get("n_shared_experts")
    size = settings.get("shared_expert_intermediate_size")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= _LARGEST["ffn"]:
        count = shared if isinstance(shared, int) and not isinstance(shared, bool) and 0 < shared < 1000 else 0
        size = count * expert_ffn or None
    coefficient: Any = settings.get("router_aux_loss_coef") if settings.get("output_router_logits") is True else 0.0
    shape = replace(shape, experts=experts, active_experts=active, expert_ffn=expert_ffn, shared_ffn=size)
    known = isinstance(coefficient, int | float) and 0 <= coefficient <= 1000
    return replace(shape, router_aux_loss_coef=float(coefficient)) if known else shape


def _dense_layers(settings: dict[str, Any], layers: int) -> int:
    """Layers without experts: the first ones, those that are listed, or all but every n-th."""

    def count(key: str) -> int:
        value = settings.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= layers else 0

    listed, sparse = settings.get("mlp_only_layers"), settings.get("moe_layers")
    if isinstance(sparse, list) and sparse:
        return max(0, layers - len(sparse))
    every = max(count("interleave_moe_layer_step"), count("decoder_sparse_step"), count("moe_layer_freq"), 1)
    first = count("first_k_dense_replace") + (len(listed) if isinstance(listed, list) else 0)
    return min(layers, first + (layers - first) - (layers - first) // every)


def _number(settings: dict[str, Any], key: str, where: str) -> int | None:
    """A whole number of a possible size, under any of its names; None where it is absent or null."""
    for name in _NAMES[key]:
        value = settings.get(name)
        if value is None:
            continue
        most = _LARGEST.get(key, 10_000_000_000)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
            if key in ("positions", "window"):  # little of a plan hangs on them
                return None
            raise UserError(
                f"{where}: `{name}` is {printable(repr(value))}: it must be a whole number from 1 to {most:,}"
            )
        return value
    return None
