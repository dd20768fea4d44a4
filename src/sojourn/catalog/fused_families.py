"""Model families with fused forwards (model/kernels/fused_forwards.py), by transformers' `model_type`, with the prefix
of their classes' names."""

FUSED_FAMILIES = {
    "llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral", "smollm3": "SmolLM3",
    "gemma3_text": "Gemma3", "glm4": "Glm4", "phi3": "Phi3",
}  # fmt: skip
# Their decoder layers are Llama's but for norms of queries and keys, biases and RoPE: what Hopper kernels compute.
LAYERS_LIKE_LLAMA = ("llama", "qwen2", "qwen3", "mistral", "smollm3")

# Their attention, RMSNorm and dense MLPs are fused; layers are transformers', and experts have kernels of their own.
FUSED_MIXTURES = {"qwen3_moe": "Qwen3Moe", "mixtral": "Mixtral"}
