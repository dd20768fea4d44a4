"""The same models, computed faster: forwards, kernels and numbers that transformers has no reason to have."""
