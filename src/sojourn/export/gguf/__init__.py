"""Writes models as GGUF files for llama.cpp and Ollama."""
