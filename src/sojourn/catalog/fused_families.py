"""Model families with fused forwards (model/kernels/fused_forwards.py), by transformers' `model_type`, with the prefix
of their classes' names."""

FUSED_FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}

# Their attention, RMSNorm and dense MLPs are fused; layers are transformers', and experts have kernels of their own.
FUSED_MIXTURES = {"qwen3_moe": "Qwen3Moe", "mixtral": "Mixtral"}
