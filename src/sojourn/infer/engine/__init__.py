"""The builtin engine: continuous batching over paged KV blocks, on CPUs and CUDA."""
