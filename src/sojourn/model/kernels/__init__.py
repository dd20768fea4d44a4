"""Faster computation of the same models: fused forwards, Triton kernels, FP8 and NF4 matmuls, kernels for Hopper."""
