"""The model families that Sojourn writes as GGUF: llama.cpp's architecture, and its name for every tensor.

One table serves both directions: the writer goes from transformers' names to llama.cpp's, the gate goes back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
_MODEL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_ATTENTION = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
_MLP = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
_FUSED_MLP = {"mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
_TWO_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_QK_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_PLAIN_LAYER = {**_TWO_NORMS, **_ATTENTION, **_MLP}
_ALL_BIASES = (*_ATTENTION.values(), *_MLP.values())
_QKV_BIASES = ("attn_q", "attn_k", "attn_v")


@dataclass(frozen=True)
class Family:
    """`layer`: names within a layer. `interleaves_rope`: llama.cpp rotates neighbouring rows of q and k, transformers
    rows half a head apart, so the rows are permuted. `norm_offset`: what the model adds to its norm weights. `biases`:
    layers whose bias llama.cpp loads. `free_head_dim`: it need not be hidden size / heads."""

    model_type: str
    architecture: str
    layer: dict[str, str]
    interleaves_rope: bool = False
    norm_offset: float = 0.0
    biases: tuple[str, ...] = _QKV_BIASES
    free_head_dim: bool = True

    def gguf_name(self, name: str) -> str | None:
        """llama.cpp's name for a tensor; None for one that it does not have."""
        module, _, kind = name.rpartition(".")
        if module in _MODEL:
            return f"{_MODEL[module]}.{kind}" if kind == "weight" else None
        parts = module.split(".", 3)
        if parts[:2] != ["model", "layers"] or len(parts) != 4 or parts[3] not in self.layer:
            return None
        if kind == "bias" and self.layer[parts[3]] not in self.biases:
            return None
        return f"blk.{int(parts[2])}.{self.layer[parts[3]]}.{kind}"

    def transformers_name(self, name: str) -> str | None:
        module, _, kind = name.rpartition(".")
        models = {ours: theirs for theirs, ours in _MODEL.items()}
        if module in models:
            return f"{models[module]}.{kind}"
        layers = {ours: theirs for theirs, ours in self.layer.items()}
        parts = module.split(".", 2)
        if len(parts) != 3 or parts[0] != "blk" or parts[2] not in layers:
            return None
        return f"model.layers.{parts[1]}.{layers[parts[2]]}.{kind}"

    def rope_heads(self, name: str, config: dict[str, Any]) -> int:
        """How many heads' rows are permuted in the tensor of this llama.cpp name; 0 for none."""
        part = name.split(".")[-2]
        if not self.interleaves_rope or part not in ("attn_q", "attn_k"):
            return 0
        heads = int(config["num_attention_heads"])
        return heads if part == "attn_q" else int(config.get("num_key_value_heads") or heads)


FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama", "llama", _PLAIN_LAYER, interleaves_rope=True, biases=_ALL_BIASES),
        Family("mistral", "llama", _PLAIN_LAYER, interleaves_rope=True, biases=_ALL_BIASES),
        Family("smollm3", "smollm3", _PLAIN_LAYER, interleaves_rope=True),
        Family("qwen2", "qwen2", _PLAIN_LAYER, free_head_dim=False),
        Family("qwen3", "qwen3", {**_TWO_NORMS, **_ATTENTION, **_QK_NORMS, **_MLP}),
        Family(
            "gemma3_text",
            "gemma3",
            {
                **{"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm"},
                **{"pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm"},
                **{**_ATTENTION, **_QK_NORMS, **_MLP},
            },
            norm_offset=1.0,
        ),
        Family(
            "phi3",
            "phi3",
            {
                **_TWO_NORMS,
                **{"self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output"},
                **_FUSED_MLP,
            },
            biases=("attn_qkv",),
            free_head_dim=False,
        ),
        Family(
            "glm4",
            "glm4",
            {
                **{"input_layernorm": "attn_norm", "post_self_attn_layernorm": "post_attention_norm"},
                **{"post_attention_layernorm": "ffn_norm", "post_mlp_layernorm": "post_ffw_norm"},
                **{**_ATTENTION, **_FUSED_MLP},
            },
        ),
        Family("glm", "chatglm", {**_TWO_NORMS, **_ATTENTION, **_FUSED_MLP}, free_head_dim=False),
    )
}


def interleave(rows: Tensor, heads: int) -> Tensor:
    """Rows of q or k in llama.cpp's order: the halves of each head, row by row in turn."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def deinterleave(rows: Tensor, heads: int) -> Tensor:
    """The inverse of `interleave`."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
