"""Quantized models: written by torchao, bitsandbytes or llm-compressor, and measured beside their source."""
