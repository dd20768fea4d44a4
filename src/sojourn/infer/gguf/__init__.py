"""GGUF files as llama.cpp reads them: metadata, weights under transformers' names, and the tokenizer."""
