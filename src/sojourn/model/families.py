"""The families with fused forwards, by transformers' names, and the beginnings of their classes' names."""

FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}
