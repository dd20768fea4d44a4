"""Kernels for training on a CPU: kernels.c, its library, and the decoder layer and the loss that use it."""
